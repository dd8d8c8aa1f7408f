"""The definitions that a function reaches, read from syntax trees."""

import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from typing import Any

from enginesmith.core.errors import EnginesmithError, digest_of, digest_of_bytes
from pipeline.compile.closure import Closure

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
        """SHA-256 of all its fields."""
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
        """A module's source; None without such a module. Raises EnginesmithError where there is only bytecode."""
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
            parent_spec = self._spec(parent) if parent else None
            if not parent:
                self._specs[module] = importlib.util.find_spec(module)
            elif parent_spec is None or parent_spec.submodule_search_locations is None:
                self._specs[module] = None
            else:
                self._specs[module] = PathFinder.find_spec(module, parent_spec.submodule_search_locations)
        return self._specs[module]


# The digest of a definition is that of its syntax tree: comments, docstrings and layout do not count, and neither does
# a definition that nothing refers to. What stands under `if TYPE_CHECKING:` is left out, since it never runs.

# Statements that a module runs on import, except definitions.
BODY = ""
# 'package.module' or 'package.module:function', as jobs and `python -m` name code.
_NAMED = re.compile(r"\w+(?:\.\w+)+(?::\w*)?")

# A module, and the name in it; None stands for the module itself.
Target = tuple[str, str | None]
# The definition that a name refers to; of a module, only the attribute that is read.
Reference = tuple[Target, str | None]


@dataclass(frozen=True)
class Definition:
    """A function, class or constant. digest: of its syntax and of what imports bind its names to.

    names: names of its module that it reads.  references: imported definitions that it reads.  imports: what its own
    import statements import.  texts: constants that may name code."""

    digest: str
    names: frozenset[str] = frozenset()
    references: frozenset[Reference] = frozenset()
    imports: frozenset[Target] = frozenset()
    texts: frozenset[str] = frozenset()


@dataclass
class Module:
    """A module's definitions by name, `BODY` among them; what its import statements bind, and what they import."""

    name: str
    definitions: dict[str, Definition] = field(default_factory=dict)
    bound: dict[str, set[Target]] = field(default_factory=dict)
    imports: set[Target] = field(default_factory=set)


@dataclass
class _Draft:
    """A definition while its statements are read. tree: its syntax, flattened.  reads: names, and attributes of names.

    bound: targets of its own import statements, by local name.
    """

    tree: list[str] = field(default_factory=list)
    reads: set[tuple[str, str | None]] = field(default_factory=set)
    bound: dict[str, set[Target]] = field(default_factory=dict)
    imports: set[Target] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    def finish(self, module: Module, defined_names: Collection[str]) -> Definition:
        """The definition. defined_names: names that the module defines; a local of such a name counts as it."""
        used_targets = {(name, target) for name, _ in self.reads for target in module.bound.get(name, ())}
        references = {
            (target, attribute)
            for name, attribute in self.reads
            for bindings in (self.bound, module.bound)
            for target in bindings.get(name, ())
        }
        return Definition(
            digest_of([self.tree, sorted(used_targets, key=str)]),
            frozenset(name for name, _ in self.reads if name in defined_names),
            frozenset(references),
            frozenset(self.imports),
            frozenset(self.texts),
        )


class _Reader:
    """Reads the statements of a module. package: what relative imports start from.  owns: see `SourceFiles.owns`."""

    def __init__(self, module: Module, package: str, owns: Callable[[str], bool]) -> None:
        self._module, self._package, self._owns = module, package, owns
        self._drafts = defaultdict[str, _Draft](_Draft)

    def read(self, statements: list[ast.stmt]) -> None:
        """Take in top-level statements."""
        for statement in statements:
            match statement:
                case ast.Import() | ast.ImportFrom():
                    for name, target in self._targets(statement):
                        self._module.imports.add(target)
                        if name:
                            self._module.bound.setdefault(name, set()).add(target)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    # A decorator of this code base may put what it decorates into a table, others are known not to.
                    is_registered = any(self._is_ours(decorator) for decorator in statement.decorator_list)
                    self._take(statement, [statement.name, *([BODY] if is_registered else [])])
                case ast.Assign() | ast.AnnAssign():
                    self._take(statement, _find_assigned(statement))
                case ast.If() if _is_typing_only(statement):
                    self.read(statement.orelse)
                case _ if not _is_inert(statement):
                    self._take(statement, [BODY])
                    self._read_inside(statement)

    def _read_inside(self, statement: ast.stmt) -> None:
        """Take in what an `if` or a `try` defines for the module."""
        for clause in (statement, *getattr(statement, "handlers", ())):
            for field_name in ("body", "orelse", "finalbody"):
                self.read(getattr(clause, field_name, []))

    def finish(self) -> Module:
        """The module."""
        drafts = self._drafts
        self._module.definitions |= {name: draft.finish(self._module, drafts) for name, draft in drafts.items()}
        return self._module

    def _is_ours(self, decorator: ast.expr) -> bool:
        while isinstance(decorator, ast.Call | ast.Attribute):
            decorator = decorator.func if isinstance(decorator, ast.Call) else decorator.value
        if not isinstance(decorator, ast.Name):
            return True
        return decorator.id in self._drafts or any(
            self._owns(module) for module, _ in self._module.bound.get(decorator.id, ())
        )

    def _take(self, statement: ast.stmt, names: list[str]) -> None:
        for name in names:
            self._scan(statement, self._drafts[name])

    def _scan(self, node: Any, into: _Draft) -> None:
        """Take in a syntax tree. Fields that are empty are left out, so that trees of several Pythons are equal."""
        if isinstance(node, list):
            into.tree.append("[")
            for child in node:
                if not _is_inert(child):
                    self._scan(child, into)
            into.tree.append("]")
        elif isinstance(node, ast.Name):
            into.reads.add((node.id, None))
            into.tree.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            into.reads.add((node.value.id, node.attr))
            into.tree.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.AST):
            self._note(node, into)
            into.tree.append(f"({type(node).__name__}")
            for name, value in ast.iter_fields(node):
                if value is not None and value != [] and name != "ctx":
                    into.tree.append(name)
                    self._scan(value, into)
            into.tree.append(")")
        else:
            into.tree.append(repr(node))

    def _note(self, node: ast.AST, into: _Draft) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            into.texts.add(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for local_name, target in self._targets(node):
                into.imports.add(target)
                if local_name:
                    into.bound.setdefault(local_name, set()).add(target)

    def _targets(self, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str | None, Target]]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname or "." not in alias.name:
                    yield alias.asname or alias.name, (alias.name, None)
                else:
                    yield alias.name.partition(".")[0], (alias.name.partition(".")[0], None)
                    yield None, (alias.name, None)
            return
        base_module = statement.module or ""
        if statement.level:
            parent_parts = self._package.split(".")[: len(self._package.split(".")) + 1 - statement.level]
            base_module = ".".join([*parent_parts, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            yield alias.asname or alias.name, (base_module, alias.name)


def _find_assigned(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that a statement defines; `BODY` where it changes something else."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    is_plain = all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
    return (
        [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        if is_plain
        else [BODY]
    )


def _is_inert(node: Any) -> bool:
    """Whether a statement does nothing: a docstring, or what only type checkers read."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return _is_typing_only(node) and not node.orelse


def _is_typing_only(node: Any) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


# The definitions that a function can reach: those whose names it reads, those that these read, and so on.
#
# The result includes more code than runs, never less. A class counts whole, whichever method is called. A module that
# is passed as a value counts whole. A text that names one of our modules or functions counts as a reference to it. For
# each imported module, the code that runs on import counts. Code whose name is composed at run time is not found;
# callers of `find_code` name such code among the roots.

# Code that workers call and that keys leave out, because it does not affect a step's result: package or module, and
# the reason. tests/pipeline/compile/closure/test_carriers.py checks each. Progress, displays, pages and commands need
# no entry: no worker's function reaches them.
CARRIERS = {
    "enginesmith.registry": "carries bytes: a blob is read by the SHA-256 of its content, which the request names"
}


def is_carrier(module: str) -> bool:
    """Whether a module is left out of every key."""
    return any(module == carrier or module.startswith(f"{carrier}.") for carrier in CARRIERS)


def reach(roots: Iterable[str], sources: SourceFiles) -> Closure:
    """Code that the functions or classes `roots` ('package.module:name') can reach, without carriers.

    Raises EnginesmithError for a root that is not there, and as `SourceFiles.read`.
    """
    walk = _walk(roots, sources)
    modules = {module: digest_of(definitions) for module, definitions in sorted(walk.found.items())}
    packages = sorted(walk.packages - sys.stdlib_module_names)
    return Closure(modules, tuple(packages), {name: sources.digest(name) for name in walk.modules})


def _walk(roots: Iterable[str], sources: SourceFiles) -> "_ReachWalk":
    walk = _ReachWalk(sources)
    for root in roots:
        walk.start(root)
    walk.finish()
    return walk


@lru_cache(maxsize=4096)
def _parse(module: str, source: SourceFile, packages: frozenset[str]) -> Module:
    # A compiled extension module is one definition, of its bytes.
    if source.is_compiled:
        return Module(module, {BODY: Definition(source.digest)})
    try:
        tree = ast.parse(source.data)
    except (SyntaxError, ValueError) as error:
        raise EnginesmithError(f"module {module} cannot be parsed: {error}; reinstall it") from error
    reader = _Reader(
        Module(module),
        module if source.is_package else module.rpartition(".")[0],
        lambda name: name.partition(".")[0] in packages,
    )
    reader.read(tree.body)
    return reader.finish()


class _ReachWalk:
    """found: what was reached, by module and name, with a digest of each.  packages: of others."""

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
            raise EnginesmithError(f"{root} does not exist; reinstall the package that it belongs to")

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
        for target in definition.imports:
            self._import(target)
        for name in definition.names:
            self._add(module, name)
        for reference in definition.references:
            self._refer(*reference)
        for text in definition.texts:
            module_name, _, name = text.partition(":")
            if self._module(module_name):
                self._refer((module_name, name or None))

    def _refer(self, target: Target, attribute: str | None = None) -> bool:
        """Reach the definition of a name; of a module only `attribute`, or all of it. Returns whether it is ours."""
        module, name = target
        if not self._sources.owns(module):
            self.packages.add(module.partition(".")[0])
        target_module = self._module(module)
        if target_module is None or (target, attribute) in self._referred:
            return target_module is not None
        self._referred.add((target, attribute))
        self._execute(target_module)
        if name is None:
            return self._reach_into(target_module, attribute)
        if name in target_module.bound:
            self.found[module][f"{name} of"] = digest_of(sorted(target_module.bound[name], key=str))
            for binding in target_module.bound[name]:
                self._refer(binding, attribute)
        if name in target_module.definitions:
            self._add(target_module, name)
        if name in target_module.bound or name in target_module.definitions:
            return True
        inner_module = self._module(f"{module}.{name}")
        if inner_module is not None:
            self._execute(inner_module)
            return self._reach_into(inner_module, attribute)
        return "__getattr__" in target_module.definitions and self._add(target_module, "__getattr__")

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
        """Follow the code that runs when a module is imported: its body, and the bodies of its imports."""
        if module.name in self._run:
            return
        self._run.add(module.name)
        if BODY in module.definitions:
            self._add(module, BODY)
        self._import((module.name.rpartition(".")[0], None))
        for target in module.imports:
            self._import(target)

    def _import(self, target: Target) -> None:
        module, name = target
        target_module = self._module(module) if module else None
        if target_module is None:
            return
        self._execute(target_module)
        if name and name not in target_module.definitions and name not in target_module.bound:
            inner_module = self._module(f"{module}.{name}")
            if inner_module is not None:
                self._execute(inner_module)
