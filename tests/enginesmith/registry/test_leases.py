import json
from datetime import UTC, datetime, timedelta

import pytest

from enginesmith.core.codec import encode
from enginesmith.core.errors import ConflictError, IntegrityError
from enginesmith.registry.leases import (
    PUBLISHING,
    MarkShard,
    MarkState,
    Tombstone,
    hold_lease,
    list_leases,
    read_shards,
    read_state,
    take_lease,
)
from enginesmith.registry.store.layout import MARK_STATE, lease_key, mark_shard_key
from tests.enginesmith.registry.memory import MemoryStore, set_clocks


def test_times_of_a_lease_use_the_stores_clock() -> None:
    store = MemoryStore()  # whose clock stands still on another day than this machine's
    take_lease(store, "publishing")
    (lease,) = list_leases(store)
    assert (lease.at, lease.expires) == (store.clock.now, store.clock.now + PUBLISHING)
    assert lease.is_held(lease.expires - timedelta(microseconds=1)) and not lease.is_held(lease.expires)


def test_a_holder_stops_before_its_lease_counts_as_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store, move = MemoryStore(), set_clocks(monkeypatch, datetime(2026, 1, 1, tzinfo=UTC))
    with hold_lease(store, "publishing") as guard:
        move(PUBLISHING - timedelta(minutes=2))
        guard.secure(["a" * 64])
        move(timedelta(minutes=1, seconds=1))
        assert list_leases(store)[0].is_held(store.now())
        with pytest.raises(ConflictError, match="publishing took longer than its lease"):
            guard.secure(["a" * 64])


def test_a_holder_counts_from_before_its_request_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes an hour says a time that is an hour old."""
    move = set_clocks(monkeypatch, datetime(2026, 1, 1, tzinfo=UTC))

    class Slow(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            move(PUBLISHING)
            return super().create(key, data)

    with hold_lease(Slow(), "publishing") as guard, pytest.raises(ConflictError, match="took longer"):
        guard.secure(["a" * 64])


def test_a_lease_removed_before_a_late_write_exists_for_the_next_collection() -> None:
    store = MemoryStore()
    with pytest.raises(ConflictError), hold_lease(store, "attesting", changes=("digits",)) as guard:
        store.remove(lease_key(guard.lease.id))
        raise ConflictError("took longer than its lease")
    assert [lease.changes for lease in list_leases(store)] == [("digits",)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seen": -1}, "seen is -1; it must be a whole number"),
        ({"seen": True}, "seen is True"),
        ({"expires": "tomorrow"}, "expires is 'tomorrow'; it must be a time in ISO 8601 with its time zone"),
        ({"at": "2026-01-01T00:00:00"}, "at is .* with its time zone"),
        ({"expires": "9999-12-31T23:59:59-14:00"}, "in 1900 to 8999"),
        ({"changes": ["../x"]}, r"changes\[0\] is '../x'"),
        ({"changes": None}, "changes is None; it must be a list"),
        ({"more": 1}, "has no field 'more'"),
        ({"id": "other"}, "moved by hand"),
        ({"id": "../../x"}, ""),
        *(({name: ...}, f"{name} is missing") for name in ("id", "what", "holder", "at", "expires", "seen", "changes")),
    ],
)
def test_an_unreadable_lease_is_an_error(change: dict[str, object], message: str) -> None:
    """change: fields and their values; ... takes one away, and none has a default."""
    store = MemoryStore()
    key = lease_key(take_lease(store, "publishing").id)
    document = {**json.loads(store.objects[key]), **change}
    store.objects[key] = json.dumps({name: value for name, value in document.items() if value is not ...}).encode()
    with pytest.raises(IntegrityError, match=rf"{key}: .*{message}.*delete it when nobody publishes"):
        list_leases(store)


@pytest.mark.parametrize("name", ["generation", "latest", "abandoned", "shards", "sweeper", "format"])
def test_no_field_of_the_marks_has_a_default(name: str) -> None:
    """An `abandoned` that is missing would let marks count that must not."""
    document = encode(MarkState(3, 3, (2,), ("ab",)))
    del document[name]
    with pytest.raises(IntegrityError, match=f"gc/state.json: {name} is missing"):
        read_state(MemoryStore({MARK_STATE: json.dumps(document).encode()}))


def test_names_that_one_collection_marked_share_one_mark() -> None:
    start_time = datetime(2026, 1, 1, tzinfo=UTC)
    shard = MarkShard({f"{number:064x}": Tombstone(start_time, 1) for number in range(3)})
    store = MemoryStore({mark_shard_key("00"): json.dumps(encode(shard)).encode()})
    (result,) = read_shards(store, ["00"]).values()
    assert result == shard and len({id(mark) for mark in result.waiting.values()}) == 1
