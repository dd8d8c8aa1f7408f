"""The drift of correct kernels that round otherwise, measured by running a graph with other roundings."""
