"""Imports the code that a version was published with: the very bytes whose digests its manifest names, and no other
file that lies beside them, whether source, compiled bytecode or library."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path, PurePosixPath

from enginesmith.core.errors import ModelError
from enginesmith.core.names import is_path
from enginesmith.descriptions import find_file, read_file


class _PublishedSource(SourceFileLoader):
    """Runs source that was read and checked before. data: its bytes."""

    def __init__(self, name: str, path: str, data: bytes) -> None:
        super().__init__(name, path)
        self._data = data

    def get_data(self, path: str) -> bytes:
        """The source. Raises OSError for any other file, such as bytecode."""
        if path != self.path:
            raise FileNotFoundError(path)
        return self._data

    def path_stats(self, path: str) -> Mapping[str, int]:
        """Raises OSError, so that no bytecode is looked for or written."""
        raise FileNotFoundError(path)


class PublishedModules:
    """Finds the modules of some files. files: bytes by path, relative to `root`.  folders: of absolute imports, below
    it."""

    def __init__(self, root: Path, files: Mapping[str, bytes], folders: tuple[str, ...]) -> None:
        self._root, self._files, self._folders = root, files, folders

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """The spec of a module, or of a folder of modules; None for any other."""
        module_path = name.replace(".", "/")
        for folder in self._folders:
            base_path = str(PurePosixPath(folder) / module_path)
            for file in (f"{base_path}/__init__.py", f"{base_path}.py"):
                if file in self._files:
                    path = self._root / file
                    loader = _PublishedSource(name, str(path), self._files[file])
                    return spec_from_file_location(name, path, loader=loader)
            if any(file.startswith(f"{base_path}/") for file in self._files):
                return ModuleSpec(name, None, is_package=True)
        return None


@contextmanager
def importing_published(root: Path, file: str, digests: Mapping[str, str]) -> Iterator[str]:
    """Let `import` find a version's modules; gives the name of the one in `file`. Afterwards they are forgotten.

    root: the folder of the files.  digests: SHA-256 of each file, by its path in that folder.
    Raises ModelError for a file that is not among them, or has the name of a module that is loaded already; DataError
    for one that cannot be read, IntegrityError for other bytes than were published.
    """
    if file not in digests or not file.endswith(".py"):
        raise ModelError(f"{root / file} is none of the published files: {', '.join(sorted(digests))}; pull it again")
    if invalid_path := next((name for name in digests if not is_path(name)), None):
        raise ModelError(f"{invalid_path[:80]!r} is no path of a file in {root}; do not load it")
    files = {name: read_file(find_file(root, name), digest) for name, digest in digests.items()}
    folders = tuple(dict.fromkeys((str(PurePosixPath(file).parent), ".")))
    finder = PublishedModules(root, files, folders)
    for path in map(PurePosixPath, files):
        module_path = path.parent if path.name == "__init__.py" else path
        name = module_path.stem
        if str(module_path.parent) in folders and name in sys.modules:
            raise ModelError(f"{root / path} has the name of {name!r}, a module that is loaded already; rename it")
    earlier_modules = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield PurePosixPath(file).stem
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - earlier_modules:
            if finder.find_spec(name):
                del sys.modules[name]
