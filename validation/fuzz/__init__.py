"""Fuzzing: seeded shapes and values for an engine, whose outputs are compared with the graph it was built from."""
