import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.text import visible, visible_json


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("logits", "logits"),
        ("größe × 2 ✓ 中\u00a0µs", "größe × 2 ✓ 中\u00a0µs"),  # noqa: RUF001 - a multiplication sign
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x07\r\x00\x7f", r"\x1b[2J\x07\r\x00\x7f"),
        ("\x9b31m\u202egnp\u2028\ufeff\ud800", r"\x9b31m\u202egnp\u2028\ufeff\ud800"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(text, allow="") == shown.replace("\n", r"\n").replace("\t", r"\t")


@given(st.text(st.characters(), max_size=40))
def test_no_invisible_character_remains_and_json_keeps_its_meaning(text: str) -> None:
    assert all(char.isprintable() or char in "\n\t" or char.isspace() for char in visible(text))
    written_text = visible_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(written_text) == text
    assert not any(0x7F <= ord(char) <= 0x9F or ord(char) < 0x20 for char in written_text)
