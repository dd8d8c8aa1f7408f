"""A lease is over by the store's clock for others, and a little earlier by a clock of its own for its holder."""

from datetime import UTC, datetime, timedelta

import pytest

from enginesmith.core.errors import ConflictError
from enginesmith.registry.leases import PUBLISHING, hold_lease, list_leases, take_lease
from tests.enginesmith.registry.memory import MemoryStore, set_clocks


def test_the_times_of_a_lease_are_of_the_stores_clock() -> None:
    store = MemoryStore()  # whose clock stands still on another day than this machine's
    take_lease(store, "publishing")
    (lease,) = list_leases(store)
    assert (lease.at, lease.expires) == (store.clock.now, store.clock.now + PUBLISHING)
    assert lease.is_held(lease.expires - timedelta(microseconds=1)) and not lease.is_held(lease.expires)


def test_a_holder_stops_before_others_count_its_lease_as_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store, move = MemoryStore(), set_clocks(monkeypatch, datetime(2026, 1, 1, tzinfo=UTC))
    with hold_lease(store, "publishing") as guard:
        move(PUBLISHING - timedelta(minutes=2))
        guard.secure(["a" * 64])
        move(timedelta(minutes=1, seconds=1))
        assert list_leases(store)[0].is_held(store.now())
        with pytest.raises(ConflictError, match="publishing took longer than its lease"):
            guard.secure(["a" * 64])


def test_a_holder_counts_from_before_it_asked_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes an hour says a time that is an hour old."""
    move = set_clocks(monkeypatch, datetime(2026, 1, 1, tzinfo=UTC))

    class Slow(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            move(PUBLISHING)
            return super().create(key, data)

    with hold_lease(Slow(), "publishing") as guard, pytest.raises(ConflictError, match="took longer"):
        guard.secure(["a" * 64])
