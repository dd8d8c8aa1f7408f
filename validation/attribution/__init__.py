"""Finds the node that drifts: the error of each segment by itself, and small subsets of nodes that repair a graph."""
