"""The files that a model's Python entry point is made of, found without running any of it.

The cache key of an export digests these files, so they must be known in milliseconds and without importing torch:
imports are read from the syntax tree. What Python only finds out when it runs stays unseen:
`importlib.import_module(name)`, compiled extension modules, and data that the code opens itself. Weights have their own
place in the spec for that reason.
"""

import ast
import platform
from collections.abc import Iterator
from pathlib import Path

from builders.errors import ModelError


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
            bases = (file.parents[node.level - 1],) if node.level else folders
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
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        version = platform.python_version()
        raise ModelError(f"{file}:{line}: not Python that version {version} can read: {error}") from error
