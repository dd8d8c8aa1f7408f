"""The code in the process of a user's code: it finds and calls that code, and sends the results to the job.

Such a process imports `enginesmith` alone, as a serving process does, so that a user's own package `pipeline`,
`builders` or `validation` is the only one of its name there (docs/decisions/0013-user-code-in-its-own-process.md).
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.user_code.channel import load_function

__all__ = ["load_function"]

__getattr__ = on_first_use(__name__, {"load_function": "enginesmith.user_code.channel"})
