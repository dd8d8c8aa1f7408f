"""Compiles in the background: bounded, remembered, and ended with the router."""

import os
import threading

import pytest

from enginesmith.core.errors import EnginesmithError
from enginesmith.serving.counts import JustInTime
from tests.waiting import PATIENCE_S, until


def runner_of(sizes):
    return lambda inputs: {"sizes": dict(sizes), **inputs}


def test_a_runner_is_compiled_once_and_then_found():
    made = []
    found = JustInTime(lambda sizes: made.append(sizes) or runner_of(sizes))
    assert found.find({"n": 3}) is None
    until(lambda: found.counts().held)
    assert found.find({"n": 3})({})["sizes"] == {"n": 3}
    assert found.wait({"n": 3}) is found.find({"n": 3}) and made == [{"n": 3}]
    found.close()


def test_the_reason_of_the_last_failure_is_told():
    def fail(sizes):
        raise OSError(f"no room for {sizes['n']}")

    found = JustInTime(fail)
    assert found.counts().reason == ""
    for size in (1, 2):
        found.find({"n": size})
        until(lambda count=size: found.counts().failed == count)
    found.close()
    assert found.counts().reason == "OSError: no room for 2"


def test_the_runner_that_was_not_used_for_longest_makes_room():
    found = JustInTime(runner_of, most=2)
    found.wait({"n": 1}), found.wait({"n": 2})
    found.find({"n": 1})
    found.wait({"n": 3})
    counts = found.counts()
    assert (counts.held, counts.evicted, counts.compiled) == (2, 1, 3) and counts.waited_s > 0
    assert found.find({"n": 1}) and found.find({"n": 3})
    found.close()


def test_what_failed_is_not_compiled_again_for_each_request():
    calls = []

    def fails(sizes):
        calls.append(sizes)
        raise ValueError("no kernel")

    found = JustInTime(fails)
    for _ in range(3):
        with pytest.raises(EnginesmithError, match="ValueError: no kernel"):
            found.wait({"n": 1})
        assert found.find({"n": 1}) is None
    assert len(calls) == 1 and found.counts().failed == 1
    found.close()


def test_no_more_sizes_wait_than_runners_are_held():
    go = threading.Event()

    def slow(sizes):
        go.wait(PATIENCE_S)
        return runner_of(sizes)

    found = JustInTime(slow, most=2)
    for size in range(50):
        found.find({"n": size})
    go.set()
    until(lambda: found.counts().compiled >= 2 and not found._waiting)
    found.close()
    assert found.counts().compiled <= 3


def test_closing_ends_the_thread_and_whoever_waits():
    go, errors = threading.Event(), []

    def slow(sizes):
        go.wait(PATIENCE_S)
        return runner_of(sizes)

    found = JustInTime(slow)

    def ask():
        try:
            found.wait({"n": 2})
        except EnginesmithError as error:
            errors.append(str(error))

    found.find({"n": 1})
    waiter = threading.Thread(target=ask)
    waiter.start()
    closer = threading.Thread(target=found.close)
    closer.start()
    waiter.join(PATIENCE_S)
    go.set()
    closer.join(PATIENCE_S)
    assert errors == ["the router is closed"] and not found._thread.is_alive()
    assert found.find({"n": 1}) is None


@pytest.mark.timeout(100)
def test_a_compiler_that_ends_its_thread_keeps_nobody_waiting():
    def leave(sizes):
        raise SystemExit(f"no licence for {sizes['n']}")

    found = JustInTime(leave)
    for size in (1, 1, 2):
        with pytest.raises(EnginesmithError, match="the compiler ended: SystemExit: no licence for 1"):
            found.wait({"n": size})
    assert found.find({"n": 3}) is None
    counts = found.counts()
    assert (counts.failed, counts.reason) == (1, "SystemExit: no licence for 1")
    found.close()


class Wordless(BaseException):
    def __str__(self):
        raise OSError("no words")


@pytest.mark.timeout(100)
def test_an_error_without_words_keeps_nobody_waiting():
    def leave(_):
        raise Wordless

    found = JustInTime(leave)
    with pytest.raises(EnginesmithError, match="the compiler ended: Wordless"):
        found.wait({"n": 1})
    found.close()


@pytest.mark.timeout(100)
def test_a_thread_that_could_not_be_started_is_started_later(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    found = JustInTime(runner_of)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert found.find({"n": 1}) is None
        with pytest.raises(EnginesmithError, match="nothing is compiled: can't start new thread"):
            found.wait({"n": 1})
        found.close()
    found = JustInTime(runner_of)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert found.find({"n": 1}) is None
    assert found.wait({"n": 1})({})["sizes"] == {"n": 1}
    found.close()


@pytest.mark.timeout(100)
def test_after_a_fork_what_the_other_process_compiles_is_compiled_here():
    entered, go = threading.Event(), threading.Event()

    def compiles(sizes):
        entered.set()
        assert go.wait(PATIENCE_S)
        return runner_of(sizes)

    found = JustInTime(compiles)
    found.find({"n": 1})
    assert entered.wait(PATIENCE_S)
    if not (child := os.fork()):
        go.set()
        code = 1
        try:
            code = 0 if found.wait({"n": 1})({})["sizes"] == {"n": 1} else 2
        finally:
            os._exit(code)
    go.set()
    assert os.waitpid(child, 0)[1] == 0
    found.close()
