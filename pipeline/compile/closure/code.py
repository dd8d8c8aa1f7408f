"""The code that a step's worker can reach, from the source of what is installed."""

import re
from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any

from builders.backends import discovery
from pipeline.compile.closure.memory import remember_reach
from pipeline.compile.closure.sources import PACKAGES, SourceFiles
from pipeline.compile.closure.value import Closure

# A function or class, or its name: 'package.module:name'.
Root = Callable[..., Any] | str
# Steps are asked for in threads: what one computes the others wait for. And two threads in `ast.parse` at once make
# CPython 3.11 fail ("AST constructor recursion depth mismatch").
_LOCK = Lock()


def find_code(*roots: Root) -> Closure:
    """What functions can reach. roots: a step's worker function, and what it finds by a name at run time.

    Raises EngineryError where the source cannot be had (`Sources.read`).
    """
    with _LOCK:
        return _find(tuple(sorted({root_name(root) for root in roots})))


def backend_root(backend: str) -> str:
    """The class of a backend, which opens engines and is found by its entry point. Raises UnknownNameError."""
    return discovery.entry_point(backend)


def root_name(root: Root) -> str:
    """'package.module:name'."""
    return root if isinstance(root, str) else f"{root.__module__}:{root.__qualname__}"


@lru_cache(maxsize=256)
def _find(roots: tuple[str, ...]) -> Closure:
    # A backend of another distribution is read like our own code.
    return remember_reach(roots, _sources(frozenset(re.split("[.:]", root)[0] for root in roots) - PACKAGES))


@lru_cache(maxsize=64)
def _sources(others: frozenset[str]) -> SourceFiles:
    return SourceFiles(others)
