import threading
from types import SimpleNamespace

import pytest

from validation.latency.measurement import loop
from validation.latency.measurement.loop import streams_per_second


def test_streams_count_all_calls_and_a_failing_call_gives_no_rate(monkeypatch):
    current_values, calls, lock = [0.0], [], threading.Lock()

    def call():
        with lock:
            calls.append(current_values[0])
            current_values[0] += 0.25

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: current_values[0]))
    assert streams_per_second([call], 2.0) == 4.0 and calls == [0.25 * number for number in range(8)]
    assert streams_per_second([call], 0.0) == 4.0 and len(calls) == 9, "once at least"
    assert streams_per_second([call, call], 2.0) == 4.0
    with pytest.raises(RuntimeError, match="out of memory"):
        streams_per_second([call, fail], 0.25)
