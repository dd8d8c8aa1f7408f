"""Builds that a spec's arrival or a catalog starts."""
