"""The definitions that a function can reach: by the names that it reads, by what those read, and so on.

More is reached than what runs, never less. A class counts whole, whichever method is called. A module that is passed as
a value counts whole. A text that names a module or a function of ours counts as a reference to it. What runs when a
module is imported counts for every module that is imported on the way. What is not seen: code that is found by a name
that is put together when the program runs; `code.py` says what stands for it.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from enginesmith.core.digest import digest_of
from enginesmith.core.errors import EnginesmithError
from pipeline.compile.closure import Closure
from pipeline.compile.closure.definitions import BODY, Definition, Module, Target, parse_module
from pipeline.compile.closure.sources import SourceFile, SourceFiles

# What a step's worker calls and its key leaves out, because it decides nothing of what the step gives: room or module,
# and why. tests/pipeline/compile/closure/test_carriers.py holds each of them to that. Progress, displays, pages and
# commands need not be named: no worker's function reaches them.
CARRIERS = {
    "enginesmith.registry": "carries bytes: a blob is read by the SHA-256 of its content, which the request names"
}


def is_carrier(module: str) -> bool:
    """Whether a module is left out of every key."""
    return any(module == carrier or module.startswith(f"{carrier}.") for carrier in CARRIERS)


def reach(roots: Iterable[str], sources: SourceFiles) -> Closure:
    """What the functions or classes `roots` ('package.module:name') can reach, carriers left out.

    Raises EnginesmithError for a root that is not there, and as `SourceFiles.read`.
    """
    walk = _walk(roots, sources)
    modules = {module: digest_of(definitions) for module, definitions in sorted(walk.found.items())}
    packages = sorted(walk.packages - sys.stdlib_module_names)
    return Closure(modules, tuple(packages), {name: sources.digest(name) for name in walk.modules})


def reach_definitions(roots: Iterable[str], sources: SourceFiles) -> Mapping[str, Collection[str]]:
    """The names of what `reach` reaches, by module. Raises as `reach`."""
    return {module: definitions.keys() for module, definitions in _walk(roots, sources).found.items()}


def _walk(roots: Iterable[str], sources: SourceFiles) -> "_ReachWalk":
    walk = _ReachWalk(sources)
    for root in roots:
        walk.start(root)
    walk.finish()
    return walk


@lru_cache(maxsize=4096)
def _parse(module: str, source: SourceFile, packages: frozenset[str]) -> Module:
    return parse_module(module, source, lambda name: name.partition(".")[0] in packages)


class _ReachWalk:
    """found: what was reached, by module and name, with a digest of each.  packages: of others.

    modules: what was looked at.
    """

    def __init__(self, sources: SourceFiles) -> None:
        self.found: dict[str, dict[str, str]] = defaultdict(dict)
        self.packages: set[str] = set()
        self.modules: dict[str, Module | None] = {}
        self._sources = sources
        self._todo: list[tuple[Module, Definition]] = []
        self._run: set[str] = set()
        self._referred: set[tuple[Target, str | None]] = set()

    def start(self, root: str) -> None:
        """Reach a root."""
        module, _, name = root.partition(":")
        if not self._refer((module, name.partition(".")[0])):
            raise EnginesmithError(f"{root} is not there; reinstall the package that it belongs to")

    def finish(self) -> None:
        """Reach what the roots refer to."""
        while self._todo:
            self._follow(*self._todo.pop())

    def _module(self, name: str) -> Module | None:
        """A module of ours that is no carrier."""
        if not self._sources.owns(name) or is_carrier(name):
            return None
        if name not in self.modules:
            source = self._sources.read(name)
            self.modules[name] = _parse(name, source, self._sources.packages) if source else None
        return self.modules[name]

    def _follow(self, module: Module, definition: Definition) -> None:
        for target in definition.imported:
            self._import(target)
        for name in definition.names:
            self._add(module, name)
        for reference in definition.references:
            self._refer(*reference)
        for text in definition.texts:
            place, _, name = text.partition(":")
            if self._module(place):
                self._refer((place, name or None))

    def _refer(self, target: Target, attribute: str | None = None) -> bool:
        """Reach what a name stands for; of a module only `attribute`, or all of it. Whether it is ours."""
        module, name = target
        if not self._sources.owns(module):
            self.packages.add(module.partition(".")[0])
        found = self._module(module)
        if found is None or (target, attribute) in self._referred:
            return found is not None
        self._referred.add((target, attribute))
        self._execute(found)
        if name is None:
            return self._reach_into(found, attribute)
        if name in found.bound:
            self.found[module][f"{name} of"] = digest_of(sorted(found.bound[name], key=str))
            for bound in found.bound[name]:
                self._refer(bound, attribute)
        if name in found.definitions:
            self._add(found, name)
        if name in found.bound or name in found.definitions:
            return True
        inner = self._module(f"{module}.{name}")
        if inner is not None:
            self._execute(inner)
            return self._reach_into(inner, attribute)
        return "__getattr__" in found.definitions and self._add(found, "__getattr__")

    def _reach_into(self, module: Module, attribute: str | None) -> bool:
        for name in [attribute] if attribute else [*module.definitions, *module.bound]:
            self._refer((module.name, name))
        return True

    def _add(self, module: Module, name: str) -> bool:
        if name not in self.found[module.name]:
            self.found[module.name][name] = module.definitions[name].digest
            self._todo.append((module, module.definitions[name]))
        return True

    def _execute(self, module: Module) -> None:
        """Reach what runs when a module is imported: its body, and those of what it imports."""
        if module.name in self._run:
            return
        self._run.add(module.name)
        if BODY in module.definitions:
            self._add(module, BODY)
        self._import((module.name.rpartition(".")[0], None))
        for target in module.imported:
            self._import(target)

    def _import(self, target: Target) -> None:
        module, name = target
        found = self._module(module) if module else None
        if found is None:
            return
        self._execute(found)
        if name and name not in found.definitions and name not in found.bound:
            inner = self._module(f"{module}.{name}")
            if inner is not None:
                self._execute(inner)
