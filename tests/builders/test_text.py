"""The pieces of what people read."""

import pytest

from builders.text import suggest


@pytest.mark.parametrize(
    ("word", "known", "otherwise", "said"),
    [
        ("fp61", ["fp32", "fp16"], None, "did you mean 'fp16'?"),
        ("xyz", ["fp32", "fp16"], None, "known: fp32, fp16"),
        ("xyz", ["fp32"], "look it up", "look it up"),
        ("xyz", [], None, "known: none"),
        ("xyz", ["fp32"], "", ""),
    ],
)
def test_the_nearest_word_or_all_that_are_known(word, known, otherwise, said):
    assert suggest(word, known, otherwise) == said
