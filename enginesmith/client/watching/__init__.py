"""Follows channels on a serving node: polls, swaps, hooks, reports to rollouts."""
