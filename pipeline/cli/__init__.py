"""The commands that need more than the package `enginesmith`, which has the rest (`enginesmith.cli`)."""
