"""The controller's loop: by whose clock it decides, and what it says."""

from datetime import UTC, datetime

import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.verification import repair, verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.feeds import set_feed
from enginesmith.registry.versions.rolling import read_rollout, running_rollouts
from pipeline.rollout import advance as advancing
from pipeline.rollout.follow import RolloutFollower
from tests.pipeline.rollout.fleet import NODES, WHERE, at, begin, plan, registry, tell

SOAK_S = 6 * 3600


def test_a_soak_begins_and_ends_by_the_stores_clock_whatever_a_controllers_says():
    store, _, two = registry()
    begin(store, two, plan("5%", "100%", soak=SOAK_S))
    assert datetime.now(UTC) > at(SOAK_S)  # this machine's clock is ahead of the store's, which stands still in 2026
    store.clock.now = at(60)
    follower = RolloutFollower(store, None, len)
    assert follower.look() and follower.last[WHERE].action == "waiting"
    store.clock.now = at(SOAK_S)
    assert follower.look() and follower.last[WHERE].action == "wave"
    opened = read_rollout(store, *WHERE).opened
    assert datetime.fromisoformat(opened) == at(SOAK_S)


def test_a_node_whose_clock_is_wrong_is_neither_silent_nor_alive_for_ever():
    for wrong_s in (-7 * 3600, 7 * 3600):
        store, _, two = registry()
        rollout = begin(store, two, plan("100%", health_ppm=950_000, soak=SOAK_S))
        tell(store, rollout, wrong_s, NODES[:20])  # by their clocks
        store.clock.written = dict.fromkeys(store.clock.written, at(30))
        assert advancing.advance(store, *WHERE, at(60)).gates[0].verdict == "pass"
        assert "went silent" in advancing.advance(store, *WHERE, at(900)).gates[0].why


def test_a_step_whose_feed_could_not_be_written_is_said_and_made_up_for(monkeypatch: pytest.MonkeyPatch):
    store, _, two = registry()
    set_feed(store, "all", ["*:*"])
    rollout = begin(store, two, plan("100%", health_ppm=950_000))
    tell(store, rollout, 10, NODES, "unhealthy")
    said, steps = [], []
    follower = RolloutFollower(store, None, said.append, steps.append)

    def fail(*_):
        raise UnavailableError("503 Slow Down")

    with monkeypatch.context() as patch:
        patch.setattr(advancing, "settle_rollout", fail)
        assert follower.look()  # it goes on until that is written, too
    assert [step.action for step in steps] == ["halted"] and "not written everywhere yet: 503" in said[-1]
    assert running_rollouts(store) == [WHERE]
    assert not follower.look() and running_rollouts(store) == [] and len(steps) == 1


def test_a_mark_of_a_rollout_that_never_began_goes_and_begins_none_later():
    store, _, two = registry()
    store.create("rollouts/digits/stable/dead.json", b"{}")
    store.create("rollouts/gone/stable/dead.json", b"{}")
    before = channels.read_channel(store, *WHERE)
    assert not RolloutFollower(store, None, len).look() and running_rollouts(store) == []
    after = channels.read_channel(store, *WHERE)
    assert before is not None and after is not None and after.revision == before.revision + 1
    rollout = begin(store, two, plan("100%"))
    store.create("rollouts/digits/stable/dead.json", b"{}")
    repair(store, verify(store))
    assert [key.split("/")[-1] for key in store.list("rollouts/")] == [f"{rollout.id}.json"]
    assert RolloutFollower(store, None, len).look() and running_rollouts(store) == [WHERE]
