"""A module's source as its top-level definitions: what each is (a digest) and what each refers to (names).

The digest of a definition is that of its syntax tree: comments, docstrings and layout do not count, and neither does a
definition that nothing refers to. What stands under `if TYPE_CHECKING:` is left out, since it never runs.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from enginesmith.core.digest import digest_of
from enginesmith.core.errors import EnginesmithError
from pipeline.compile.closure.sources import SourceFile

# What a module runs when it is imported, beside defining things.
BODY = ""
# 'package.module' or 'package.module:function', as jobs and `python -m` name code.
_NAMED = re.compile(r"\w+(?:\.\w+)+(?::\w*)?")

# A module, and the name in it; None stands for the module itself.
Target = tuple[str, str | None]
# What a name refers to; of a module only the attribute, where one is read.
Reference = tuple[Target, str | None]


@dataclass(frozen=True)
class Definition:
    """A function, class or constant. digest: of its syntax and of what the names in it are bound to.

    names: what it reads of its own module.  references: what it reads of what was imported.  imported: what its own
    import statements import.  texts: constants that may name code.
    """

    digest: str
    names: frozenset[str] = frozenset()
    references: frozenset[Reference] = frozenset()
    imported: frozenset[Target] = frozenset()
    texts: frozenset[str] = frozenset()


@dataclass
class Module:
    """A module's definitions by name, `BODY` among them; what its import statements bind, and what they import."""

    name: str
    definitions: dict[str, Definition] = field(default_factory=dict)
    bound: dict[str, set[Target]] = field(default_factory=dict)
    imported: set[Target] = field(default_factory=set)


def parse_module(name: str, source: SourceFile, owns: Callable[[str], bool]) -> Module:
    """The definitions of a module. Raises EnginesmithError where the source is not Python.

    A compiled extension module is one definition, of its bytes. owns: see `SourceFiles.owns`.
    """
    if source.is_compiled:
        return Module(name, {BODY: Definition(source.digest)})
    try:
        tree = ast.parse(source.data)
    except (SyntaxError, ValueError) as error:
        raise EnginesmithError(f"module {name} cannot be parsed: {error}; reinstall it") from error
    reader = _Reader(Module(name), name if source.is_package else name.rpartition(".")[0], owns)
    reader.read(tree.body)
    return reader.finish()


@dataclass
class _Draft:
    """A definition as its statements are read. tree: its syntax, flat.  reads: names, and attributes of names.

    bound: what its own import statements bind.
    """

    tree: list[str] = field(default_factory=list)
    reads: set[tuple[str, str | None]] = field(default_factory=set)
    bound: dict[str, set[Target]] = field(default_factory=dict)
    imported: set[Target] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    def finish(self, module: Module, defined: Collection[str]) -> Definition:
        """The definition. defined: names that the module defines; a local variable of such a name counts as it."""
        used = {(name, target) for name, _ in self.reads for target in module.bound.get(name, ())}
        references = {
            (target, attribute)
            for name, attribute in self.reads
            for table in (self.bound, module.bound)
            for target in table.get(name, ())
        }
        return Definition(
            digest_of([self.tree, sorted(used, key=str)]),
            frozenset(name for name, _ in self.reads if name in defined),
            frozenset(references),
            frozenset(self.imported),
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
                    self._bind(statement)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    # A decorator of this code base may put what it decorates into a table, others are known not to.
                    registered = any(self._is_ours(decorator) for decorator in statement.decorator_list)
                    self._take(statement, [statement.name, *([BODY] if registered else [])])
                case ast.Assign() | ast.AnnAssign():
                    self._take(statement, _find_assigned(statement))
                case ast.If() if _is_typing_only(statement):
                    self.read(statement.orelse)
                case _ if not _is_inert(statement):
                    self._take(statement, [BODY])
                    self._read_inside(statement)

    def _read_inside(self, statement: ast.stmt) -> None:
        """Take in what an `if` or a `try` defines for the module."""
        for block in (statement, *getattr(statement, "handlers", ())):
            for part in ("body", "orelse", "finalbody"):
                self.read(getattr(block, part, []))

    def _bind(self, statement: ast.Import | ast.ImportFrom) -> None:
        for name, target in self._targets(statement):
            self._module.imported.add(target)
            if name:
                self._module.bound.setdefault(name, set()).add(target)

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
            for item in node:
                if not _is_inert(item):
                    self._scan(item, into)
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
            for bound, target in self._targets(node):
                into.imported.add(target)
                if bound:
                    into.bound.setdefault(bound, set()).add(target)

    def _targets(self, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str | None, Target]]:
        """What an import statement binds, and to what."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname or "." not in alias.name:
                    yield alias.asname or alias.name, (alias.name, None)
                else:
                    yield alias.name.partition(".")[0], (alias.name.partition(".")[0], None)
                    yield None, (alias.name, None)
            return
        base = statement.module or ""
        if statement.level:
            above = self._package.split(".")[: len(self._package.split(".")) + 1 - statement.level]
            base = ".".join([*above, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            yield alias.asname or alias.name, (base, alias.name)


def _find_assigned(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that a statement defines; `BODY` where it changes something else."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    plain = all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
    return (
        [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)] if plain else [BODY]
    )


def _is_inert(node: Any) -> bool:
    """Whether a statement does nothing: a docstring, or what only type checkers read."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return _is_typing_only(node) and not node.orelse


def _is_typing_only(node: Any) -> bool:
    """Whether this is `if TYPE_CHECKING:`."""
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
