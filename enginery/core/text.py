"""Small pieces of what people read: the nearest known word, the first of a list, a size in bytes."""

import difflib
from collections.abc import Iterable, Sequence

# Share of a word that must be alike (difflib's ratio), below its default of 0.6: names of models and nodes are long.
_ALIKE = 0.5


def suggest(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """'did you mean 'x'?' for the nearest known word; without one `otherwise`, by default 'known: x, y'."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=_ALIKE)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names) or 'none'}" if otherwise is None else otherwise


def join_first(items: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """'a, b and 3 more': the first `most` of the items, and how many are left. With '; ' it is 'a; b; and 3 more'."""
    shown, rest = separator.join(items[:most]), len(items) - most
    return f"{shown}{separator.rstrip(', ')} and {rest} more" if rest > 0 else shown


def format_bytes(size: float | None) -> str:
    """'512 B', '2.0 KiB', '5.3 MiB', '40.0 GiB': a size in bytes, in powers of 1024; '' for None."""
    if size is None:
        return ""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.1f} {' KMG'[power]}iB" if power else f"{size:.0f} B"


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """'1 model', '2 models': a count with its noun. plural: where it is not the noun and an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
