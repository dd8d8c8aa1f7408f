"""The controller: waves and gates in time, and what is halted."""

from dataclasses import replace

import pytest

from enginesmith.core.errors import InputError, digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.rollouts.reports import read_reports
from enginesmith.registry.rollouts.state import Slice, reports
from enginesmith.registry.store.layout import MARKER, MARKER_CONTENT, channel_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, policies
from enginesmith.registry.versions.channel_writes import read_rollout, running_rollouts
from enginesmith.registry.versions.policies import ChannelPolicy
from enginesmith.registry.versions.state import read_channel, read_history
from pipeline.rollout import operations
from pipeline.rollout.operations import Operator
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore
from tests.pipeline.rollout.fleet import (
    NODES,
    WHERE,
    at,
    begin,
    begin_and_look,
    look,
    plan,
    reached,
    registry,
    served,
    tell,
)


def test_the_waves_come_in_their_time_and_the_last_promotes_the_channel():
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan(soak=600))
    assert running_rollouts(store) == [WHERE]
    actions = [look(store, seconds).action for seconds in range(0, 2401, 300)]
    assert actions == ["waiting", "waiting", "wave", "waiting", "wave", "waiting", "wave", "waiting", "done"]
    channel = read_channel(store, *WHERE)
    assert channel.version == "2" and channel.move.by == "ada" and channel.moves == 2
    assert channel.move.why == f"rollout {rollout.id}: its time is over"
    assert channel.active_rollout is None and not running_rollouts(store)
    whats = [decision.what for decision in read_rollout(store, *WHERE).history]
    assert whats == ["started, wave 1%", "wave 5%", "wave 25%", "wave 100%", "done"]
    assert verify(store).problems == () and look(store, 9999).action == "done"


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_nodes_that_fail_halt_it_at_the_first_look_that_shows_it(share):
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan("50%", "100%", health_ppm=950_000))
    nodes = reached(rollout)
    assert look(store, 10).gates[0].why.startswith("no reports")
    bad = round(share * len(nodes))
    tell(store, rollout, 30, nodes[:bad], "unhealthy")
    tell(store, rollout, 30, nodes[bad:])
    assert look(store, 31).action == ("halted" if share == 1.0 else "waiting")
    found = look(store, 600)
    assert found.action == "halted" and f"{bad} of {len(nodes)} reporting nodes failed" in found.why
    assert "unhealthy: told" in found.why and read_channel(store, *WHERE).active_rollout is None
    assert all(served(store, node) == "1" for node in NODES[:20]) and not running_rollouts(store)


def test_one_node_that_fails_early_halts_nothing():
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan("50%", "100%", health_ppm=950_000))
    tell(store, rollout, 30, reached(rollout)[:1], "pull")
    assert look(store, 31).action == "waiting"
    tell(store, rollout, 590, reached(rollout)[1:])
    assert look(store, 600).action == "wave"


def test_without_reports_health_does_not_pass():
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan(health_ppm=950_000, least_reports=3))
    found = look(store, 9999)
    assert found.action == "waiting" and "health: no reports" in found.why
    tell(store, rollout, 9999, NODES[:2])
    assert "3 must report" in look(store, 9999).why
    tell(store, rollout, 9999, NODES[:3])
    assert "went silent" in look(store, 20_000).why
    assert look(store, 10_000).action == "wave"


def test_a_person_lets_a_wave_pass_that_reaches_nobody_who_reports():
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan("1%", "50%", "100%", health_ppm=950_000, approve=True))
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
    rollout = begin_and_look(store, two, plan("50%", "100%", errors_ppm=10_000))
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
    begin_and_look(store, two, plan("5%", "100%", approve=True))
    assert "waits for `enginesmith rollout resume" in look(store, 700).why
    operations.resume(store, *WHERE, Operator("bob", at(702), "looks good"))
    with pytest.raises(InputError, match="waits for nobody"):
        operations.resume(store, *WHERE, Operator("eve", at(702)))
    assert look(store, 703).action == "wave"
    assert "waits for" in look(store, 1400).why


def test_a_pause_is_no_part_of_a_waves_time():
    store, _, two = registry()
    begin_and_look(store, two, plan("5%", "100%"))
    operations.pause(store, *WHERE, Operator("ada", at(500)))
    with pytest.raises(InputError, match="is paused, not running"):
        operations.pause(store, *WHERE, Operator("ada", at(500)))
    assert look(store, 700).action == "paused"
    operations.resume(store, *WHERE, Operator("ada", at(1400)))  # and was late with its write
    assert [look(store, seconds).action for seconds in (1500, 1599, 1600)] == ["waiting", "waiting", "wave"]


def test_a_wave_opens_in_steps_of_which_one_comes_at_each_look():
    store, _, two = registry()
    begin_and_look(store, two, plan("5%", "100%", step=20_000))
    shares = [look(store, seconds).rollout.reach[0].share_ppm for seconds in (0, 29, 30, 31, 200, 201)]
    assert shares == [20_000, 20_000, 40_000, 40_000, 50_000, 50_000]  # a late controller makes no larger step
    assert look(store, 799).action == "waiting" and look(store, 800).action == "wave"
    assert look(store, 829).rollout.reach == (Slice(70_000),)


def test_beside_a_rollout_no_version_comes_at_once():
    store, _, two = registry()
    begin_and_look(store, two, plan("100%"))
    with pytest.raises(InputError, match=r"a rollout of 2 to digits:stable is running \(wave 1 of 1\).*rollout abort"):
        channels.promote(store, two, "stable")


def test_whoever_moves_the_channel_all_the_same_ends_the_rollout():
    store, one, two = registry()
    channels.promote(store, two, "stable")
    begin_and_look(store, one, plan("100%"))
    assert served(store, NODES[0]) == "1"
    channels.rollback(store, *WHERE, by="eve")
    with hold_lease(store, "a writer that knows no rollouts") as guard:
        channels.point(guard, two, "stable", "eve")
    assert served(store, NODES[0]) == "2" and read_channel(store, *WHERE).active_rollout is None
    with pytest.raises(InputError, match=r"is aborted since .*: the channel was moved to 1 by eve"):
        operations.pause(store, *WHERE, Operator("ada", at(1)))
    found = look(store, 1)
    assert (found.action, found.why, found.made) == ("aborted", "the channel was moved to 1 by eve", False)
    assert not running_rollouts(store)
    begin_and_look(store, one, plan("100%"))
    assert [item.state for item in read_history(store, read_channel(store, *WHERE)).rollouts] == ["aborted"]


def test_what_may_not_start():
    store, one, two = registry()
    with pytest.raises(InputError, match="serves 1 already"):
        begin(store, one, plan())
    with pytest.raises(InputError, match="serves nothing that nodes could return to"):
        operations.start(store, two, "beta", plan(), Operator("ada", at(0)))
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    with pytest.raises(InputError, match="needs a canary's PASS"):
        begin_and_look(store, two, plan())
    assert read_rollout(store, *WHERE) is None and not running_rollouts(store)


def test_a_policy_with_waves_takes_nothing_at_once_and_its_own_waves_alone():
    store, _, two = registry()
    ruled = plan("10%", "100%")
    policies.write(store, "digits", "stable", ChannelPolicy(rollout=ruled))
    assert policies.of_channel(store, *WHERE).rollout == ruled
    with pytest.raises(InputError, match=r"come in waves \(10%, 100%\): `enginesmith rollout start digits@2 digits:st"):
        channels.promote(store, two, "stable")
    assert operations.plan_of(store, *WHERE, None) == ruled == operations.plan_of(store, *WHERE, ruled)
    with pytest.raises(InputError, match="says how versions come to it"):
        operations.plan_of(store, *WHERE, plan("100%"))
    begin_and_look(store, two, ruled)
    assert [look(store, seconds).action for seconds in (600, 1200)] == ["wave", "done"]


def test_a_version_that_the_policy_refuses_by_then_is_halted_and_not_promoted():
    store, _, two = registry()
    begin_and_look(store, two, plan("100%"))
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    found = look(store, 600)
    assert found.action == "halted" and "the promotion was refused" in found.why
    assert read_channel(store, *WHERE).version == "1" and served(store, NODES[0]) == "1"


def test_too_many_reports_make_fewer_nodes_report(monkeypatch):
    monkeypatch.setattr("pipeline.rollout.advance.MOST_REPORTERS", 100)
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan("50%", "100%"))
    tell(store, rollout, 1, reached(rollout)[:150])
    assert look(store, 2).rollout.reporters_ppm == 666_666
    assert read_channel(store, *WHERE).rollout.reporters_ppm == 666_666
    found = look(store, 600)  # the next wave reaches twice as many
    assert 70 < found.heard.nodes < 130
    assert found.rollout.reporters_ppm == int(666_666 * 100 / (2 * found.heard.nodes))


def test_nodes_that_are_asked_no_longer_are_neither_counted_nor_silent():
    store, _, two = registry()
    rollout = begin_and_look(store, two, plan("50%", "100%", health_ppm=950_000))
    nodes = reached(rollout)
    tell(store, rollout, 0, nodes)
    fewer = replace(rollout, reporters_ppm=500_000)
    asked = [node.name for node in nodes if reports(digest_of_bytes(node.name.encode()), 500_000)]
    heard = read_reports(store, fewer)
    assert sorted(report.node for report in heard.reports) == sorted(asked) and heard.nodes == len(asked) < len(nodes)


def test_the_same_state_in_other_words_can_be_changed():
    store, _, two = registry()
    begin_and_look(store, two, plan("100%"))
    key = channel_key(*WHERE)
    for _ in range(2):  # one that runs, one that is finished: as a release wrote them that knew one field less
        store.objects[key] = store.objects[key].replace(b'"waived":0', b'"before":0').replace(b',"before":0', b"")
        assert b"waived" not in store.objects[key]
        if not read_rollout(store, *WHERE).is_finished:
            operations.abort(store, *WHERE, Operator("ada", at(1)))
    assert begin(store, two, plan("100%"), 2).state == "running"


def test_proofs_on_random_inputs_are_accepted_as_a_promotion_accepts_them_and_recorded():
    store, *_ = registry()
    drawn = publish_engines(store, [engine(store, status="proven on random inputs")], "three", channel=None).manifest
    with pytest.raises(InputError, match=r"proven on random inputs: .*--accept-random-inputs"):
        begin(store, drawn, plan("100%"))
    operations.start(store, drawn, "stable", plan("100%", soak=60), Operator("ada", at(0)), random_inputs=True)
    assert [look(store, seconds).action for seconds in (0, 60, 120)][-1] == "done"
    dest = MemoryStore({MARKER: MARKER_CONTENT}, uri="memory://other")
    assert mirror(store, [parse_reference("digits:stable")], dest, with_channels=True).moved == ("digits:stable",)
    assert all(read_channel(place, *WHERE).move.random_inputs for place in (store, dest)), "a mirror records it too"
