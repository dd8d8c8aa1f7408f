"""What rounding an honest kernel may add to a graph, as values: an engine's limits follow from it."""
