from dataclasses import replace
from datetime import timedelta

import pytest

from enginesmith.core import parsing
from enginesmith.core.errors import ConflictError
from enginesmith.registry.collection.sweep import SWEEPING, hold_claim
from enginesmith.registry.gc import collect
from enginesmith.registry.leases import Sweeper, read_shards, read_state, update_state
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore


def test_times_of_a_claim_and_of_marks_use_the_stores_clock() -> None:
    store = MemoryStore()  # whose clock stands still on another day than this machine's
    with hold_claim(store) as claim:
        assert read_state(store).sweeper == replace(claim.sweeper, expires=store.clock.now + SWEEPING)
        store.clock.now += timedelta(minutes=1)
        claim.renew()
        assert claim.sweeper.expires == store.clock.now + SWEEPING
        claim.release(())
    publish_engines(store, [engine(store)], "a", channel=None)
    store.objects = {key: data for key, data in store.objects.items() if "versions/" not in key}
    collect(store, delete=True)
    shards = read_shards(store, read_state(store).shards).values()
    assert {mark.since for shard in shards for mark in shard.waiting.values()} == {store.clock.now}


@pytest.mark.parametrize("hours", [-7, 7])
def test_a_claim_depends_on_no_machines_clock(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alive is not taken over by a machine whose clock is ahead; one that is dead is, by any."""
    store = MemoryStore()
    monkeypatch.setattr(parsing, "steady_s", lambda: 3600.0 * hours)
    other_sweeper = Sweeper("other", "elsewhere 1", store.clock.now + SWEEPING)
    update_state(store, lambda state: replace(state, sweeper=other_sweeper))
    with pytest.raises(ConflictError, match=r"another collection \(elsewhere 1\) is running"), hold_claim(store):
        pass
    store.clock.now += SWEEPING
    with hold_claim(store) as claim:
        claim.check()


def test_a_suspended_collection_ends_before_it_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    start_s = parsing.steady_s()
    monkeypatch.setattr(parsing, "steady_s", lambda: start_s)
    with pytest.raises(ConflictError, match="stopped for so long"), hold_claim(MemoryStore()) as claim:
        start_s += SWEEPING.total_seconds() - 61
        claim.check()
        start_s += 2
        claim.check()
