"""How one engine is built and opened, on this host or on a Ray worker with the right GPU."""
