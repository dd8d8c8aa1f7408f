from collections.abc import Callable
from datetime import timedelta

import pytest

from enginesmith.core.errors import EnginesmithError
from enginesmith.registry import leases
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.gc import collect
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import LEASES, index_key, manifest_key
from enginesmith.registry.versions import channels, index, lookup
from enginesmith.registry.versions.index import ListedModel, list_all, list_models, look_at, make_index, read_index
from enginesmith.registry.versions.lookup import catalogue
from tests.enginesmith.registries import engine, on_each_store, publish_engines
from tests.enginesmith.registry.memory import MemoryStore, run_alone, run_two, steps_of

pytestmark = pytest.mark.usefixtures("one_thread")


def look(store: Store) -> list[ListedModel]:
    """What the registry holds, without the index."""
    return look_at(store, catalogue(store))


def publish(store: Store, content: object, model: str = "digits", channel: str | None = "candidate") -> None:
    publish_engines(store, [engine(store)], content, channel=channel, model=model)


@pytest.fixture
def indexed() -> MemoryStore:
    store = MemoryStore()
    for model in ("digits", "letters"):
        publish(store, "a", model)
        publish(store, "b", model)
    make_index(store)
    return store


def promote(store: MemoryStore) -> None:
    channels.promote(store, lookup.load(store, "digits", "1"), "stable")


def publish_another(store: MemoryStore) -> None:
    publish(store, "c", "numbers")


WRITERS = [promote, publish_another, lambda store: channels.rollback(store, "letters", "candidate")]


@on_each_store
def test_every_writer_keeps_the_index(store: Store) -> None:
    publish(store, "a")
    make_index(store)
    publish(store, "b")
    publish(store, "c", "letters", channel=None)
    assert read_index(store) == look(store) != []
    channels.promote(store, lookup.load(store, "digits", "1"), "stable")
    channels.rollback(store, "digits", "candidate")
    assert read_index(store) == look(store) and read_index(store)[0].channels == {"candidate": "1", "stable": "1"}
    collect(store, Rules(versions=1, moves=0), timedelta(0), delete=True)
    assert read_index(store) == look(store) and list(store.list(LEASES)) == []


@pytest.mark.parametrize("work", WRITERS)
def test_a_list_between_any_two_calls_of_a_writer_is_right(
    indexed: MemoryStore, work: Callable[[MemoryStore], None]
) -> None:
    look_before, last_store = look(indexed), MemoryStore(dict(indexed.objects))
    work(last_store)
    for step in steps_of(indexed, work):
        store, _ = run_alone(indexed, work, kill_at=step)
        assert read_index(store) == look(store), step
    assert look_before != look(last_store) == read_index(last_store)


@pytest.mark.parametrize("work", WRITERS)
def test_a_writer_within_a_list_is_safe(indexed: MemoryStore, work: Callable[[MemoryStore], None]) -> None:
    last_store = MemoryStore(dict(indexed.objects))
    work(last_store)
    allowed_looks = [look(indexed), look(last_store)]
    items: list = []
    for step in steps_of(indexed, read_index):
        _, _, writer = run_two(indexed, lambda store: items.append(read_index(store)), work, step)
        assert writer.error is None and items.pop() in allowed_looks, step


def test_a_list_that_begins_within_a_writer_is_right(indexed: MemoryStore) -> None:
    """It never says what was no longer so when it began: the leases are read before the entries."""
    last_store, lone_actor = run_alone(indexed, promote)
    items: list = []
    for own_index in range(lone_actor.steps // 2, lone_actor.steps, 2):
        start_store, _ = run_alone(indexed, promote, kill_at=own_index + 1)
        for their_number in (1, 4, 12, 18):
            run_two(indexed, promote, lambda store: items.append(read_index(store)), own_index, their_number)
            assert items.pop() in (look(start_store), look(last_store)), (own_index, their_number)


def test_two_writers_of_one_model_agree(indexed: MemoryStore) -> None:
    """Each writes what it found; the later one found what the earlier one did, though it wrote the same as before."""

    def there_and_back(store: MemoryStore) -> None:
        channels.rollback(store, "digits", "candidate")

    length = len(steps_of(indexed, promote))
    for own_index in range(length // 2, length, 2):
        for theirs in (5, 20, 35, 99):
            store, actor, two = run_two(indexed, promote, there_and_back, own_index, theirs)
            assert actor.error is None and two.error is None and read_index(store) == look(store), (own_index, theirs)


def test_a_write_of_the_same_entry_counts_as_a_write(indexed: MemoryStore) -> None:
    key = index_key(index._shard_of("digits"))
    object_before = indexed.objects[key]
    index.refresh_index(indexed, ["digits"])
    assert indexed.objects[key] != object_before and read_index(indexed) == look(indexed)


def test_the_index_can_be_created_beside_a_writer(indexed: MemoryStore) -> None:
    for key in [key for key in indexed.objects if key.startswith("index/")]:
        del indexed.objects[key]
    length = len(steps_of(indexed, promote))
    for own_number in (1, length // 2, length - 5):
        for their_index in range(3, 72, 6):
            store, writer, maker = run_two(indexed, promote, make_index, own_number, their_index)
            assert writer.error is None and maker.error is None
            assert read_index(store) in (None, look(store)), (own_number, their_index)


def test_a_dead_writer_and_a_manual_change_are_repaired(indexed: MemoryStore) -> None:
    leases.take_lease(indexed, "promoting", changes=("digits",))
    indexed.objects[manifest_key("letters", "7")] = indexed.objects[manifest_key("letters", "2")].replace(
        b'"2"', b'"7"'
    )
    assert [item.versions for item in read_index(indexed) or ()] == [("1", "2"), ("1", "2")]
    indexed.clock.now += timedelta(hours=1)
    with pytest.raises(EnginesmithError):  # a manifest that says it is another version
        collect(indexed, delete=True)
    del indexed.objects[manifest_key("letters", "7")]
    del indexed.objects[manifest_key("letters", "1")]
    collect(indexed, Rules(), delete=True)
    assert list(indexed.list(LEASES)) == [] and read_index(indexed) == look(indexed)


def test_models_of_expired_leases_are_rewritten(indexed: MemoryStore) -> None:
    """Their writer may have changed them after the collection had read them."""
    result = look(indexed)
    del indexed.objects[manifest_key("digits", "1")]
    assert index.heal_index(indexed, result) == [] and read_index(indexed) == result
    assert index.heal_index(indexed, result, ["digits"]) == ["digits"] and read_index(indexed) == look(indexed)


@pytest.mark.parametrize("damage", [b"{", b'{"complete":true,"format":9,"models":{},"serial":1}', None])
def test_a_lost_or_damaged_index_is_recreated(indexed, damage, monkeypatch):
    key = index_key(index._shard_of("digits"))
    indexed.objects.pop(key) if damage is None else indexed.objects.update({key: damage})
    assert read_index(indexed) is None and list_models(indexed) == look(indexed)
    promote(indexed)
    monkeypatch.setattr(index, "WORTH_AN_INDEX", 2)
    assert list_all(indexed) == look(indexed) == read_index(indexed)


def test_a_list_of_many_models_reads_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for number in range(120):
        store.objects[manifest_key(f"m{number:03}", "1")] = b"never read"
    publish(store, "a")
    assert len(list_models(store)) == 121
    store.calls.clear()
    assert len(list_models(store)) == 121 and store.calls == {"read": 17, "list": 1}
    store.calls.clear()
    assert [item.model for item in list_models(store, limit=2, after="m003")] == ["m004", "m005"]
    assert store.calls == {"read": 17, "list": 1}


def test_a_small_registry_has_no_index(indexed: MemoryStore) -> None:
    store = MemoryStore()
    publish(store, "a")
    assert list_models(store) == look(store) and not list(store.list("index/"))
