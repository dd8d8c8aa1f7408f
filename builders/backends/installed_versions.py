"""Versions of installed distributions. Steps that load no backend record versions, too."""

import importlib.metadata
import os
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError as PackageNotFoundError


def version(name: str) -> str:
    """The installed version of a distribution. Raises PackageNotFoundError."""
    if version_text := versions_of(name).get(name):
        return version_text
    raise PackageNotFoundError(name)


def versions_of(*names: str, together: bool = False) -> dict[str, str]:
    """Name -> version of those distributions of `names` that are installed; with `together` none unless all are.

    A version is read anew only when something was installed or removed, which changes the folder that holds it: reading
    one parses its whole METADATA, a fraction of a millisecond, and planning a catalog asks tens of thousands of times.
    """
    path = tuple(sys.path)
    changed_ns = tuple(_changed_ns(folder or os.curdir) for folder in path)
    versions = {name: package_version for name in names if (package_version := _version(name, path, changed_ns))}
    return {} if together and len(versions) < len(names) else versions


@lru_cache(maxsize=512)
def _version(name: str, _path: tuple[str, ...], _changed_ns: tuple[int, ...]) -> str | None:
    try:
        return importlib.metadata.version(name)
    except PackageNotFoundError:
        return None


def _changed_ns(place: str) -> int:
    try:
        return os.stat(place).st_mtime_ns  # noqa: PTH116 - a path object for each would cost more than the rest
    except OSError:
        return 0
