"""Writing a graph in another precision."""
