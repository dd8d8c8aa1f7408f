"""A channel's rollout as a page shows it: its waves, its gates and its decisions, without what changes by the second.

What nodes report is not here: it changes all the time, and `enginesmith rollout status` reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from enginesmith.registry.rollouts.state import EarlierRollout, Gates, Rollout
from enginesmith.registry.versions.state import Channel, ChannelHistory


@dataclass(frozen=True)
class ShownWave:
    """A wave. who: its slice of the nodes, '5%'.  soak_s: least time that it lasts, in seconds.  state: in words."""

    who: str
    soak_s: int
    state: str


@dataclass(frozen=True)
class ShownRollout:
    """A rollout of a channel. earlier: those before it, oldest first."""

    channel: str
    rollout: Rollout
    earlier: tuple[EarlierRollout, ...]
    waves: tuple[ShownWave, ...]
    gates: tuple[str, ...]

    @property
    def state(self) -> str:
        """Its state."""
        return self.rollout.state

    @property
    def is_active(self) -> bool:
        """Whether nodes follow it."""
        return not self.rollout.is_finished

    @property
    def reach(self) -> str:
        """The share of the nodes that it leads to the new version: '5%', '25%, region=eu-west-1'."""
        return ", ".join(map(str, self.rollout.reach))


def show_rollout(channel: Channel, history: ChannelHistory) -> ShownRollout | None:
    """The rollout of a channel; None where it never had one."""
    rollout = channel.rollout
    if rollout is None:
        return None
    earlier = tuple(item for item in history.rollouts if item.id != rollout.id)
    waves, gates = tuple(_waves(rollout)), tuple(_gates(rollout.plan.gates))
    return ShownRollout(channel.name, rollout, earlier, waves, gates)


def _waves(rollout: Rollout) -> Iterable[ShownWave]:
    for index, (wave, soak_s) in enumerate(zip(rollout.plan.waves, rollout.plan.soaks_s, strict=True)):
        if index < rollout.wave or rollout.state == "done":
            state = "passed"
        elif index > rollout.wave:
            state = "never" if rollout.is_finished else "to come"
        elif rollout.state != "running":
            state = rollout.state
        else:
            state = "open" if rollout.soaking else "opening"
        yield ShownWave(str(wave), soak_s, state)


def _gates(gates: Gates) -> Iterable[str]:
    if gates.health_ppm is not None:
        reports = f", of at least {gates.least_reports}" if gates.least_reports > 1 else ""
        yield f"at least {gates.health_ppm / 10_000:g} % of the nodes that report are well{reports}"
    if gates.errors_ppm is not None:
        yield f"at most {gates.errors_ppm / 10_000:g} % of the requests failed"
    if gates.canary:
        yield "a canary's PASS"
    if gates.approve:
        yield "a person approves each wave"
