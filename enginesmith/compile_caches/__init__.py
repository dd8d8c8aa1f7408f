"""Compile caches of torch as files: what is in one, the model it is for, and how a process starts warm out of it."""
