"""Rollouts: a version that comes to a channel in waves; who is in a wave, its state, and what nodes report."""
