import os
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.core.errors import canonical_json, digest_of
from enginesmith.core.parsing import this_process
from enginesmith.core.text import precise_now
from enginesmith.registry.builds import build_history
from enginesmith.registry.builds.build_history import LockHolder, hold_build_lock, remove_stale_locks
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import build_lock_key
from tests.enginesmith.registries import on_each_store
from tests.waiting import run_threads, until

NAME = digest_of("what is worked on")


def other(store: Store, **changed: object) -> LockHolder:
    """Somebody's turn, on another machine unless said otherwise."""
    stamp = precise_now()
    holder = replace(LockHolder("compiling", "elsewhere", "", 1, 1, "0", 0, stamp), **changed)  # type: ignore[arg-type]
    store.replace(build_lock_key(NAME), canonical_json(asdict(holder)), store.read(build_lock_key(NAME)))
    return holder


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of who waits for a lock; no other time passes."""
    pauses: list[float] = []
    monkeypatch.setattr(build_history, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    return pauses


@on_each_store
def test_one_holder_works_at_a_time_and_no_file_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_history, "_POLL_S", 0.01)
    at_once, most, done, waiting = 0, 0, 0, 0
    lock, take = threading.Lock(), build_history._take

    def note(*arguments: Any) -> LockHolder:
        nonlocal waiting
        with lock:
            waiting += 1
        return take(*arguments)

    monkeypatch.setattr(build_history, "_take", note)

    def work() -> None:
        nonlocal at_once, most, done
        with hold_build_lock(store, NAME, "compiling"):
            with lock:
                at_once += 1
                most = max(most, at_once)
            until(lambda: waiting == 6, "all ask while one works")
            with lock:
                at_once -= 1
                done += 1

    run_threads([work] * 6)
    assert (most, done) == (1, 6)
    assert store.read(build_lock_key(NAME)) is None


def test_the_holder_of_a_lock_states_its_start_time(store: Store) -> None:
    text_before = precise_now()
    with hold_build_lock(store, NAME, "mine"):
        holder = build_history._read(store.read(build_lock_key(NAME)))
        assert holder and text_before <= holder.since <= precise_now()


def test_another_lock_needs_no_wait(store: Store) -> None:
    with hold_build_lock(store, NAME, "one"), hold_build_lock(store, digest_of("other"), "two"):
        pass


def test_a_waiter_names_the_holder_and_a_silent_holder_loses_the_lock(store: Store, waited: list[float]) -> None:
    other(store, since="2026-11-20T18:23:01.123456+00:00")
    output: list[str] = []
    with hold_build_lock(store, NAME, "mine", output.append):
        assert output == ["compiling is running on elsewhere, process 1, since 2026-11-20 18:23:01 UTC"]
    assert build_history.DEAD_AFTER_S < sum(waited) < build_history.DEAD_AFTER_S + 2 * build_history._POLL_S


def test_a_holder_with_a_dead_process_loses_the_lock_at_once(store, waited):
    presence = this_process()
    other(store, host=presence.host, namespace=presence.namespace, pid=1, began="another boot")
    with hold_build_lock(store, NAME, "mine"):
        assert waited == []


def test_a_running_holder_sends_heartbeats_and_a_former_one_does_not_affect_its_successor(store, monkeypatch):
    monkeypatch.setattr(build_history, "BEAT_S", 0.01)
    with hold_build_lock(store, NAME, "mine"):
        content_before = store.read(build_lock_key(NAME))
        until(lambda: store.read(build_lock_key(NAME)) != content_before, "it beats")
        their_value = None
        while their_value is None:  # the heart may beat in between
            holder = other(store)
            their_value = build_history._read(store.read(build_lock_key(NAME)))
            their_value = their_value if their_value == holder else None
    assert build_history._read(store.read(build_lock_key(NAME))) == their_value


def test_files_of_a_dead_holder_are_collected(store: Store, tmp_path: Path) -> None:
    other(store)
    remove_stale_locks(store)
    assert store.read(build_lock_key(NAME)) is not None
    late_timestamp = (store.now() - build_history.STALE_AFTER - timedelta(minutes=1)).timestamp()
    os.utime(tmp_path / "registry" / build_lock_key(NAME), (late_timestamp, late_timestamp))
    remove_stale_locks(store)
    assert store.read(build_lock_key(NAME)) is None
