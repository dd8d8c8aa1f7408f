"""Follows channels on a serving node: looks, swaps, hooks, reports to rollouts."""
