"""The client of serving nodes: resolve, pull, watch."""
