"""The worker's side of the operations."""
