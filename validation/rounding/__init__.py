"""What rounding an honest kernel may add to a graph, measured on that very graph: an engine's limits follow from it."""
