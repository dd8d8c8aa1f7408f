"""A collection beside each kind of writer, at every store call of either, and at random."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, partial

import pytest

from enginesmith.core.errors import ConflictError, EnginesmithError, IntegrityError, UnknownNameError
from enginesmith.core.names import Reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.collection.garbage import SWEEPING
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.gc import collect
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.registered_specs import pin
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.publish import find_published
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import (
    Actor,
    Killed,
    MemoryStore,
    after,
    in_turns,
    interleave,
    seeded,
    set_clocks,
)
from tests.one_thread import registry_in_one_thread

RULES = Rules(versions=1, moves=1)
GRACE = timedelta(days=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
TOLD = (ConflictError, IntegrityError, UnknownNameError)
DATA = b"an engine that comes again"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """An actor is one thread."""
    with registry_in_one_thread():
        yield


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """A clock that stands still until it is moved."""
    move = set_clocks(monkeypatch, START)
    beginnings()
    move(GRACE)
    return move


@cache
def beginnings() -> tuple[Manifest, dict[str, bytes], dict[str, bytes], dict[str, bytes]]:
    """Version 1, and stores: as it is, with version 1 marked at `START`, and another one to mirror from."""
    store, elsewhere = MemoryStore(), MemoryStore()
    old = publish_engines(store, [engine(store, data=DATA)], "a", channel=None).manifest
    channels.promote(store, old, "stable")
    for content in "bc":
        channels.promote(store, publish_engines(store, [engine(store)], content, channel=None).manifest, "stable")
    before = dict(store.objects)
    collect(store, RULES, GRACE, delete=True)
    publish_engines(elsewhere, [engine(elsewhere, data=DATA)], "z", channel=None, wanted="mirrored")
    return old, before, dict(store.objects), dict(elsewhere.objects)


class World:
    """Versions 1 (with `DATA`), 2 and 3, each served in turn, of which a collection keeps 2 and 3.

    marked: 1 was marked long ago."""

    def __init__(self, *, marked: bool) -> None:
        self.old, plain, waiting, elsewhere = beginnings()
        self.store = MemoryStore(dict(waiting if marked else plain))
        self.elsewhere = MemoryStore(dict(elsewhere), uri="memory://elsewhere")
        self.grace = GRACE if marked else timedelta(0)

    def collect(self, store: MemoryStore) -> None:
        collect(store, RULES, self.grace, delete=True)


def publish_again(world: World, store: MemoryStore) -> None:
    with hold_lease(store, "building"):
        publish_engines(store, [engine(store, data=DATA)], "new")


def publish_without_a_build(world: World, store: MemoryStore) -> None:
    publish_engines(store, [engine(store, data=DATA)], "new")


def publish_the_same(world: World, store: MemoryStore) -> None:
    publish_engines(store, [engine(store, data=DATA)], "a", channel="stable")


def promote(world: World, store: MemoryStore) -> None:
    channels.promote(store, world.old, "stable")


def roll_back_twice(world: World, store: MemoryStore) -> None:
    channels.rollback(store, "digits", "stable")
    channels.rollback(store, "digits", "stable")


def pin_it(world: World, store: MemoryStore) -> None:
    pin(store, world.old)


def bring_a_mirror(world: World, store: MemoryStore) -> None:
    mirror(world.elsewhere, [Reference("digits", version="mirrored")], store)


WRITERS = (publish_again, publish_without_a_build, publish_the_same, promote, roll_back_twice, pin_it, bring_a_mirror)
OF_THE_OLD = (promote, roll_back_twice, pin_it)


def check(world: World, writer: Actor, work: Callable[[World, MemoryStore], None], where: object) -> None:
    """Nothing that was published or is served was hurt; a writer that failed was told, and tries again with success."""
    result = verify(world.store)
    assert result.sound, (where, result.problems)
    if isinstance(writer.error, Killed):
        return
    assert writer.error is None or isinstance(writer.error, TOLD), (where, writer.error)
    if writer.error is None:
        manifest = world.old if work in OF_THE_OLD else None
        assert manifest is None or whole(world.store, manifest), (where, writer.calls)
    if work not in OF_THE_OLD:
        work(world, world.store)
        assert verify(world.store).sound, where


def whole(store: MemoryStore, manifest: Manifest) -> bool:
    return find_published(store, manifest) is not None or all(map(store.has, manifest.blobs()))


def steps_of(world: World, work: Callable[[MemoryStore], None]) -> int:
    actor = Actor("alone")
    interleave([(actor, lambda: work(world.store.seen_by(actor)))], lambda waiting: waiting[0])
    return actor.steps


def race(
    world: World, work: Callable[[World, MemoryStore], None], collector: Actor, writer: Actor, choose: object
) -> None:
    works = [
        (collector, lambda: world.collect(world.store.seen_by(collector))),
        (writer, lambda: work(world, world.store.seen_by(writer))),
    ]
    interleave(works, choose)  # type: ignore[arg-type]
    assert collector.error is None or isinstance(collector.error, Killed), collector.error


@pytest.mark.parametrize("marked", [True, False], ids=["due", "no grace"])
@pytest.mark.parametrize("work", WRITERS, ids=lambda work: work.__name__)
def test_a_collection_and_a_writer_at_every_call(
    work: Callable[[World, MemoryStore], None], marked: bool, time: Callable[[timedelta], None]
) -> None:
    lengths = (
        steps_of(World(marked=marked), lambda store: collect(store, RULES, GRACE, delete=True)),
        steps_of(fresh := World(marked=marked), lambda store: work(fresh, store)),
    )
    outcomes = set()
    for first in range(2):
        # Every third call, and others when there is no grace; the random schedules come between.
        for steps in range(1 + marked, lengths[first] + 2, 3):
            world, actors = World(marked=marked), (Actor("collector"), Actor("writer"))
            race(world, work, *actors, after(actors[first], steps))
            check(world, actors[1], work, (first, steps))
            outcomes.add(type(actors[1].error))
    assert type(None) in outcomes


def test_a_writer_that_ends_while_a_collection_looks_around(time: Callable[[timedelta], None]) -> None:
    """Its lease was there when names were marked and is gone when they are swept: its manifest must be seen."""
    length = steps_of(World(marked=False), lambda store: collect(store, RULES, timedelta(0), delete=True))
    for steps in range(4, 14, 5):
        for others in range(length // 4, length):
            world, collector, writer = World(marked=False), Actor("collector"), Actor("writer")
            race(world, publish_again, collector, writer, in_turns(writer, steps, collector, others))
            assert verify(world.store).sound, (steps, others)


def test_a_collection_and_a_writer_at_random(time: Callable[[timedelta], None]) -> None:
    for seed in range(84):
        work = WRITERS[seed % len(WRITERS)]
        world, collector, writer = World(marked=seed % 5 > 0), Actor("collector"), Actor("writer")
        race(world, work, collector, writer, seeded(seed))
        check(world, writer, work, seed)


def test_killed_at_every_call(time: Callable[[timedelta], None]) -> None:
    """Either dies; what is published is whole, and the next collection, after an hour, ends what the dead one began."""
    for victim in range(2):
        for step in range(2, 70, 3):
            world, actors = World(marked=True), (Actor("collector"), Actor("writer"))
            actors[victim].kill_at = step
            race(world, publish_again, *actors, seeded(step))
            if not isinstance(actors[1].error, EnginesmithError):
                check(world, actors[1], publish_again, (victim, step)) if victim == 1 else None
            assert verify(world.store).sound, (victim, step)
            time(2 * SWEEPING + timedelta(days=2))
            collect(world.store, RULES, GRACE, delete=True)
            time(timedelta(days=2))
            collect(world.store, RULES, GRACE, delete=True)
            publish_again(world, world.store)
            result = verify(world.store)
            assert result.sound and not [item for item in result.problems if item.kind == "stray"], (victim, step)


def test_what_was_marked_under_a_lease_stays_while_it_is_held(time: Callable[[timedelta], None]) -> None:
    world = World(marked=False)
    with hold_lease(world.store, "building for days", timedelta(days=3)):
        collect(world.store, RULES, GRACE, delete=True)
        time(GRACE + timedelta(hours=1))
        found = collect(world.store, RULES, GRACE, delete=True)
        assert {item.state for item in found.items} == {"held"} and "building for days" in found.leases[0]
        assert lookup.versions(world.store, "digits") == ["1", "2", "3"]
    assert {item.state for item in collect(world.store, RULES, GRACE, delete=True).items} == {"deleted"}
    assert lookup.versions(world.store, "digits") == ["2", "3"]


def test_a_lease_that_is_over_holds_nothing_and_its_holder_is_told(time: Callable[[timedelta], None]) -> None:
    world = World(marked=True)
    with hold_lease(world.store, "sleeping", timedelta(hours=1)) as guard:
        time(timedelta(hours=2))
        with pytest.raises(ConflictError, match="sleeping took longer than its lease"):
            guard.secure([])
        world.collect(world.store)
    assert lookup.versions(world.store, "digits") == ["2", "3"] and verify(world.store).problems == ()


def test_two_collections_and_a_writer(time: Callable[[timedelta], None]) -> None:
    """Were both to delete, the slower one would take what a writer put back after the faster one was done."""
    for seed in range(32):
        world, actors, writer = World(marked=True), (Actor("one"), Actor("two")), Actor("writer")
        works = [(actor, partial(world.collect, world.store.seen_by(actor))) for actor in actors]
        publish = partial(publish_without_a_build, world, world.store.seen_by(writer))
        # The writer comes when the first collection has gone some way, and that one goes on when all else is over.
        choose = seeded(seed) if seed % 2 else after(actors[0], 12 + seed)
        interleave([*works, (writer, publish)], choose)
        assert all(actor.error is None or isinstance(actor.error, ConflictError) for actor in actors), seed
        check(world, writer, publish_without_a_build, seed)
        world.collect(world.store)
        assert lookup.versions(world.store, "digits")[-1] == "4", seed
