"""Text that others wrote (names in a model, a compiler's log), made safe to show: on a terminal, a page, in a picture.

An escape character moves a terminal's cursor and recolours what it shows; a change of direction reorders what a person
reads; XML cannot hold most of them at all.
"""

import re
import unicodedata

# Ends of lines and tabs stay, and spaces that are wider or narrower than a space.
_KEPT = frozenset("\n\t")
# What JSON leaves as it is although a terminal may obey it; in JSON such a character stands within a string only.
_UNESCAPED = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with each character that has no look of its own as its escape: '\x1b', '\u202e'."""
    if text.isprintable():
        return text
    return "".join(char if _harmless(char) else char.encode("unicode_escape").decode() for char in text)


def visible_json(text: str) -> str:
    r"""JSON of the same value without characters that a terminal may obey: '\u009b'."""
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _harmless(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
