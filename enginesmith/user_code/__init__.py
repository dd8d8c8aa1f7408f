"""Runs in the process of a user's code: finds and calls this code, and sends the results to the job.

>>> import hashlib, pathlib
>>> from enginesmith.user_code import load_function
>>> _ = pathlib.Path("after.py").write_text("def double(x):\\n    return {'y': 2 * x}\\n")
>>> digest = hashlib.sha256(pathlib.Path("after.py").read_bytes()).hexdigest()
>>> load_function(pathlib.Path("."), "after.py", "double", {"after.py": digest})({"x": 21})
{'y': array(42)}

Such a process imports `enginesmith` alone, as a serving process does, so that a user's own package `pipeline`,
`builders` or `validation` is the only one of its name there (docs/decisions/0013-user-code-in-its-own-process.md).
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.user_code.channel import load_function

__all__ = ["load_function"]

__getattr__ = on_first_use(__name__, {"load_function": "enginesmith.user_code.channel"})
