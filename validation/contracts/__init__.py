"""What an engine promises beside being near its graph: equal bits, and the form and distribution of its outputs."""
