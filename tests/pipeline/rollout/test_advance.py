"""The controller: waves and gates in time, what is halted, who wins, and that a kill anywhere loses nothing."""

from contextlib import suppress
from dataclasses import replace

import pytest

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import ConflictError, EngineryError, InputError
from enginery.registry.leases import hold_lease
from enginery.registry.rollouts.reports import NodeReport, read_reports, report_key, write_report
from enginery.registry.rollouts.state import format_time, read_rollout, running_rollouts
from enginery.registry.rollouts.waves import ServingNode, Slice, is_reached, reports
from enginery.registry.store.layout import rollout_key
from enginery.registry.verification import repair, verify
from enginery.registry.versions import channels, policies, refresh
from enginery.registry.versions.lookup import read_channel
from enginery.registry.versions.pointers import read_pointer
from enginery.registry.versions.policies import ChannelPolicy
from pipeline.rollout import operations
from pipeline.rollout.advance import advance
from pipeline.rollout.operations import Operator
from tests.enginery.registries import engine, publish_engines
from tests.enginery.registry.memory import Actor, Killed, MemoryStore, after, in_turns, interleave, seeded
from tests.pipeline.rollout.fleet import WHERE, at, begin, plan, registry, served

NODES = [ServingNode(f"node-{number}") for number in range(400)]


def look(store, seconds):
    found = advance(store, *WHERE, at(seconds))
    assert found is not None
    return found


def tell(store, rollout, seconds, nodes, failure="", **counted):
    for node in nodes:
        time = format_time(at(seconds))
        report = NodeReport(node.name, "", "2", time, time, failure, "told", **counted)
        key = report_key(*WHERE, rollout.id, node.name)
        write_report(store, key, report, store.objects.get(key))


def reached(rollout):
    return [node for node in NODES if is_reached(node, rollout.id, rollout.reach)]


def test_the_waves_come_in_their_time_and_the_last_promotes_the_channel():
    store, _, two = registry()
    rollout = begin(store, two, plan(soak=600))
    assert list(running_rollouts(store)) == [WHERE]
    actions = [look(store, seconds).action for seconds in range(0, 2401, 300)]
    assert actions == ["waiting", "waiting", "wave", "waiting", "wave", "waiting", "wave", "waiting", "done"]
    channel = read_channel(store, *WHERE)
    assert channel.version == "2" and channel.history[-1].by == "ada"
    assert channel.history[-1].why == f"rollout {rollout.id}: its time is over"
    assert read_pointer(store, *WHERE).rollout is None and not list(running_rollouts(store))
    whats = [decision.what for decision in read_rollout(store, *WHERE).history]
    assert whats == ["started, wave 1%", "wave 5%", "wave 25%", "wave 100%", "promoting", "done"]
    assert verify(store).problems == () and look(store, 9999).action == "done"


def test_nodes_follow_the_pointer_and_never_go_back_while_it_runs():
    store, _, two = registry()
    begin(store, two, plan("5%", "50%", "100%", soak=60))
    before = set()
    for seconds in (0, 60, 120, 180):
        look(store, seconds)
        now = {node.name for node in NODES if served(store, node) == "2"}
        assert before <= now
        before = now
    assert len(before) == len(NODES)


def test_a_mark_of_a_writer_sends_no_node_back():
    store, _, two = registry()
    begin(store, two, plan("100%"))
    refresh.mark_moving(store, *WHERE)
    assert served(store, NODES[0]) == "2"
    operations.abort(store, *WHERE, Operator("ada", at(1)))
    assert served(store, NODES[0]) == "1"  # though the mark is still there


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_nodes_that_fail_halt_it_at_the_first_look_that_shows_it(share):
    store, _, two = registry()
    rollout = begin(store, two, plan("50%", "100%", health_ppm=950_000))
    nodes = reached(rollout)
    assert look(store, 10).gates[0].why.startswith("no reports")
    bad = round(share * len(nodes))
    tell(store, rollout, 30, nodes[:bad], "unhealthy")
    tell(store, rollout, 30, nodes[bad:])
    assert look(store, 31).action == ("halted" if share == 1.0 else "waiting")
    found = look(store, 600)
    assert found.action == "halted" and f"{bad} of {len(nodes)} nodes that report fail" in found.why
    assert "unhealthy: told" in found.why and read_pointer(store, *WHERE).rollout is None
    assert all(served(store, node) == "1" for node in NODES[:20]) and not list(running_rollouts(store))


def test_one_node_that_fails_early_halts_nothing():
    store, _, two = registry()
    rollout = begin(store, two, plan("50%", "100%", health_ppm=950_000))
    tell(store, rollout, 30, reached(rollout)[:1], "pull")
    assert look(store, 31).action == "waiting"
    tell(store, rollout, 590, reached(rollout)[1:])
    assert look(store, 600).action == "wave"


def test_without_reports_health_does_not_pass():
    store, _, two = registry()
    rollout = begin(store, two, plan(health_ppm=950_000, least_reports=3))
    found = look(store, 9999)
    assert found.action == "waiting" and "health: no reports" in found.why
    tell(store, rollout, 9999, NODES[:2])
    assert "3 must report" in look(store, 9999).why
    tell(store, rollout, 9999, NODES[:3])
    assert "went silent" in look(store, 20_000).why
    assert look(store, 10_000).action == "wave"


def test_a_person_lets_a_wave_pass_that_reaches_nobody_who_reports():
    store, _, two = registry()
    rollout = begin(store, two, plan("1%", "50%", "100%", health_ppm=950_000, approve=True))
    assert "resume digits:stable --without-data` ends the wave" in look(store, 700).why
    operations.resume(store, *WHERE, Operator("bob", at(701), "three nodes"), without_data=True)
    with pytest.raises(InputError, match="needs no data in this wave already"):
        operations.resume(store, *WHERE, Operator("eve", at(702)), without_data=True)
    found = look(store, 703)
    assert found.action == "wave" and "health: no reports" in found.why and "(waived)" in found.why
    assert look(store, 2000).action == "waiting"  # of this wave alone
    operations.resume(store, *WHERE, Operator("bob", at(2001)), without_data=True)
    tell(store, rollout, 2002, NODES[:9], "hook")
    assert look(store, 2003).action == "halted"


def test_requests_that_fail_halt_it_and_those_of_one_node_count_as_one():
    store, _, two = registry()
    rollout = begin(store, two, plan("50%", "100%", errors_ppm=10_000))
    nodes = reached(rollout)[:50]
    assert "no node says" in look(store, 10).gates[0].why
    tell(store, rollout, 20, nodes, requests=1000, errors=2)
    assert look(store, 30).gates[0].verdict == "pass"
    tell(store, rollout, 20, nodes[:1], requests=1000, errors=900)
    assert look(store, 40).action == "waiting"
    tell(store, rollout, 20, nodes, requests=1000, errors=60)
    assert look(store, 50).action == "halted"


def test_a_person_ends_each_wave():
    store, _, two = registry()
    begin(store, two, plan("5%", "100%", approve=True))
    assert "waits for `enginery rollout resume" in look(store, 700).why
    operations.resume(store, *WHERE, Operator("bob", at(702), "looks good"))
    with pytest.raises(InputError, match="waits for nobody"):
        operations.resume(store, *WHERE, Operator("eve", at(702)))
    assert look(store, 703).action == "wave"
    assert "waits for" in look(store, 1400).why


def test_a_pause_is_no_part_of_a_waves_time():
    store, _, two = registry()
    begin(store, two, plan("5%", "100%"))
    operations.pause(store, *WHERE, Operator("ada", at(500)))
    with pytest.raises(InputError, match="is paused, not running"):
        operations.pause(store, *WHERE, Operator("ada", at(500)))
    assert look(store, 700).action == "paused"
    operations.resume(store, *WHERE, Operator("ada", at(1500)))
    assert [look(store, seconds).action for seconds in (1599, 1600)] == ["waiting", "wave"]


def test_a_wave_opens_in_steps_of_which_one_comes_at_each_look():
    store, _, two = registry()
    begin(store, two, plan("5%", "100%", step=20_000))
    shares = [look(store, seconds).rollout.reach[0].share_ppm for seconds in (0, 29, 30, 31, 200, 201)]
    assert shares == [20_000, 20_000, 40_000, 40_000, 50_000, 50_000]  # a late controller makes no larger step
    assert look(store, 799).action == "waiting" and look(store, 800).action == "wave"
    assert look(store, 829).rollout.reach == (Slice(70_000),)


def test_beside_a_rollout_no_version_comes_at_once():
    store, _, two = registry()
    begin(store, two, plan("100%"))
    with pytest.raises(InputError, match=r"a rollout of 2 to digits:stable is running \(wave 1 of 1\).*rollout abort"):
        channels.promote(store, two, "stable")


def test_whoever_moves_the_channel_all_the_same_ends_the_rollout():
    store, one, two = registry()
    channels.promote(store, two, "stable")
    begin(store, one, plan("100%"))
    assert served(store, NODES[0]) == "1"
    channels.rollback(store, *WHERE, by="eve")
    with hold_lease(store, "a writer that knows no rollouts") as guard:
        channels.point(guard, two, "stable", "eve")
    assert served(store, NODES[0]) == "2" and read_pointer(store, *WHERE).rollout is None
    with pytest.raises(InputError, match="moved to 2 meanwhile"):
        operations.pause(store, *WHERE, Operator("ada", at(1)))
    found = look(store, 1)
    assert (found.action, found.why) == ("aborted", "the channel was moved to 1 by eve") or "2 by eve" in found.why
    begin(store, one, plan("100%"))
    assert [item.state for item in read_rollout(store, *WHERE).earlier] == ["aborted"]


def test_what_may_not_start():
    store, one, two = registry()
    with pytest.raises(InputError, match="serves 1 already"):
        begin(store, one, plan())
    with pytest.raises(InputError, match="serves nothing that nodes could return to"):
        operations.start(store, two, "beta", plan(), Operator("ada", at(0)))
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    with pytest.raises(InputError, match="needs a canary's PASS"):
        begin(store, two, plan())
    assert read_rollout(store, *WHERE) is None and not list(running_rollouts(store))


def test_a_policy_with_waves_takes_nothing_at_once_and_its_own_waves_alone():
    store, _, two = registry()
    ruled = plan("10%", "100%")
    policies.write(store, "digits", "stable", ChannelPolicy(rollout=ruled))
    assert policies.of_channel(store, *WHERE).rollout == ruled
    with pytest.raises(InputError, match=r"come in waves \(10%, 100%\): `enginery rollout start digits@2 digits:st"):
        channels.promote(store, two, "stable")
    assert operations.plan_of(store, *WHERE, None) == ruled == operations.plan_of(store, *WHERE, ruled)
    with pytest.raises(InputError, match="says how versions come to it"):
        operations.plan_of(store, *WHERE, plan("100%"))
    begin(store, two, ruled)
    assert [look(store, seconds).action for seconds in (600, 1200)] == ["wave", "done"]


def test_a_version_that_the_policy_refuses_by_then_is_halted_and_not_promoted():
    store, _, two = registry()
    begin(store, two, plan("100%"))
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    found = look(store, 600)
    assert found.action == "halted" and "the promotion was refused" in found.why
    assert read_channel(store, *WHERE).version == "1" and served(store, NODES[0]) == "1"


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
        assert list(running_rollouts(store)) == [WHERE]


def test_two_controllers_at_once_do_no_harm():
    for seed in range(10):
        store, _, two = registry()
        begin(store, two, plan("10%", "100%", soak=60))
        for seconds in (60, 120, 121):
            actors = [Actor("one"), Actor("two")]
            works = [(a, lambda a=a: advance(store.seen_by(a), *WHERE, at(seconds))) for a in actors]  # noqa: B023
            interleave(works, seeded(seed))
            assert all(actor.error is None for actor in actors)
        assert read_rollout(store, *WHERE).state == "done" and len(read_channel(store, *WHERE).history) == 2
        assert [d.what for d in read_rollout(store, *WHERE).history].count("wave 100%") == 1


@pytest.mark.parametrize("steps", range(1, 60, 2))
@pytest.mark.parametrize("seconds", [0, 60, 120])
def test_a_controller_killed_anywhere_loses_nothing(steps, seconds):
    store, _, two = registry()
    begin(store, two, plan("10%", "100%", soak=60))
    for earlier in range(0, seconds, 60):
        look(store, earlier)
    _kill(store, steps, lambda seen: advance(seen, *WHERE, at(seconds)))
    for later in (60, 120, 180):
        look(store, seconds + later)
    assert read_rollout(store, *WHERE).state == "done" and read_channel(store, *WHERE).version == "2"
    assert len(read_channel(store, *WHERE).history) == 2 and not list(running_rollouts(store))
    repair(store, verify(store))
    assert read_pointer(store, *WHERE).settled.version == "2" and verify(store).problems == ()


@pytest.mark.parametrize("steps", range(1, 40, 2))
def test_an_operator_killed_anywhere_leaves_what_can_be_started_or_ended(steps):
    store, _, two = registry()
    _kill(store, steps, lambda seen: begin(seen, two, plan("100%")))
    with suppress(EngineryError):
        begin(store, two, plan("100%"))
    look(store, 1)
    assert read_pointer(store, *WHERE).rollout is not None
    _kill(store, steps, lambda seen: operations.abort(seen, *WHERE, Operator("ada", at(2))))
    with suppress(EngineryError):
        operations.abort(store, *WHERE, Operator("ada", at(3)))
    look(store, 4)
    assert read_pointer(store, *WHERE).rollout is None and served(store, NODES[0]) == "1"
    assert not list(running_rollouts(store))


def _kill(store, steps, work):
    actor = Actor("killed", kill_at=steps)
    actor.turn = lambda call: _die(actor)
    with suppress(Killed):
        work(store.seen_by(actor))


def _die(actor):
    actor.steps += 1
    if actor.steps >= actor.kill_at:
        raise Killed


def test_an_abort_and_a_controller_at_once_agree():
    for steps in range(0, 40, 3):
        store, _, two = registry()
        begin(store, two, plan("100%", soak=60))
        one, two_ = Actor("controller"), Actor("ada")
        works = [
            (one, lambda one=one, store=store: advance(store.seen_by(one), *WHERE, at(60))),
            (two_, lambda a=two_, store=store: operations.abort(store.seen_by(a), *WHERE, Operator("ada", at(60)))),
        ]
        interleave(works, after(one, steps))
        state, version = read_rollout(store, *WHERE).state, read_channel(store, *WHERE).version
        assert (state, version) in (("done", "2"), ("aborted", "1"))
        assert (two_.error is None) == (state == "aborted"), two_.error
        assert one.error is None and served(store, NODES[0]) == version


def test_too_many_reports_make_fewer_nodes_report(monkeypatch):
    monkeypatch.setattr("pipeline.rollout.advance.MOST_REPORTERS", 100)
    store, _, two = registry()
    rollout = begin(store, two, plan("50%", "100%"))
    tell(store, rollout, 1, reached(rollout)[:150])
    assert look(store, 2).rollout.reporters_ppm == 666_666
    assert read_pointer(store, *WHERE).rollout.reporters_ppm == 666_666
    found = look(store, 600)  # the next wave reaches twice as many
    assert 70 < found.heard.nodes < 130
    assert found.rollout.reporters_ppm == int(666_666 * 100 / (2 * found.heard.nodes))


def test_nodes_that_are_asked_no_longer_are_neither_counted_nor_silent():
    store, _, two = registry()
    rollout = begin(store, two, plan("50%", "100%", health_ppm=950_000))
    nodes = reached(rollout)
    tell(store, rollout, 0, nodes)
    fewer = replace(rollout, reporters_ppm=500_000)
    asked = [node.name for node in nodes if reports(digest_of_bytes(node.name.encode()), 500_000)]
    heard = read_reports(store, fewer)
    assert sorted(report.node for report in heard.reports) == sorted(asked) and heard.nodes == len(asked) < len(nodes)


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
            assert bob.error is not None or list(running_rollouts(store)) == [WHERE], (steps, others)
    assert begun > 20


def test_a_promotion_never_takes_back_a_move_of_somebody_else():
    for steps in range(0, 60, 3):
        store, _, two = registry()
        three = publish_engines(store, [engine(store, data=b"three")], "three", channel=None).manifest
        begin(store, two, plan("100%", soak=60))
        one, eve = Actor("controller"), Actor("eve")

        seen_by_one, seen_by_eve = store.seen_by(one), store.seen_by(eve)

        def move(seen=seen_by_eve, three=three):
            with hold_lease(seen, "a writer that knows no rollouts") as guard:
                channels.point(guard, three, "stable", "eve")

        interleave([(one, lambda seen=seen_by_one: advance(seen, *WHERE, at(60))), (eve, move)], after(one, steps))
        versions = [item.version for item in read_channel(store, *WHERE).history]
        assert versions in (["1", "3"], ["1", "2", "3"]), (steps, versions, one.error, eve.error)
        assert served(store, NODES[0]) == "3"


@pytest.mark.parametrize("damage", [b"{}", b"x", b'{"format":1}'])
def test_a_damaged_document_is_told_and_moves_nobody(damage):
    store, _, two = registry()
    begin(store, two, plan("100%"))
    store.objects[rollout_key(*WHERE)] = damage
    with pytest.raises(EngineryError, match="rollout digits:stable"):
        advance(store, *WHERE, at(1))
    assert served(store, NODES[0]) == "2"


def test_the_same_state_in_other_words_can_be_changed():
    store, _, two = registry()
    begin(store, two, plan("100%"))
    key = rollout_key(*WHERE)
    for _ in range(2):  # one that runs, one that is finished: as a release wrote them that knew one field less
        store.objects[key] = store.objects[key].replace(b'"waived":0', b'"before":0').replace(b'"before":0,', b"")
        assert b"waived" not in store.objects[key]
        if not read_rollout(store, *WHERE).is_finished:
            operations.abort(store, *WHERE, Operator("ada", at(1)))
    assert begin(store, two, plan("100%"), 2).state == "running"


def test_a_newer_format_is_refused():
    store, _, two = registry()
    begin(store, two, plan("100%"))
    key = rollout_key(*WHERE)
    store.objects[key] = store.objects[key].replace(b'"format":1', b'"format":2')
    with pytest.raises(InputError, match=r"has format 2.*upgrade enginery"):
        advance(store, *WHERE, at(1))
