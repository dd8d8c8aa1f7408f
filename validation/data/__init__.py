"""Samples: real or generated inputs of a model, streamed from files."""
