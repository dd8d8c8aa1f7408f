"""What a command or function crosses, and which commands have a test of their own."""

import ast

from tests.house.graphs import crossed, import_circles
from tests.house.tree import Function, Module, Tree


def count_circles(tree: Tree) -> int:
    """Import circles: groups of modules that import each other, lazily or for types too."""
    return len(import_circles(tree))


def count_contracts(tree: Tree) -> int:
    """Contracts of import-linter in pyproject.toml."""
    text = (tree.root / "pyproject.toml").read_text(encoding="utf-8")
    return text.count("[[tool.importlinter.contracts]]")


def count_pull_modules(tree: Tree) -> int:
    """Modules that the command `pull` crosses: whose code it names, or what it names does, and so on."""
    return len(crossed(tree, *_command(tree, "pull")))


def count_pull_rooms(tree: Tree) -> int:
    """Folders of these modules."""
    return len({tree.modules[name].room for name in crossed(tree, *_command(tree, "pull"))})


def count_functions_called_pull(tree: Tree) -> int:
    """Functions and methods called `pull`."""
    return sum(function.name == "pull" for _, function in tree.functions)


def count_publish_modules(tree: Tree) -> int:
    """Modules that `publish_version` crosses."""
    return len(crossed(tree, *_function(tree, "publish_version")))


def count_publish_rooms(tree: Tree) -> int:
    """Folders of these modules."""
    return len({tree.modules[name].room for name in crossed(tree, *_function(tree, "publish_version"))})


def count_untested_commands(tree: Tree) -> int:
    """Modules that define a click command without a test_NAME.py in the mirrored folder of tests/."""
    paths = {str(path) for path in tree.paths}
    commands = (module for module in tree.modules.values() if any(_is_command(f) for f in module.functions))
    return sum(f"tests/{module.room}/test_{module.path.stem}.py" not in paths for module in commands)


def _is_command(function: Function) -> bool:
    called = (ast.unparse(d.func) for d in function.decorator_list if isinstance(d, ast.Call))
    return any(name.endswith((".command", ".group")) for name in called)


def _command(tree: Tree, name: str) -> tuple[Module, Function]:
    return next((module, f) for module, f in tree.functions if f.name == name and _is_command(f))


def _function(tree: Tree, name: str) -> tuple[Module, Function]:
    return next((module, f) for module, f in tree.functions if f.name == name and f.name in module.definitions)
