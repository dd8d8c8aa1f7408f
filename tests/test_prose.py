"""Prose is wrapped at 120 characters by `make format` (`docs.wrap`)."""

import subprocess
from pathlib import Path

import pytest

from docs.wrap import is_same, long_lines, wrap

ROOT = Path(__file__).parents[1]
WORDS = " ".join(["word"] * 40)


@pytest.mark.parametrize(
    "text",
    [
        f"{WORDS} `a code span` {WORDS} [a link](to/a page) {WORDS}",
        f"- {WORDS}\n  {WORDS}\n\n  > {WORDS}\n  > {WORDS}\n\n1. {WORDS}\n   - {WORDS}",
        " ".join(["a", "-", "1.", "#", "+", "2)", ">", "==="] * 20),
        f"> quoted {WORDS}",
    ],
)
def test_prose_is_wrapped_and_renders_alike(text):
    wrapped_model = wrap(text)
    assert long_lines(text) and not long_lines(wrapped_model)
    assert is_same(text, wrapped_model) and wrap(wrapped_model) == wrapped_model


def test_tables_code_headings_and_hard_breaks_are_not_changed():
    table = f"| a | b |\n|---|---|\n| {WORDS} | x |"
    text = f"# {WORDS}\n\n{table}\n\n```\n{WORDS}\n```\n\n    {WORDS}\n\n{WORDS}  \n{WORDS}\n"
    assert wrap(text) == text
    assert len(long_lines(text)) == 3


def test_no_prose_of_this_tree_is_longer():
    stdout = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in stdout.split("\n")[:-1] if (ROOT / name).exists()
    }
    assert [name for name, text in texts.items() if long_lines(text)] == [], "run `make format`"
