"""Plugins: shared libraries that teach TensorRT operators of their own.

They are named by path, on the machine that builds and on each that runs the engine. A library is code that runs in the
builder's and the server's process, so its digest is part of the build key (as part of the toolchain): another library
under the same path is another engine, and a worker whose library differs refuses to build.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from enginery.core.digest import digest_of_file
from enginery.core.errors import EngineryError
from enginery.core.untyped import Untyped

KEY = "plugin "


def paths(option: str) -> tuple[str, ...]:
    """The libraries of the option: paths with commas between them."""
    return tuple(path for part in option.split(",") if (path := part.strip()))


def digests(libraries: Iterable[str]) -> dict[str, str]:
    """'plugin PATH' -> digest of each library, 'absent' for one that is not there: entries of a toolchain."""
    return {f"{KEY}{path}": _digest(path) for path in libraries}


def on_record(toolchain: Mapping[str, str]) -> list[tuple[str, str]]:
    """(path, digest) of each library of a toolchain."""
    return [(name.removeprefix(KEY), digest) for name, digest in toolchain.items() if name.startswith(KEY)]


def find_missing_library(libraries: Iterable[str], option: str) -> str | None:
    """The first library that is not there, in words."""
    path = next((path for path in libraries if not Path(path).is_file()), None)
    return path and f"plugin library {path} is not on this machine; put it there, or correct {option}"


def load(registry: Untyped, libraries: Iterable[str]) -> None:
    """Load the libraries into TensorRT's plugin registry. Raises EngineryError naming the one that cannot be."""
    for path in libraries:
        if registry.load_library(path) is None:
            raise EngineryError(
                f"plugin library {path} cannot be loaded, or its plugins are registered already; it must be built for "
                "this release of TensorRT"
            )


def _digest(path: str) -> str:
    try:
        found = os.stat(path)  # noqa: PTH116 - asked for every unit of a plan
    except OSError:
        return "absent"
    return "absent" if not stat.S_ISREG(found.st_mode) else _read(path, found.st_mtime_ns, found.st_size)


@lru_cache(64)
def _read(path: str, _changed_ns: int, _size: int) -> str:
    return digest_of_file(Path(path))
