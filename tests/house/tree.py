"""The Python files of one checkout as syntax trees, and what each module imports and defines.

Only the standard library and git are used, so that any checkout can be read, whatever is installed.
"""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

Function = ast.FunctionDef | ast.AsyncFunctionDef
PACKAGES = ("enginesmith", "builders", "validation", "pipeline")


@dataclass(frozen=True)
class Module:
    """A Python file: its path in the checkout, its text and its syntax tree."""

    path: PurePosixPath
    text: str

    @property
    def name(self) -> str:
        """Its dotted name: `enginesmith.registry` for `enginesmith/registry/__init__.py`."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """Its folder."""
        return str(self.path.parent)

    @property
    def package(self) -> str:
        """Its top folder."""
        return self.path.parts[0]

    @property
    def lines(self) -> int:
        """How many lines its file has."""
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of its syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones too."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """Functions, classes and assignments of its top level by name."""
        found: dict[str, ast.stmt] = {}
        for node in self.nodes[0].body:  # type: ignore[attr-defined]
            for name in _names_of(node):
                found[name] = node
        return found


@dataclass(frozen=True)
class Tree:
    """A checkout: the modules of the four packages, and the paths of all tracked files."""

    root: Path
    paths: tuple[PurePosixPath, ...]

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """The files below `root` that git tracks or would track. Raises CalledProcessError where git knows none."""
        command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        return cls(root, tuple(sorted(PurePosixPath(path) for path in listed if path and (root / path).is_file())))

    def text(self, path: PurePosixPath) -> str:
        """The content of a file."""
        return (self.root / path).read_text(encoding="utf-8")

    @cached_property
    def modules(self) -> dict[str, Module]:
        """The modules of the four packages by dotted name."""
        files = (path for path in self.paths if path.suffix == ".py" and path.parts[0] in PACKAGES)
        found = (Module(path, self.text(path)) for path in files)
        return {module.name: module for module in found}

    @cached_property
    def functions(self) -> list[tuple[Module, Function]]:
        """Every function and method with its module."""
        return [(module, function) for module in self.modules.values() for function in module.functions]

    def imports(self, module: Module, within: ast.AST | None = None) -> dict[str, tuple[str, str]]:
        """(module, name in it) by local name, of the imports of modules of this tree; '' where the module itself is
        bound. within: only the imports below that node; else all, also those inside functions and TYPE_CHECKING."""
        found: dict[str, tuple[str, str]] = {}
        for node in module.nodes if within is None else ast.walk(within):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.modules:
                        found[alias.asname or alias.name] = (alias.name, "")
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in self.modules:
                        found[alias.asname or alias.name] = (whole, "")
                    elif node.module in self.modules:
                        found[alias.asname or alias.name] = (node.module, alias.name)
        return found


def _names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
