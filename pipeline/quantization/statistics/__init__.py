"""Statistics of a model's tensors, measured over samples."""
