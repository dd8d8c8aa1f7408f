"""Finds the node that drifts: the error of each segment alone, and small sets of nodes to leave in float."""
