"""Names and docstrings: what is defined twice, what is no verb, what a docstring leaves out."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.house.tree import Tree

# Past forms of verbs that do not end in -ed, and words that end like a participle and are none.
_IRREGULAR = frozenset(
    """begun bound brought built caught chosen drawn driven fed felt found frozen given gone grown heard held hidden
    kept known led left lent lost made meant met proven said seen sent shown sold spent stood sworn taken taught told
    thought thrown torn unbound understood unfrozen unmet withdrawn won worn written""".split()  # noqa: SIM905
)
_OTHERS = frozenset("bring embed exceed feed need ping proceed ring seed speed string".split())  # noqa: SIM905
_ERROR = re.compile(r"\b[Rr]aises?\b|\b[A-Z]\w+Error\b|\bRefused\w*\b")
_SHAPE = re.compile(r"\bshapes?\b|[\[(](?:\w+, ?)+(?:\w+|\.\.\.)[\])]|\bfloat(?:16|32|64)\b|\bu?int\d+\b|\bdtype\b")


def count_repeated_class_names(tree: Tree) -> int:
    """Class names that are defined more than once."""
    return sum(count > 1 for count in classes_by_name(tree).values())


def count_public_participles(tree: Tree) -> int:
    """Public functions named by a participle alone (heuristic: it ends in -ed or -ing, or is a listed one)."""
    return sum(is_participle(function.name) for _, function in tree.functions if function.name[0] != "_")


def count_private_participles(tree: Tree) -> int:
    """Private functions named so."""
    return sum(is_participle(function.name) for _, function in tree.functions if function.name[0] == "_")


def count_docstrings(tree: Tree) -> int:
    """Docstrings of public functions and methods."""
    return sum(1 for _ in _public_docstrings(tree))


def count_docstrings_with_errors(tree: Tree) -> int:
    """Of these, such as name an error (`Raises`, `...Error`)."""
    return sum(bool(_ERROR.search(text)) for text in _public_docstrings(tree))


def count_docstrings_with_shapes(tree: Tree) -> int:
    """Of these, such as name a shape or dtype (the word, `[n, c]`, `float32`)."""
    return sum(bool(_SHAPE.search(text)) for text in _public_docstrings(tree))


def classes_by_name(tree: Tree) -> Counter[str]:
    """How often each class name is defined."""
    nodes = (node for module in tree.modules.values() for node in module.nodes)
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def is_participle(name: str) -> bool:
    """Whether a function's name is one word that is a participle; a heuristic by its ending."""
    word = name.strip("_")
    if "_" in word or word in _OTHERS:
        return False
    return word in _IRREGULAR or bool(re.fullmatch(r"[a-z]{2,}(?:ed|ing)", word))


def _public_docstrings(tree: Tree) -> Iterator[str]:
    for _, function in tree.functions:
        text = ast.get_docstring(function)
        if text and not function.name.startswith("_"):
            yield text
