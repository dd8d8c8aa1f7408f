"""Compares two sessions on the same inputs: their drift as checks."""
