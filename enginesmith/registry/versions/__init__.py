"""Versions of a model: finding, publishing, channels, policies, history."""
