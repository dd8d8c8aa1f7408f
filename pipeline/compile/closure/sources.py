"""The source code of installed modules, found and read as Python's import system would, without importing them."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from typing import Any

from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.errors import EnginesmithError

# This distribution.
PACKAGES = frozenset({"builders", "validation", "pipeline", "enginesmith"})


@dataclass(frozen=True)
class SourceFile:
    """A module's source code. data: the bytes of its file, Python in UTF-8.  is_package: whether that is an `__init__`.

    is_compiled: whether it is an extension module, whose bytes are machine code.
    """

    data: bytes
    is_package: bool = False
    is_compiled: bool = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that is known of it."""
        return digest_of_bytes(b"%d %d " % (self.is_package, self.is_compiled) + self.data)


class SourceFiles:
    """The source code of this distribution and of other `packages`, by module name; each file is read once.

    A package may lie in a folder or in a zip file.
    """

    def __init__(self, packages: Iterable[str] = ()) -> None:
        self.packages = PACKAGES.union(packages)
        self._specs: dict[str, ModuleSpec | None] = {}
        self._read: dict[str, SourceFile | None] = {}

    def owns(self, module: str) -> bool:
        """Whether a module belongs to one of the packages; other code counts by its distribution's version."""
        return module.partition(".")[0] in self.packages

    def read(self, module: str) -> SourceFile | None:
        """A module's source; None where there is no such module. Raises EnginesmithError where there is only
        bytecode."""
        if module not in self._read:
            self._read[module] = self._find(module)
        return self._read[module]

    def digest(self, module: str) -> str | None:
        """The digest of a module's source; None where there is no such module. Raises as `read`."""
        source = self.read(module)
        return source.digest if source else None

    def _find(self, module: str) -> SourceFile | None:
        spec = self._spec(module) if self.owns(module) else None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        if spec.origin is None:  # a namespace package
            return SourceFile(b"", is_package)
        is_compiled = isinstance(spec.loader, ExtensionFileLoader)
        if not is_compiled and not spec.origin.endswith(".py"):
            raise EnginesmithError(
                f"{module} has no source code beside {spec.origin}; what a step depends on is read from the source: "
                "install the package with its .py files"
            )
        loader: Any = spec.loader
        return SourceFile(loader.get_data(spec.origin), is_package, is_compiled)

    def _spec(self, module: str) -> ModuleSpec | None:
        if module not in self._specs:
            parent = module.rpartition(".")[0]
            above = self._spec(parent) if parent else None
            if not parent:
                self._specs[module] = importlib.util.find_spec(module)
            elif above is None or above.submodule_search_locations is None:
                self._specs[module] = None
            else:
                self._specs[module] = PathFinder.find_spec(module, above.submodule_search_locations)
        return self._specs[module]
