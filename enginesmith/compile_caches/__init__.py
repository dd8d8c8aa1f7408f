"""Compile caches of torch as files: their contents, their model, and warm starts of processes with them.

>>> from enginesmith.compile_caches import warm_start
>>> warm_start("engines/attachments/cache.attachment.json")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
enginesmith.core.errors.InputError: engines/attachments/cache.attachment.json is not a document of a compile cache ...
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.compile_caches.loading import warm_start

__all__ = ["warm_start"]

__getattr__ = on_first_use(__name__, {"warm_start": "enginesmith.compile_caches.loading"})
