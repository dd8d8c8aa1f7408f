"""Drafts of specs: `enginesmith init MODEL` inspects an existing model and writes its first spec."""
