"""How an engine is measured: in how many processes, what of, and what becomes of one that fails; never a time."""

import json
import math
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.reports.latency import EngineLatency
from enginesmith.core.types import Session, TensorSpec
from validation.latency.measurement import loop, measure
from validation.latency.measurement.loop import DEVICE_RUNS, PASSES, BucketInputs
from validation.latency.measurement.measure import measure_engine
from validation.latency.measurement.paired import answer_blocks, run_interleaved, run_interleaved_apart

BUCKET = BucketInputs({"batch": 2}, {"x": np.zeros(2, "f"), "other": np.zeros(1)}, 2)


class Plain(Session):
    inputs = (TensorSpec("x", "float32", ("batch",)),)
    outputs = ()

    def run(self, inputs):
        return {}


class Timed(Plain):
    def device_seconds(self, inputs, runs):
        assert runs == DEVICE_RUNS and inputs.keys() == {"x"}
        return [1.0, 2e-3, 3e-3]


class Own(Plain):
    def __init__(self) -> None:
        self.calls = 0

    def prepare_call(self, inputs):
        assert inputs.keys() == {"x"}

        def call() -> None:
            self.calls += 1

        return call


def measured(session, **asked: int) -> EngineLatency:
    return measure_engine(lambda: nullcontext(session), [BUCKET], 0.01, **{"processes": 1, **asked})


def test_the_median_device_time_is_beside_the_clocks() -> None:
    assert measured(Timed()).buckets[0].device_s == 3e-3
    assert measured(Plain()).buckets[0].device_s is None


def test_the_runtimes_own_call_is_timed_if_available() -> None:
    session = Own()
    (bucket,) = measured(session).buckets
    assert session.calls >= 6 and bucket.runtime is not None and bucket.runtime_s == bucket.runtime.value
    assert bucket.runtime.p == 0.5 and bucket.runtime.low <= bucket.runtime.value  # type: ignore[operator]
    (bucket,) = measured(Plain()).buckets
    assert bucket.runtime is None and bucket.runtime_s == bucket.median_s


def test_runs_of_a_size_alternate_with_other_sizes(monkeypatch) -> None:
    seen_counts: list[int] = []
    held_up = 1.0

    class Told(Plain):
        def run(self, inputs):
            seen_counts.append(len(inputs["x"]))
            return {}

    def stretch(run: Callable[[], object], seconds: float, least: int) -> np.ndarray:
        run()
        return np.array([seconds * held_up])

    monkeypatch.setattr(loop, "latencies", stretch)
    sizes = [BucketInputs({"batch": size}, {"x": np.zeros(size, "f")}, size) for size in (1, 2)]
    measure_engine(lambda: nullcontext(Told()), sizes, 0.4, processes=1)
    assert seen_counts == [1, 2] + [1, 2] * PASSES, "behind the first run of each"
    seen_counts.clear()
    held_up = 2.5
    measure_engine(lambda: nullcontext(Told()), sizes, 0.4, processes=1)
    assert seen_counts == [1, 2] + [1, 2] * 2, "none where those before took all the time"


def test_each_stream_has_run_once_before_they_are_timed_together(monkeypatch) -> None:
    sessions: list[Plain] = []

    class Counted(Plain):
        def __init__(self) -> None:
            self.runs = 0
            sessions.append(self)

        def run(self, inputs):
            self.runs += 1
            return {}

    def rate(runs: Sequence[Callable[[], object]], seconds: float) -> float:
        assert [vars(session)["runs"] for session in sessions[1:]] == [1] * len(runs) == [1, 1, 1]
        return 5.0

    monkeypatch.setattr(measure, "streams_per_second", rate)
    (row,) = measure_engine(lambda: nullcontext(Counted()), [BUCKET], 0.01, streams=3, processes=1).buckets
    assert (row.streams, row.streams_items_per_s) == (3, 10.0)


def recording(folder: Path, session: object = None) -> Callable[[], AbstractContextManager[object]]:
    """Opens a session, and leaves a file named after the process that did."""

    def opens() -> AbstractContextManager[object]:
        (folder / f"{os.getpid()}-{len([*folder.iterdir()])}").touch()
        return nullcontext(session or Own())

    return opens


def test_each_process_opens_the_engine_and_has_a_median(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "COSTLY_S", math.inf)  # a busy machine opens nothing in a second
    (seen_path := tmp_path / "seen").mkdir()
    imported_numbers: list[int] = []
    result = measure_engine(recording(seen_path), [BUCKET, BUCKET], 0.01, lambda: imported_numbers.append(1))
    pids = {int(path.name.partition("-")[0]) for path in seen_path.iterdir()}
    assert result.processes == measure.PROCESSES == len(pids) and os.getpid() not in pids
    assert all(len(bucket.process_medians_s) == measure.PROCESSES for bucket in result.buckets)
    assert result.import_s is not None and not imported_numbers, "the runtime is imported in the processes, not here"
    (bucket, _) = result.buckets
    assert bucket.runs >= measure.PROCESSES * 2 and bucket.quantiles[0].low <= bucket.median_s  # type: ignore[operator]


def test_a_slowly_opening_engine_is_opened_less_often(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "COSTLY_S", -1.0)
    (seen_path := tmp_path / "seen").mkdir()
    result = measure_engine(recording(seen_path), [BUCKET], 0.01)
    assert result.processes == 3 == len(list(seen_path.iterdir()))


def test_errors_of_a_process_are_raised_here() -> None:
    def refuses() -> AbstractContextManager[object]:
        raise ModelError("engine.onnx: onnxruntime cannot read it")

    with pytest.raises(ModelError, match="cannot read it"):
        measure_engine(refuses, [BUCKET], 0.01)

    def raises() -> AbstractContextManager[object]:
        raise ZeroDivisionError

    with pytest.raises(EnginesmithError, match="its traceback is above"):
        measure_engine(raises, [BUCKET], 0.01)


def test_leftover_threads_and_processes_are_not_waited_for(tmp_path: Path) -> None:
    stop, stop_fd = os.pipe()

    def lingers() -> None:
        if not select.select([stop], [], [], 10)[0]:
            (tmp_path / "waited").touch()

    def starts() -> AbstractContextManager[object]:
        threading.Thread(target=lingers).start()
        return nullcontext(Own())

    measure.measure_in_fork(partial(measure.measure_once, starts, [BUCKET], 0.01, 1))

    def forks() -> AbstractContextManager[object]:
        if not os.fork():
            os.close(stop_fd)
            lingers()
        return os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[return-value]

    with pytest.raises(EnginesmithError, match="ended by SIGKILL"):
        measure_engine(forks, [BUCKET], 0.01)
    assert not (tmp_path / "waited").exists()
    os.close(stop_fd)
    os.close(stop)


def test_two_engines_are_compared_by_their_runtimes_own_calls() -> None:
    inputs = {"x": np.zeros(2, "f")}
    sessions: list[Own] = []

    def opens() -> AbstractContextManager[Own]:
        sessions.append(Own())
        return nullcontext(sessions[-1])

    run_interleaved((opens, opens), inputs, 0.01, 0, openings=1)
    assert all(session.calls > 2 for session in sessions)
    sessions.clear()
    run_interleaved((opens, lambda: nullcontext(Plain())), inputs, 0.01, 0, openings=1)
    assert [session.calls for session in sessions] == [0], "what is timed of one is timed of the other"


def test_engines_of_two_processes_are_timed_alternately() -> None:
    """Each in a thread here: what travels between is lines of JSON."""
    inputs, links = {"x": np.zeros(2, "f")}, [socket.socketpair() for _ in range(2)]
    their_file, our_file = ([pair[side].makefile("rw") for pair in links] for side in range(2))
    for end in (end for pair in links for end in pair):
        end.close()  # the streams hold them open

    def ask(stream: Any, word: str, numbers: Sequence[float]) -> Any:
        stream.write(json.dumps([word, numbers]) + "\n")
        stream.flush()
        return json.loads(stream.readline())

    with ThreadPoolExecutor(2) as pool:
        counts = [pool.submit(answer_blocks, lambda: nullcontext(Own()), inputs, stream) for stream in their_file]
        pairs = run_interleaved_apart((partial(ask, our_file[0]), partial(ask, our_file[1])), 0.02, openings=2)
        for stream in our_file:
            stream.close()
        blocks = [count.result() for count in counts]
    for stream in their_file:
        stream.close()
    assert len(pairs) == 2 and blocks[0] == blocks[1] >= 4
    assert all(len(pair[0]) == len(pair[1]) > 0 and (pair[0] > 0).all() for pair in pairs)
