"""Versions of installed distributions, read anew only when something was installed or removed.

Reading one takes a fraction of a millisecond (its whole METADATA is parsed), and planning a catalog asks tens of
thousands of times. Whoever installs or removes a distribution changes the folder that holds it.
"""

import importlib.metadata
import os
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError

__all__ = ["PackageNotFoundError", "version"]

Stamp = tuple[int, ...]


def version(name: str) -> str:
    """The installed version of a distribution. Raises PackageNotFoundError."""
    found = _version(name, tuple(sys.path), _stamp())
    if found is None:
        raise PackageNotFoundError(name)
    return found


@lru_cache(maxsize=512)
def _version(name: str, _path: tuple[str, ...], _stamp: Stamp) -> str | None:
    try:
        return importlib.metadata.version(name)
    except PackageNotFoundError:
        return None


def _stamp() -> Stamp:
    """When the folders that Python imports from were last changed."""
    return tuple(_changed_ns(place or os.curdir) for place in sys.path)


def _changed_ns(place: str) -> int:
    try:
        return os.stat(place).st_mtime_ns  # noqa: PTH116 - a path object for each would cost more than the rest
    except OSError:
        return 0
