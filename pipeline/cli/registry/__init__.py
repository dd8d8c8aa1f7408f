"""Commands of the registry and of serving nodes."""
