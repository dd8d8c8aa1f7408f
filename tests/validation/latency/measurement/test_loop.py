"""The loop that times calls."""

import pytest

from validation.latency.measurement.loop import streams_per_second


def test_streams_count_all_calls_and_a_call_that_fails_gives_no_rate():
    assert streams_per_second([lambda: None, lambda: None], 0.01) > 0

    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        streams_per_second([lambda: None, fail], 0.01)
