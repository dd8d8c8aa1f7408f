"""Ensembles: data for the later graphs, the proof from end to end, and the version that pins one of each graph."""
