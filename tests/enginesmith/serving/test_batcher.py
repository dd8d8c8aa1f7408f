import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import numpy as np
import pytest

from enginesmith.core.errors import DataError, EnginesmithError, InputError
from enginesmith.core.state import Padding
from enginesmith.core.types import Session, TensorSpec
from enginesmith.serving.batcher import Batcher
from enginesmith.serving.router import Router
from tests.enginesmith.serving.engines import INPUTS, OUTPUTS, PADDING, Calls, assert_same, engine, profile, request
from tests.waiting import PATIENCE_S

EDGES = Padding(PADDING.inputs, {"sequence": (8, 16)})


class PlainSession(Session):
    inputs, outputs = INPUTS, OUTPUTS

    def __init__(self, run):
        self.run = run


def test_requests_of_a_bucket_are_joined_and_each_gets_its_own_answer():
    calls = Calls()
    router = Router([engine("a", profile((1, 32), (1, 16)), run=calls)], EDGES)
    requests = [request(1 + index % 3, 3 + index % 12, index) for index in range(24)]
    with Batcher(router, most=8, wait_s=1000.0) as batcher:  # closing it answers what still waits
        futures = [batcher.submit(item) for item in requests]
    answers = [future.result(PATIENCE_S) for future in futures]
    for answer, inputs in zip(answers, requests, strict=True):
        assert_same(answer, inputs)
    assert len(calls.shapes) < 24 and {shape[1] for shape in calls.shapes} == {8, 16}
    assert max(shape[0] for shape in calls.shapes) <= 8
    counts = router.counts()
    assert counts.requests == 24
    assert sum(bucket.elements for bucket in counts.buckets) == sum(2 * item["x"].size for item in requests)
    assert sum(b.elements + b.padding for b in counts.buckets) == 2 * sum(a * b for a, b in calls.shapes)


def test_before_a_plain_session_only_requests_of_equal_sizes_are_joined():
    calls = Calls()
    with Batcher(PlainSession(calls), most=4, wait_s=1000.0) as batcher:
        requests = [request(1, size, index) for index, size in enumerate((3, 5, 3, 5))]
        futures = [batcher.submit(item) for item in requests]
    for future, inputs in zip(futures, requests, strict=True):
        assert_same(future.result(PATIENCE_S), inputs)
    assert sorted(calls.shapes) == [(2, 3), (2, 5)]


def test_served_requests_are_recorded():
    items = []
    with Batcher(PlainSession(Calls()), most=2, wait_s=1000.0, record=items.append, log=1) as batcher:
        futures = [batcher.submit(request(1, 3)) for _ in range(2)]
        [future.result(PATIENCE_S) for future in futures]
    assert [(item.samples, item.batch, item.bucket) for item in items] == [(1, 2, {"sequence": 3})] * 2
    assert all(item.waited_s >= 0 and item.service_s > 0 for item in items) and list(batcher.served) == items[1:]


def test_a_request_waits_at_most_its_limit():
    with Batcher(PlainSession(Calls()), most=100, wait_s=0.05) as batcher:
        batcher.submit(request(1, 3)).result(PATIENCE_S)  # the batcher is still open
    assert batcher.served[0].waited_s >= 0.05


def test_an_error_of_a_batch_is_raised_for_its_requests_and_the_next_batch_runs():
    def sometimes(inputs):
        if inputs["x"].shape[1] == 3:
            raise ValueError("three")
        return Calls()(inputs)

    with Batcher(PlainSession(sometimes), most=2, wait_s=0.01) as batcher:
        wrong_futures = [batcher.submit(request(1, 3)) for _ in range(2)]
        for future in wrong_futures:
            with pytest.raises(ValueError, match="three"):
                future.result(PATIENCE_S)
        assert_same(batcher.submit(request(1, 4)).result(PATIENCE_S), request(1, 4))


@pytest.mark.parametrize(
    "caught", [pytest.warns(UserWarning, match="batcher raised OSError: full"), warnings.catch_warnings(action="error")]
)
def test_a_listener_that_raises_stops_nothing(caught):
    def listen(_):
        raise OSError("full")

    with caught, Batcher(PlainSession(Calls()), most=1, wait_s=0.0, record=listen) as batcher:
        assert all(batcher.submit(request(1, 3)).result(PATIENCE_S) for _ in range(2))


def test_a_request_that_was_cancelled_is_not_run():
    calls, begun_event, go = Calls(), Event(), Event()

    def slow(inputs):
        begun_event.set()
        go.wait(PATIENCE_S)
        return calls(inputs)

    with Batcher(PlainSession(slow), most=1, wait_s=0.0) as batcher:
        first_future = batcher.submit(request(1, 3))
        begun_event.wait(PATIENCE_S)
        second_future = batcher.submit(request(1, 4))
        assert second_future.cancel()
        go.set()
        first_future.result(PATIENCE_S)
    assert calls.shapes == [(1, 3)]


def test_closing_answers_waiting_requests_and_refuses_new_ones():
    batcher = Batcher(PlainSession(Calls()), most=100, wait_s=1000.0)
    future = batcher.submit(request(1, 3))
    batcher.close()
    assert future.done() and not batcher._worker.is_alive()
    with pytest.raises(EnginesmithError, match="closed"):
        batcher.submit(request(1, 3))


def test_many_threads_get_their_own_answers():
    router = Router([engine("a", profile((1, 32), (1, 16)))], EDGES)
    requests = [request(1, 1 + index % 16, index) for index in range(200)]
    with Batcher(router, most=16, wait_s=0.001) as batcher, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(lambda each: batcher.submit(each).result(PATIENCE_S), each) for each in requests]
        wait(futures, PATIENCE_S)
        for future, inputs in zip(futures, requests, strict=True):
            assert_same(future.result(), inputs)


def test_bad_input_is_reported():
    with pytest.raises(InputError, match="most is 0"):
        Batcher(PlainSession(Calls()), most=0, wait_s=0.0)
    for wrong_value, wait_s in (("4", 0.0), (4.5, 0.0), (1, "1"), (1, float("nan"))):
        with pytest.raises(InputError, match="give at least 1 sample"):
            Batcher(PlainSession(Calls()), most=wrong_value, wait_s=wait_s)
    small_engine = engine("a", profile((1, 8), (1, 16)))
    with pytest.raises(InputError, match="most is 9, but the router's engines accept at most batch=8"):
        Batcher(Router([small_engine], EDGES), most=9, wait_s=0.0)
    Batcher(Router([small_engine], EDGES, fallbacks=[engine("any")]), most=9, wait_s=0.0).close()
    with pytest.raises(InputError, match="session is a NoneType"):
        Batcher(None, most=1, wait_s=0.0)
    with pytest.raises(InputError, match="'x' has no axis 'rows'"):
        Batcher(PlainSession(Calls()), most=1, wait_s=0.0, dim="rows")
    with Batcher(PlainSession(Calls()), most=1, wait_s=0.0) as batcher, pytest.raises(DataError, match="no array"):
        batcher.submit({})


@pytest.mark.parametrize("shape", [(1,), ()])
def test_an_output_without_a_row_for_each_sample_is_an_error_of_the_batch(shape):
    session = PlainSession(lambda _: {"y": np.zeros(shape, np.float32)})
    session.outputs = (TensorSpec("y", "float32", ("batch",)),)
    with Batcher(session, most=2, wait_s=1000.0) as batcher:
        futures = [batcher.submit(request(1, 3)) for _ in range(2)]
        with pytest.raises(DataError, match="'y' does not have one entry for each of 2 samples"):
            futures[0].result(PATIENCE_S)


class Panic(BaseException):
    """As pyo3's PanicException."""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt])
def test_a_base_exception_ends_the_batcher_and_all_waits(kind):
    entered_event, go = Event(), Event()

    def run(_):
        entered_event.set()
        go.wait(PATIENCE_S)
        raise kind("at the third layer")

    batcher = Batcher(PlainSession(run), most=1, wait_s=0.0)
    first_future = batcher.submit(request(1, 3))
    assert entered_event.wait(PATIENCE_S)
    waiting_futures = [batcher.submit(request(1, size)) for size in (3, 4)]
    waiting_futures[0].add_done_callback(lambda _: sys.exit("a callback that ends its thread"))
    go.set()
    for future in (first_future, *waiting_futures):
        with pytest.raises(EnginesmithError, match=f"the batcher ended: {kind.__name__}: at the third layer"):
            future.result(PATIENCE_S)
    with pytest.raises(EnginesmithError, match="third layer; make another one"):
        batcher.submit(request(1, 3))
    batcher.close()


@pytest.mark.timeout(100)
def test_a_callback_or_a_listener_that_ends_the_thread_ends_the_batcher():
    def leave(*_):
        raise SystemExit("enough")

    with Batcher(PlainSession(Calls()), most=1, wait_s=0.0, record=leave) as batcher:
        inputs = request(1, 3)
        assert_same(batcher.submit(inputs).result(PATIENCE_S), inputs)
        batcher._worker.join(PATIENCE_S)
        with pytest.raises(EnginesmithError, match="the batcher ended: SystemExit: enough"):
            batcher.submit(inputs)


@pytest.mark.timeout(100)
def test_an_error_without_message_ends_all_waits():
    class Wordless(BaseException):
        def __str__(self):
            raise OSError("no words")

    def run(_):
        raise Wordless

    with (
        Batcher(PlainSession(run), most=1, wait_s=0.0) as batcher,
        pytest.raises(EnginesmithError, match="the batcher ended: Wordless"),
    ):
        batcher.submit(request(1, 3)).result(PATIENCE_S)


@pytest.mark.timeout(100)
def test_a_callback_may_close_the_batcher():
    batcher, errors = Batcher(PlainSession(Calls()), most=1, wait_s=0.0), []

    def close(_):
        try:
            batcher.close()
        except RuntimeError as error:
            errors.append(error)

    future = batcher.submit(request(1, 3))
    future.add_done_callback(close)
    future.result(PATIENCE_S)
    batcher.close()
    assert not errors


@pytest.mark.timeout(100)
def test_after_a_fork_a_call_fails_at_once():
    with Batcher(PlainSession(Calls()), most=1, wait_s=0.0) as batcher:
        batcher.submit(request(1, 3)).result(PATIENCE_S)
        if not (child := os.fork()):
            code = 1
            try:
                batcher.submit(request(1, 3))
            except EnginesmithError as error:
                code = 0 if "made before a fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
