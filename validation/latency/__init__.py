"""The latency of an engine on this machine, its uncertainty, and the parts of its time."""
