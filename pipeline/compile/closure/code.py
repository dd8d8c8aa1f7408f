"""The code that a step's worker can reach, from the installed source.

What was computed is kept on this machine, because parsing the source takes half a second and reading the result a
hundredth: in `code/` of the local cache (`local_cache`), one small file for each set of functions. A file counts only
while every module that it was computed from is unchanged. It can be deleted at any time; where it cannot be written,
each process computes anew.
"""

import json
import pkgutil
import re
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from builders.backends import discovery
from enginesmith.core.errors import canonical_json, digest_of
from enginesmith.registry.store.cache import local_cache
from pipeline.compile import closure
from pipeline.compile.closure import Closure
from pipeline.compile.closure.definitions import PACKAGES, SourceFiles

# A function or class, or its name: 'package.module:name'.
Root = Callable[..., Any] | str
# Several threads ask for closures: one computes, the others wait. Two threads in `ast.parse` at once make CPython 3.11
# fail ("AST constructor recursion depth mismatch").
_LOCK = Lock()


def find_code(*roots: Root) -> Closure:
    """Code that functions can reach. roots: a step's worker function, and functions that it looks up by name.

    Raises EnginesmithError if the source cannot be read (`SourceFiles.read`).
    """
    with _LOCK:
        return _find(tuple(sorted({root_name(root) for root in roots})))


def backend_root(backend: str) -> str:
    """The class of a backend, which opens engines and is found by its entry point. Raises UnknownNameError."""
    return discovery.entry_point(backend)


def root_name(root: Root) -> str:
    """The root's name, as 'package.module:name'."""
    return root if isinstance(root, str) else f"{root.__module__}:{root.__qualname__}"


@lru_cache(maxsize=256)
def _find(roots: tuple[str, ...]) -> Closure:
    # A backend of another distribution is read like our own code.
    return remember_reach(roots, _sources(frozenset(re.split("[.:]", root)[0] for root in roots) - PACKAGES))


@lru_cache(maxsize=64)
def _sources(other_names: frozenset[str]) -> SourceFiles:
    return SourceFiles(other_names)


def remember_reach(roots: tuple[str, ...], sources: SourceFiles) -> Closure:
    """The result of `reach`, from the local cache if it is there."""
    cache = local_cache()
    if cache is None:
        return _reach(roots, sources)
    # Several installations share a cache, and the trees of several Pythons may differ.
    roots_digest = digest_of([roots, str(Path(__file__).parent), sys.version_info[:2]])
    path = cache.folder / "code" / f"{roots_digest}.json"
    # The code that computes it counts, too.
    code_digests = {
        name: sources.digest(name) for _, name, _ in pkgutil.iter_modules(closure.__path__, f"{__package__}.")
    }
    with suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged
        value: Any = json.loads(path.read_bytes())
        stored_closure = Closure(dict(value["modules"]), tuple(value["packages"]), dict(value["read"]))
        if stored_closure.read == {**{name: sources.digest(name) for name in stored_closure.read}, **code_digests}:
            return stored_closure
    new_closure = _reach(roots, sources)
    new_closure = replace(new_closure, read={**new_closure.read, **code_digests})
    temp_path = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp_path.write_bytes(canonical_json(asdict(new_closure)))
        temp_path.replace(path)
    return new_closure


def _reach(roots: tuple[str, ...], sources: SourceFiles) -> Closure:
    from pipeline.compile.closure.definitions import reach  # with Python's parser, which a cached run does without

    return reach(roots, sources)
