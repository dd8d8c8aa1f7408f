"""A rollout as a value: which one is refused."""

from dataclasses import replace

import pytest

from enginesmith.core.parsing import Malformed
from enginesmith.registry.rollouts.state import Decision, Rollout, RolloutPlan, check_rollout
from enginesmith.registry.rollouts.waves import Slice

AT = "2026-01-01T00:00:00+00:00"
PLAN = RolloutPlan(waves=(Slice(100_000), Slice(1_000_000)), soaks_s=(60, 60))
RUNNING = Rollout(
    id="r1", model="digits", channel="stable", version="2", manifest="a" * 64, proven_only=False, base="1",
    base_manifest="b" * 64, plan=PLAN, state="running", wave=1, reach=(), opened=AT, raised=AT, soaking=None,
    history=(Decision(AT, "started", 1),),
)  # fmt: skip


def test_a_rollout_whose_fields_fit_is_taken() -> None:
    check_rollout(RUNNING)
    check_rollout(replace(RUNNING, wave=0, shares_ppm=(100_000, 900_000)))


@pytest.mark.parametrize(("change", "words"), [
    ({"version": "../2"}, "names no version"),
    ({"manifest": "a"}, "names no version"),
    ({"id": "../r1"}, "names no version"),
    ({"history": ()}, "has no history"),
    ({"wave": -1}, "in wave -1 of 2"),
    ({"wave": 2}, "in wave 2 of 2"),
    ({"plan": replace(PLAN, soaks_s=(60,))}, "of 2"),
    ({"shares_ppm": (100_000,)}, "1 shares for 2 waves"),
])  # fmt: skip
def test_one_field_that_does_not_fit_is_enough_to_refuse_a_rollout(change: dict[str, object], words: str) -> None:
    with pytest.raises(Malformed, match=words):
        check_rollout(replace(RUNNING, **change))  # type: ignore[arg-type]
