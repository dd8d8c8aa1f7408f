from dataclasses import replace

import pytest

from enginesmith.core.codec import decode, encode
from enginesmith.core.parsing import Malformed
from enginesmith.registry.rollouts.rollout_state import Decision, Rollout, RolloutPlan, Slice

AT = "2026-01-01T00:00:00+00:00"
PLAN = RolloutPlan(waves=(Slice(100_000), Slice(1_000_000)), soaks_s=(60, 60))
RUNNING = Rollout(
    id="r1", model="digits", channel="stable", version="2", manifest="a" * 64, proven_only=False, base="1",
    base_manifest="b" * 64, plan=PLAN, state="running", wave=1, reach=(), opened=AT, since=None,
    history=(Decision(AT, "started", 1),),
)  # fmt: skip


def test_a_consistent_rollout_is_accepted() -> None:
    for fitting_rollout in (RUNNING, replace(RUNNING, wave=0, shares_ppm=(100_000, 900_000))):
        assert decode(encode(fitting_rollout), Rollout, "") == fitting_rollout


@pytest.mark.parametrize(("change", "words"), [
    ({"version": "../2"}, "version is"),
    ({"manifest": "a"}, "manifest is"),
    ({"id": "../r1"}, "id is"),
    ({"history": ()}, "history is"),
    ({"wave": -1}, "wave is -1"),
    ({"wave": 2}, "in wave 2 of 2"),
    ({"plan": replace(PLAN, soaks_s=(60,))}, "with 1 soaks"),
    ({"shares_ppm": (100_000,)}, "1 shares"),
    ({"plan": replace(PLAN, soaks_s=(60, 2**62))}, "seconds from 0 to"),
    ({"plan": replace(PLAN, look_s=2**62)}, "seconds from 0 to"),
    ({"since": "9999-12-31T23:59:59+00:00"}, "since is"),
])  # fmt: skip
def test_one_inconsistent_field_suffices_to_refuse_a_rollout(change: dict[str, object], words: str) -> None:
    with pytest.raises(Malformed, match=words):
        decode(encode(replace(RUNNING, **change)), Rollout, "")  # type: ignore[arg-type]
