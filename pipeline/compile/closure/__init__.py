"""The code that a step's worker can reach, so that a step's key changes exactly when that code does.

`sources.py` reads the source of modules without importing them, `definitions.py` parses a module into its top-level
definitions, `reach.py` follows the names from a function on, `carriers.py` names what is left out and why, `memory.py`
keeps what was computed (`value.py`), `code.py` is what the steps call.

Why it is so: docs/decisions/0011-computed-code-keys.md.
"""
