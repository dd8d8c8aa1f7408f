"""Who wins of several operators and controllers at once, and that a kill anywhere loses nothing."""

from itertools import product

from enginesmith.core.errors import ConflictError
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import read_channel, read_history
from enginesmith.registry.versions.channel_writes import read_rollout, running_rollouts
from pipeline.rollout import operations
from pipeline.rollout.operations import Operator
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import Actor, MemoryStore, after, in_turns, interleave, seeded
from tests.pipeline.rollout.fleet import NODES, WHERE, at, begin, begin_and_look, look, plan, registry, running, served


def test_of_two_who_start_one_wins_and_the_other_is_told():
    for seed in range(20):
        store, _, two = registry()
        works = []
        for name in ("ada", "bob"):
            actor = Actor(name)
            seen = store.seen_by(actor)
            works.append((actor, lambda seen=seen, two=two, name=name: begin(seen, two, plan(), by=name)))
        interleave(works, seeded(seed))
        winner = read_rollout(store, *WHERE).history[0].by
        for actor, _ in works:
            assert (actor.error is None) == (actor.name == winner), actor.error
            if actor.name != winner:
                assert isinstance(actor.error, ConflictError) and f"{winner} started it" in str(actor.error)
        assert running_rollouts(store) == [WHERE]


def test_two_controllers_at_once_do_no_harm():
    for seed in range(10):
        store, _, two = registry()
        begin_and_look(store, two, plan("10%", "100%", soak=60))
        for seconds in (60, 120, 121):
            actors = [Actor("one"), Actor("two")]
            works = [(a, lambda a=a: look(store.seen_by(a), seconds)) for a in actors]  # noqa: B023
            interleave(works, seeded(seed))
            assert all(actor.error is None for actor in actors)
        assert read_rollout(store, *WHERE).state == "done" and read_channel(store, *WHERE).moves == 2
        assert [d.what for d in read_rollout(store, *WHERE).history].count("wave 100%") == 1


def test_an_abort_and_a_controller_at_once_agree():
    for steps, waves in product(range(0, 40, 3), (("100%",), ("10%", "100%"))):
        store, _ = running(*waves, soak=60)
        one, two_ = Actor("controller"), Actor("ada")
        works = [
            (one, lambda one=one, store=store: look(store.seen_by(one), 60)),
            (two_, lambda a=two_, store=store: operations.abort(store.seen_by(a), *WHERE, Operator("ada", at(60)))),
        ]
        interleave(works, after(one, steps))
        state, version = read_rollout(store, *WHERE).state, read_channel(store, *WHERE).version
        assert (state, version) in (("done", "2"), ("running", "1") if len(waves) > 1 else (), ("aborted", "1"))
        assert (two_.error is None) == (state == "aborted"), two_.error
        assert one.error is None and (state == "running" or served(store, NODES[0]) == version)


def test_the_end_of_one_takes_no_mark_of_the_next():
    first, _, two = registry()
    begin(first, two, plan("100%"))
    begun = 0
    for steps in range(4, 9):
        for others in range(14, 40):
            store = MemoryStore(dict(first.objects))
            ada, bob = Actor("ada"), Actor("bob")
            ends, starts = store.seen_by(ada), store.seen_by(bob)
            works = [
                (ada, lambda seen=ends: operations.abort(seen, *WHERE, Operator("ada", at(1)))),
                (bob, lambda seen=starts: begin(seen, two, plan("100%"), 2, by="bob")),
            ]
            interleave(works, in_turns(ada, steps, bob, others))
            begun += bob.error is None
            assert bob.error is not None or running_rollouts(store) == [WHERE], (steps, others)
    assert begun > 20


def test_a_promotion_never_takes_back_a_move_of_somebody_else():
    for steps in range(0, 60, 3):
        store, _, two = registry()
        three = publish_engines(store, [engine(store, data=b"three")], "three", channel=None).manifest
        begin_and_look(store, two, plan("100%", soak=60))
        one, eve = Actor("controller"), Actor("eve")

        seen_by_one, seen_by_eve = store.seen_by(one), store.seen_by(eve)

        def move(seen=seen_by_eve, three=three):
            with hold_lease(seen, "a writer that knows no rollouts") as guard:
                channels.point(guard, three, "stable", "eve")

        interleave([(one, lambda seen=seen_by_one: look(seen, 60)), (eve, move)], after(one, steps))
        versions = [item.version for item in read_history(store, read_channel(store, *WHERE)).moves]
        assert versions in (["1", "3"], ["1", "2", "3"]), (steps, versions, one.error, eve.error)
        assert served(store, NODES[0]) == "3"
