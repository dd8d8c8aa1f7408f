"""What the tensors of a model hold, measured over samples."""
