"""A first spec for a model that is already there, written by looking at it: `enginesmith init MODEL`."""
