import pytest

from enginesmith.core.parsing import MAX_DEPTH, Malformed, parse_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' is given twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"\\uDC00": 1}', "surrogates"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "levels deep"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
        (b"[]", "must be an object"),
        (b"{}" + b" " * 200_000, "the limit is"),
    ],
)
def test_what_readers_disagree_about_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        parse_json(text, 150_000)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}', 100) == {"a": "\U0001f600"}
