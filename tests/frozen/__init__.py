"""What an earlier commit wrote, and every later commit must read: a registry, specs and files of users; and the names
that are promised from 0.1.0 (docs/reference/promises.md).

`python -m tests.frozen` writes them anew. Do that only when a format's number changes, and keep the old files beside
them: `registry.zip` becomes `registry-2.zip`, which `test_frozen.py` then reads too. `registry-1.zip` is of a59de369.
"""
