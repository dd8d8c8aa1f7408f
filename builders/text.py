"""Small pieces of what people read: the nearest known word, the first of a list, a size in bytes."""

import difflib
from collections.abc import Iterable

# Share of a word that must be alike (difflib's ratio), below its default of 0.6: names of models and nodes are long.
_ALIKE = 0.5


def suggest(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """'did you mean 'x'?' for the nearest known word; without one `otherwise`, by default 'known: x, y'."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=_ALIKE)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names) or 'none'}" if otherwise is None else otherwise
