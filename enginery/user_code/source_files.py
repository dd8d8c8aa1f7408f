"""The files that a model's Python entry point is made of, found without running any of it.

The cache key of an export digests these files, so they must be known in milliseconds and without importing torch:
imports are read from the syntax tree. What Python only finds out when it runs stays unseen:
`importlib.import_module(name)`, compiled extension modules, and data that the code opens itself. Weights have their own
place in the spec for that reason.
"""

import ast
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from enginery.core.errors import ModelError


def search_folders(root: Path, entry: Path) -> tuple[Path, ...]:
    """Where the entry point's absolute imports are looked for: its own folder, then the spec's. Both are resolved."""
    return tuple(dict.fromkeys((entry.resolve().parent, root.resolve())))


def source_files(root: Path, entry: Path) -> tuple[Path, ...]:
    """The entry file and every local module that it imports, directly or not, as sorted resolved paths.

    root: the spec's folder.  entry: the Python file, inside it.
    Raises ModelError for a file that is missing, outside `root`, or not Python.
    """
    folders = search_folders(root, entry)
    found: set[Path] = set()
    waiting = [entry]
    while waiting:
        file = _inside(root.resolve(), waiting.pop())
        if file not in found:
            found.add(file)
            waiting += _local_imports(file, folders)
    return tuple(sorted(found))


def imported_packages(root: Path, entry: Path) -> tuple[str, ...]:
    """Top-level names of what those files import from elsewhere, without the standard library; sorted.

    root, entry: as for `source_files`. What such a package imports in its turn stays unseen.
    """
    folders = search_folders(root, entry)
    names = {name.partition(".")[0] for file in source_files(root, entry) for name in _absolute_imports(_parse(file))}
    local = {name for name in names if any(any(_module_files(folder, name)) for folder in folders)}
    return tuple(sorted(names - local - sys.stdlib_module_names))


def _absolute_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _inside(root: Path, file: Path) -> Path:
    resolved = file.resolve()
    if not resolved.is_relative_to(root):
        raise ModelError(f"source file {str(file)!r} is outside the spec's folder {str(root)!r}; move it inside")
    if not resolved.is_file():
        raise ModelError(f"source file {str(file)!r} does not exist; correct source.torch in the spec")
    return resolved


def _local_imports(file: Path, folders: tuple[Path, ...]) -> Iterator[Path]:
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            for folder in folders:
                yield from (path for name in node.names for path in _module_files(folder, name.name))
        elif isinstance(node, ast.ImportFrom):
            names = _names_of(node)
            bases = file.parents[node.level - 1 : node.level] if node.level else folders
            yield from (path for base in bases for name in names for path in _module_files(base, name))


def _names_of(node: ast.ImportFrom) -> list[str]:
    """`from a import b` may mean the module a.b, or something inside module a."""
    prefix = f"{node.module}." if node.module else ""
    return [prefix + name.name for name in node.names if name.name != "*"] or [node.module or ""]


def _module_files(folder: Path, dotted: str) -> Iterator[Path]:
    """The files that importing a dotted name from a folder would run: each package on the way, and the module."""
    place = folder
    for part in dotted.split("."):
        place = place / part
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        line = getattr(error, "lineno", None) or 1
        version = platform.python_version()
        raise ModelError(
            f"{file}:{line}: not Python that version {version} can read: {error or 'nested too deeply'}"
        ) from error
