"""Opening and running TensorRT engines."""
