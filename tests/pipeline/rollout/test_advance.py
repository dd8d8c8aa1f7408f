from dataclasses import replace

import pytest

from enginesmith.core.errors import ConflictError, InputError, digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.leases import hold_lease
from enginesmith.registry.rollouts.reports import read_reports
from enginesmith.registry.rollouts.rollout_state import Slice, is_reporter
from enginesmith.registry.store.layout import MARKER, MARKER_CONTENT, channel_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, policies
from enginesmith.registry.versions.channel_state import position_of, read_channel, read_history
from enginesmith.registry.versions.channel_writes import read_rollout, running_rollouts
from enginesmith.registry.versions.policies import ChannelPolicy
from pipeline.rollout import operations
from pipeline.rollout.operations import Operator
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore
from tests.pipeline.rollout import fleet


def test_waves_open_in_time_and_the_last_promotes_the_channel():
    store, rollout = fleet.running(soak=600)
    assert running_rollouts(store) == [fleet.WHERE]
    actions = [fleet.look(store, seconds).action for seconds in range(0, 2401, 300)]
    assert actions == ["waiting", "waiting", "wave", "waiting", "wave", "waiting", "wave", "waiting", "done"]
    channel = read_channel(store, *fleet.WHERE)
    assert channel.version == "2" and channel.move.by == "ada" and channel.moves == 2
    assert channel.move.why == f"rollout {rollout.id}: its time is over"
    assert channel.active_rollout is None and not running_rollouts(store)
    whats = [decision.what for decision in read_rollout(store, *fleet.WHERE).history]
    assert whats == ["started, wave 1%", "wave 5%", "wave 25%", "wave 100%", "done"]
    assert verify(store).problems == () and fleet.look(store, 9999).action == "done"


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_failing_nodes_halt_it_at_the_first_poll(share):
    store, rollout = fleet.running("50%", "100%", health_ppm=950_000)
    nodes = fleet.reached(rollout)
    assert fleet.look(store, 10).gates[0].why.startswith("no reports")
    bad_share = round(share * len(nodes))
    fleet.tell(store, rollout, 30, nodes[:bad_share], "unhealthy")
    fleet.tell(store, rollout, 30, nodes[bad_share:])
    assert fleet.look(store, 31).action == ("halted" if share == 1.0 else "waiting")
    result = fleet.look(store, 600)
    assert result.action == "halted" and f"{bad_share} of {len(nodes)} reporting nodes failed" in result.why
    assert "unhealthy: told" in result.why and read_channel(store, *fleet.WHERE).active_rollout is None
    assert all(fleet.served(store, node) == "1" for node in fleet.NODES[:20]) and not running_rollouts(store)


def test_one_early_failing_node_halts_nothing():
    store, rollout = fleet.running("50%", "100%", health_ppm=950_000)
    fleet.tell(store, rollout, 30, fleet.reached(rollout)[:1], "pull")
    assert fleet.look(store, 31).action == "waiting"
    fleet.tell(store, rollout, 590, fleet.reached(rollout)[1:])
    assert fleet.look(store, 600).action == "wave"


def test_without_reports_health_does_not_pass():
    store, rollout = fleet.running(health_ppm=950_000, least_reports=3)
    result = fleet.look(store, 9999)
    assert result.action == "waiting" and "health: no reports" in result.why
    fleet.tell(store, rollout, 9999, fleet.NODES[:2])
    assert "3 must report" in fleet.look(store, 9999).why
    fleet.tell(store, rollout, 9999, fleet.NODES[:3])
    assert "went silent" in fleet.look(store, 20_000).why and fleet.look(store, 10_000).action == "wave"


def test_a_person_may_waive_a_wave_without_reports():
    store, rollout = fleet.running("1%", "50%", "100%", health_ppm=950_000, approve=True)
    assert "resume digits:stable --without-data` ends the wave" in fleet.look(store, 700).why
    operations.resume(store, *fleet.WHERE, Operator("bob", fleet.at(701), "three nodes"), without_data=True)
    with pytest.raises(InputError, match="already accepts this wave without data"):
        operations.resume(store, *fleet.WHERE, Operator("eve", fleet.at(702)), without_data=True)
    result = fleet.look(store, 703)
    assert result.action == "wave" and "health: no reports" in result.why and "(waived)" in result.why
    assert fleet.look(store, 2000).action == "waiting"  # of this wave alone
    operations.resume(store, *fleet.WHERE, Operator("bob", fleet.at(2001)), without_data=True)
    fleet.tell(store, rollout, 2002, fleet.NODES[:9], "hook")
    assert fleet.look(store, 2003).action == "halted"


def test_failed_requests_halt_it_and_one_nodes_count_once():
    store, rollout = fleet.running("50%", "100%", errors_ppm=10_000)
    nodes = fleet.reached(rollout)[:50]
    assert "no node says" in fleet.look(store, 10).gates[0].why
    fleet.tell(store, rollout, 20, nodes, requests=1000, errors=2)
    assert fleet.look(store, 30).gates[0].verdict == "pass"
    fleet.tell(store, rollout, 20, nodes[:1], requests=1000, errors=900)
    assert fleet.look(store, 40).action == "waiting"
    fleet.tell(store, rollout, 20, nodes, requests=1000, errors=60)
    assert fleet.look(store, 50).action == "halted"


def test_a_person_ends_each_wave():
    store, _ = fleet.running("5%", "100%", approve=True)
    assert "waits for `enginesmith rollout resume" in fleet.look(store, 700).why
    operations.resume(store, *fleet.WHERE, Operator("bob", fleet.at(702), "looks good"))
    with pytest.raises(InputError, match="waits for no approval"):
        operations.resume(store, *fleet.WHERE, Operator("eve", fleet.at(702)))
    assert fleet.look(store, 703).action == "wave" and "waits for" in fleet.look(store, 1400).why


def test_a_pause_does_not_count_for_a_waves_time():
    store, _ = fleet.running("5%", "100%")
    operations.pause(store, *fleet.WHERE, Operator("ada", fleet.at(500)))
    with pytest.raises(InputError, match="is paused, not running"):
        operations.pause(store, *fleet.WHERE, Operator("ada", fleet.at(500)))
    assert fleet.look(store, 700).action == "paused"
    operations.resume(store, *fleet.WHERE, Operator("ada", fleet.at(1400)))  # and was late with its write
    assert [fleet.look(store, seconds).action for seconds in (1500, 1599, 1600)] == ["waiting", "waiting", "wave"]


def test_a_wave_opens_by_one_step_per_poll():
    store, rollout = fleet.running("5%", "100%", step=20_000)
    assert [state for _, _, state in operations.list_wave_states(rollout)] == ["opening", "to come"]
    shares = [fleet.look(store, seconds).rollout.reach[0].share_ppm for seconds in (0, 29, 30, 31, 200, 201)]
    assert shares == [20_000, 20_000, 40_000, 40_000, 50_000, 50_000]  # a late controller makes no larger step
    assert fleet.look(store, 799).action == "waiting" and fleet.look(store, 800).action == "wave"
    assert fleet.look(store, 829).rollout.reach == (Slice(70_000),)


def test_during_a_rollout_no_version_is_promoted_at_once():
    store, _, second_manifest = fleet.registry()
    fleet.begin_and_look(store, second_manifest, fleet.plan("100%"))
    with pytest.raises(InputError, match=r"a rollout of 2 to digits:stable is running \(wave 1 of 1\).*rollout abort"):
        channels.promote(store, second_manifest, "stable")


def test_a_decision_before_another_move_changes_nothing(monkeypatch):
    store, one, second_manifest = fleet.registry()
    seen_position = position_of(read_channel(store, *fleet.WHERE))
    operations.start(store, second_manifest, "stable", fleet.plan("100%"), Operator("ada", fleet.at(0)))
    with pytest.raises(ConflictError, match="digits:stable: ada started a rollout of 2 meanwhile; nothing was changed"):
        channels.rollback(store, *fleet.WHERE, decided_on=seen_position)
    start_position = position_of(read_channel(store, *fleet.WHERE))
    operations.abort(store, *fleet.WHERE, Operator("ada", fleet.at(1)))
    with pytest.raises(ConflictError, match="digits:stable: its rollout was ended meanwhile"):
        channels.promote(store, second_manifest, "stable", decided_on=start_position)
    moves = iter((second_manifest, second_manifest))
    slow_function = lambda *_, **__: channels.point(hold, next(moves), "stable", "eve") and None  # noqa: E731
    monkeypatch.setattr(channels, "policy_refusal", slow_function)
    with hold_lease(store, "eve's") as hold, pytest.raises(ConflictError, match="eve moved it to 2 meanwhile"):
        channels.promote(store, one, "stable", by="ada", proven_only=True)
    with pytest.raises(ConflictError, match="eve moved it to 2 meanwhile"):
        operations.start(store, one, "stable", fleet.plan(), Operator("ada", fleet.at(2)), decided_on=seen_position)


def test_a_forced_move_ends_the_rollout():
    store, first_manifest, second_manifest = fleet.registry()
    channels.promote(store, second_manifest, "stable")
    fleet.begin_and_look(store, first_manifest, fleet.plan("100%"))
    assert fleet.served(store, fleet.NODES[0]) == "1"
    channels.rollback(store, *fleet.WHERE, by="eve")
    with hold_lease(store, "a writer that knows no rollouts") as guard:
        channels.point(guard, second_manifest, "stable", "eve")
    assert fleet.served(store, fleet.NODES[0]) == "2" and read_channel(store, *fleet.WHERE).active_rollout is None
    with pytest.raises(InputError, match=r"is aborted since .*: the channel was moved to 1 by eve"):
        operations.pause(store, *fleet.WHERE, Operator("ada", fleet.at(1)))
    result = fleet.look(store, 1)
    assert (result.action, result.why, result.is_made) == ("aborted", "the channel was moved to 1 by eve", False)
    assert not running_rollouts(store)
    fleet.begin_and_look(store, first_manifest, fleet.plan("100%"))
    assert [item.state for item in read_history(store, read_channel(store, *fleet.WHERE)).rollouts] == ["aborted"]


def test_invalid_rollouts_cannot_start():
    store, first_manifest, second_manifest = fleet.registry()
    with pytest.raises(InputError, match="serves 1 already"):
        fleet.begin(store, first_manifest, fleet.plan())
    with pytest.raises(InputError, match="serves no version to which nodes could return"):
        operations.start(store, second_manifest, "beta", fleet.plan(), Operator("ada", fleet.at(0)))
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    with pytest.raises(InputError, match="needs a canary's PASS"):
        fleet.begin_and_look(store, second_manifest, fleet.plan())
    assert read_rollout(store, *fleet.WHERE) is None and not running_rollouts(store)


def test_a_policy_with_waves_accepts_only_its_own_waves():
    store, _, second_manifest = fleet.registry()
    ruled = fleet.plan("10%", "100%")
    policies.write(store, "digits", "stable", ChannelPolicy(rollout=ruled))
    assert policies.of_channel(store, *fleet.WHERE).rollout == ruled
    with pytest.raises(InputError, match=r"in waves \(10%, 100%\): `enginesmith rollout start digits@2 digits:st"):
        channels.promote(store, second_manifest, "stable")
    assert operations.plan_of(store, *fleet.WHERE, None) == ruled == operations.plan_of(store, *fleet.WHERE, ruled)
    with pytest.raises(InputError, match="sets another plan"):
        operations.plan_of(store, *fleet.WHERE, fleet.plan("100%"))
    fleet.begin_and_look(store, second_manifest, ruled)
    assert [fleet.look(store, seconds).action for seconds in (600, 1200)] == ["wave", "done"]


def test_a_version_that_the_policy_refuses_meanwhile_is_halted():
    store, _ = fleet.running("100%")
    policies.write(store, "digits", "stable", ChannelPolicy(canary=True))
    result = fleet.look(store, 600)
    assert result.action == "halted" and "the promotion was refused" in result.why
    assert read_channel(store, *fleet.WHERE).version == "1" and fleet.served(store, fleet.NODES[0]) == "1"


def test_too_many_reports_lower_the_reporting_share(monkeypatch):
    for module in ("pipeline.rollout.advance", "enginesmith.registry.rollouts.reports"):
        monkeypatch.setattr(f"{module}.MOST_REPORTERS", 100)
    store, rollout = fleet.running("50%", "100%")
    fleet.tell(store, rollout, 1, fleet.reached(rollout)[:150])
    assert fleet.look(store, 2).rollout.reporters_ppm == 666_666
    assert read_channel(store, *fleet.WHERE).rollout.reporters_ppm == 666_666
    step = fleet.look(store, 600)  # the next wave reaches twice as many
    assert 70 < step.heard.nodes < 130 and step.rollout.reporters_ppm == int(666_666 * 100 / (2 * step.heard.nodes))


def test_deselected_nodes_are_neither_counted_nor_silent():
    store, rollout = fleet.running("50%", "100%", health_ppm=950_000)
    nodes = fleet.reached(rollout)
    fleet.tell(store, rollout, 0, nodes)
    fewer_rollout = replace(rollout, reporters_ppm=500_000)
    names = [node.name for node in nodes if is_reporter(digest_of_bytes(node.name.encode()), 500_000)]
    heard = read_reports(store, fewer_rollout)
    assert sorted(report.node for report in heard.reports) == sorted(names) and heard.nodes == len(names) < len(nodes)


def test_an_equivalent_state_can_be_changed():
    store, _, second_manifest = fleet.registry()
    fleet.begin_and_look(store, second_manifest, fleet.plan("100%"))
    key = channel_key(*fleet.WHERE)
    for _ in range(2):  # one that runs, one that is finished: as a release wrote them that knew one field less
        store.objects[key] = store.objects[key].replace(b'"waived":0', b'"before":0').replace(b',"before":0', b"")
        assert b"waived" not in store.objects[key]
        if not read_rollout(store, *fleet.WHERE).is_finished:
            operations.abort(store, *fleet.WHERE, Operator("ada", fleet.at(1)))
    assert fleet.begin(store, second_manifest, fleet.plan("100%"), 2).state == "running"


def test_accepted_proofs_on_random_inputs_are_recorded():
    store, *_ = fleet.registry()
    manifest = publish_engines(store, [engine(store, status="proven on random inputs")], "three", channel=None).manifest
    with pytest.raises(InputError, match=r"proven on random inputs: .*--accept-random-inputs"):
        fleet.begin(store, manifest, fleet.plan("100%"))
    operations.start(
        store, manifest, "stable", fleet.plan("100%", soak=60), Operator("ada", fleet.at(0)), random_inputs=True
    )
    assert [fleet.look(store, seconds).action for seconds in (0, 60, 120)][-1] == "done"
    dest = MemoryStore({MARKER: MARKER_CONTENT}, uri="memory://other")
    assert mirror(store, [parse_reference("digits:stable")], dest, with_channels=True).moved == ("digits:stable",)
    assert all(read_channel(place, *fleet.WHERE).move.random_inputs for place in (store, dest)), (
        "a mirror records it too"
    )
