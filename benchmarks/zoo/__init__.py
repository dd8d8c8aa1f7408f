"""Graphs out of packages, and modules with seeded weights, taken the whole way: `make zoo` writes docs/zoo.md."""
