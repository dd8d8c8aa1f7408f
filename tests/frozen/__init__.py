"""A registry as an earlier commit wrote it, which every later commit must read: `registry.zip`.

`python -m tests.frozen` writes it anew. Do that only when a format's number changes, and keep the old file beside it.
"""
