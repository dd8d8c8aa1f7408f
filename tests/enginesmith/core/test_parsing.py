from datetime import UTC, timedelta

import pytest

from enginesmith.core.parsing import LONGEST, MAX_DEPTH, Malformed, is_time, parse_json, read_stamp, stamp


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_ambiguous_json_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        parse_json(text, 150_000)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}', 21) == {"a": "\U0001f600"}


# Times that cannot be reckoned with are refused where they are read, not where something is added to them.
OUTSIDE = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59+00:00"]


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_time_at_the_calendars_end_is_refused(text: str) -> None:
    assert not is_time(text)
    with pytest.raises(ValueError, match="is not a time in ISO 8601 with its time zone, in 1900 to 8999"):
        read_stamp(text)


@pytest.mark.parametrize("text", ["1900-01-01T00:00:00+14:00", "8999-12-31T23:59:59-14:00"])
def test_the_longest_duration_can_be_added_to_any_time(text: str) -> None:
    assert is_time(text)
    actual = read_stamp(text)
    assert stamp(actual) == actual.astimezone(UTC).isoformat(timespec="microseconds")
    assert actual - LONGEST < actual < actual + LONGEST + timedelta(days=1)
