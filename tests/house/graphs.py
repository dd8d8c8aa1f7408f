"""What follows from the imports of a tree: circles, and the modules that a function can reach."""

import ast
from collections.abc import Iterator, Mapping

from tests.house.tree import Function, Module, Tree


def import_circles(tree: Tree) -> list[list[str]]:
    """Groups of two or more modules that import each other, also from inside functions and under TYPE_CHECKING.

    An import of a submodule is an edge to that submodule, and to its package only where a name is taken from it.
    """
    edges = {name: {to for to, _ in tree.imports(module).values()} - {name} for name, module in tree.modules.items()}
    return sorted(sorted(group) for group in _strong_components(edges) if len(group) > 1)


def crossed(tree: Tree, start: Module, function: Function) -> set[str]:
    """Modules with a function, class or constant that `function` names, or that what it names does, and so on.

    Named is what stands in the body, in annotations or in decorators: a name that the module defines or imports, or an
    attribute of an imported module. A class counts with all of its methods. Methods of a value of unknown type are not
    followed, so that this is a lower bound; both branches of each condition count, so that it is an upper one too.
    """
    seen: set[tuple[str, str]] = set()
    waiting: list[tuple[str, str]] = [(start.name, function.name)]
    imports = {name: tree.imports(module) for name, module in tree.modules.items()}
    while waiting:
        place = waiting.pop()
        if place in seen or not place[1]:
            continue
        seen.add(place)
        waiting.extend(_named(tree, imports, *place))
    return {module for module, name in seen if name in tree.modules[module].definitions}


def _named(
    tree: Tree, imports: Mapping[str, dict[str, tuple[str, str]]], home: str, name: str
) -> Iterator[tuple[str, str]]:
    definition = tree.modules[home].definitions.get(name)
    if definition is None:  # passed on by an import, as `__init__` files do
        if name in imports[home]:
            yield imports[home][name]
        return
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            yield imports[home].get(node.id, (home, node.id if node.id in tree.modules[home].definitions else ""))
        elif isinstance(node, ast.Attribute):
            module, inner = imports[home].get(ast.unparse(node.value), ("", ""))
            if module and not inner:
                yield module, node.attr


def _strong_components(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Tarjan's strongly connected components (SIAM J. Comput. 1, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for to in edges[node]:
            if to not in order:
                visit(to)
                low[node] = min(low[node], low[to])
            elif to in stack:
                low[node] = min(low[node], order[to])
        if low[node] == order[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in order:
            visit(node)
    return found
