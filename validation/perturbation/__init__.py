"""The drift of correct kernels with other rounding, measured by running a graph with perturbed rounding."""
