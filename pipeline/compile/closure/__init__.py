"""The code that a step's worker can reach, so that a step's key changes exactly when that code does.

`closure.sources.py` reads the source of modules without importing them, `closure.definitions.py` parses a module into its top-level
definitions, `closure.reach.py` follows the names from a function on, `closure.carriers.py` names what is left out and why, `closure.memory.py`
keeps what was computed (`closure.value.py`), `closure.code.py` is what the steps call.

Why it is so: docs/decisions/0011-computed-code-keys.md.
"""
