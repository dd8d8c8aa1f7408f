"""Times of documents: what cannot be reckoned with is refused where it is read, not where something is added to it."""

from datetime import UTC, timedelta

import pytest

from enginesmith.core.parsing import LONGEST, is_time, read_stamp, stamp

OUTSIDE = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59+00:00"]


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_time_at_the_ends_of_the_calendar_is_refused(text: str) -> None:
    assert not is_time(text)
    with pytest.raises(ValueError, match="is not a time in ISO 8601 with its time zone, in 1900 to 8999"):
        read_stamp(text)


@pytest.mark.parametrize("text", ["1900-01-01T00:00:00+14:00", "8999-12-31T23:59:59-14:00"])
def test_the_longest_time_may_be_added_to_any_that_is_read(text: str) -> None:
    assert is_time(text)
    found = read_stamp(text)
    assert stamp(found) == found.astimezone(UTC).isoformat(timespec="microseconds")
    assert found - LONGEST < found < found + LONGEST + timedelta(days=1)
