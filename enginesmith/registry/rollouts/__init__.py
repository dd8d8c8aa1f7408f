"""Rollouts: a version reaches a channel's nodes in waves. Nodes of a wave, the rollout's state, reports of nodes."""
