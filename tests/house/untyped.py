"""What types do not see: `Any`, keys of dicts that are read by name, jobs that are named by strings."""

import ast
import re

from tests.house.tree import Tree


def count_anys(tree: Tree) -> int:
    """The word `Any`, imports and prose too."""
    return sum(len(re.findall(r"\bAny\b", module.text)) for module in tree.modules.values())


def count_dicts_of_any(tree: Tree) -> int:
    """`dict[str, Any]` and `Mapping[str, Any]`."""
    return sum(len(re.findall(r"\b(?:dict|Mapping)\[str, Any\]", module.text)) for module in tree.modules.values())


def count_literal_subscripts(tree: Tree) -> int:
    """Reads of `x["literal"]`, in f-strings too."""
    return sum(_is_literal_read(node) for module in tree.modules.values() for node in module.nodes)


def count_jobs_by_name(tree: Tree) -> int:
    """Functions named by strings: literals `module:function` of a module of the tree (an f-string counts once)."""
    return len(_job_names(tree))


def count_loose_job_parameters(tree: Tree) -> int:
    """Parameters of such functions that are typed Json, dict, Mapping or Any."""
    named = {tuple(name.split(":")) for name in _job_names(tree)}
    loose = re.compile(r"\b(?:Json|dict|Mapping|Any)\b")
    return sum(
        bool(argument.annotation and loose.search(ast.unparse(argument.annotation)))
        for module, function in tree.functions
        if (module.name, function.name) in named
        for argument in (*function.args.args, *function.args.kwonlyargs)
    )


def _is_literal_read(node: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return False
    return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)


def _job_names(tree: Tree) -> set[str]:
    nodes = (node for module in tree.modules.values() for node in module.nodes if isinstance(node, ast.Constant))
    found = (node.value for node in nodes if isinstance(node.value, str))
    return {text for text in found if re.fullmatch(r"[\w.]+:\w*", text) and text.split(":")[0] in tree.modules}
