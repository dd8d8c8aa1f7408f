from datetime import UTC, datetime, timedelta

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.verification import repair, verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_writes import read_rollout, running_rollouts
from pipeline.rollout import advance as advancing
from pipeline.rollout.advance import RolloutFollower
from tests.enginesmith.registry.memory import MemoryStore
from tests.pipeline.rollout.fleet import NODES, WHERE, at, begin, begin_and_look, look, plan, registry, running, tell

SOAK_S = 6 * 3600


def test_a_soak_uses_only_the_stores_clock():
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("5%", "100%", soak=SOAK_S))
    assert datetime.now(UTC) > at(SOAK_S)  # this machine's clock is ahead of the store's, which stands still in 2026
    store.clock.now = at(60)
    follower = RolloutFollower(store, None, len)
    for seconds, action in ((60, "waiting"), (SOAK_S + 59, "waiting"), (SOAK_S + 60, "wave")):
        store.clock.now = at(seconds)
        assert follower.look() and follower.last[WHERE].action == action
    assert datetime.fromisoformat(read_rollout(store, *WHERE).opened) == at(SOAK_S + 60)


def test_a_suspended_writer_shortens_no_soak():
    """The start, and the step to the next wave, are written an hour after their writers asked for the time."""
    store, _, second_manifest = registry()
    store.clock.now = at(3600)
    begin(store, second_manifest, plan("5%", "100%", soak=600, step=None), seconds=0)
    assert [look(store, seconds).action for seconds in (3660, 4259, 4260)] == ["waiting", "waiting", "wave"]

    class Slow(MemoryStore):
        def replace(self, key, data, expected):
            self.clock.now += timedelta(hours=1)
            return super().replace(key, data, expected)

    store, _, second_manifest = registry()
    begin_and_look(store, second_manifest, plan("5%", "100%", soak=600, step=500_000))
    slow_store = Slow(store.objects, clock=store.clock)
    store.clock.now = at(600)
    assert advancing.advance(slow_store, *WHERE).action == "wave" and store.clock.now == at(4200)
    assert [look(store, seconds).action for seconds in (4201, 4230, 4231)] == ["waiting", "waiting", "raised"]
    assert [look(store, seconds).action for seconds in (4830, 4831)] == ["waiting", "done"]


def test_a_node_with_a_wrong_clock_is_neither_silent_nor_alive_for_ever():
    for wrong_s_number in (-7 * 3600, 7 * 3600):
        store, rollout = running("100%", health_ppm=950_000, soak=SOAK_S)
        tell(store, rollout, wrong_s_number, NODES[:20])  # by their clocks
        store.clock.written = dict.fromkeys(store.clock.written, at(30))
        assert look(store, 60).gates[0].verdict == "pass" and "went silent" in look(store, 900).gates[0].why


def test_the_next_poll_removes_a_leftover_mark():
    store, _, second_manifest = registry()
    tell(store, begin(store, second_manifest, plan("100%", health_ppm=950_000)), 10, NODES, "unhealthy")
    steps = []
    follower = RolloutFollower(store, None, len, steps.append)

    class ReadOnly(MemoryStore):
        def remove(self, key):
            raise UnavailableError("503 Slow Down")

    follower.store = ReadOnly(store.objects, clock=store.clock)
    assert not follower.look() and [step.action for step in steps] == ["halted"]
    assert running_rollouts(store) == [WHERE]
    follower.store = store
    assert not follower.look() and running_rollouts(store) == [] and len(steps) == 1


def test_a_mark_of_an_unstarted_rollout_is_removed_and_starts_none():
    store, _, second_manifest = registry()
    store.create("rollouts/digits/stable/dead.json", b"{}")
    store.create("rollouts/gone/stable/dead.json", b"{}")
    channel_before = channels.read_channel(store, *WHERE)
    assert not RolloutFollower(store, None, len).look() and running_rollouts(store) == []
    after = channels.read_channel(store, *WHERE)
    assert channel_before is not None and after is not None and after.revision == channel_before.revision + 1
    rollout = begin(store, second_manifest, plan("100%"))
    store.create("rollouts/digits/stable/dead.json", b"{}")
    repair(store, verify(store))
    assert [key.split("/")[-1] for key in store.list("rollouts/")] == [f"{rollout.id}.json"]
    assert RolloutFollower(store, None, len).look() and running_rollouts(store) == [WHERE]
