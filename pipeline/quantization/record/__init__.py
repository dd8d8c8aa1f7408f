"""What quantizing a model did to it, tensor by tensor, read from the graph that was written."""
