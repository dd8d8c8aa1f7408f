"""Typed jobs, each in a process of its own; executors on this host and on Ray."""
