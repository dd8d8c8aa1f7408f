"""A channel's rollout as a page shows it: its waves, its gates and its decisions, without what changes by the second.

What nodes report is not here: it changes all the time, and `enginery rollout status` reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from enginery.core.errors import InputError, IntegrityError
from enginery.registry.rollouts.state import Gates, Rollout, read_rollout
from enginery.registry.store.base import Store
from enginery.registry.versions.lookup import Channel


@dataclass(frozen=True)
class ShownWave:
    """A wave. who: its slice of the nodes, '5%'.  soak_s: least time that it lasts, in seconds.  state: in words."""

    who: str
    soak_s: int
    state: str


@dataclass(frozen=True)
class ShownRollout:
    """A rollout of a channel. rollout: None where it cannot be read, and `problem` says why.  state: its own, or
    'overtaken' where the channel was moved by other means and no controller has said so yet.  reach: the share of the
    nodes that it leads to the new version, in words."""

    channel: str
    rollout: Rollout | None = None
    problem: str = ""
    state: str = ""
    waves: tuple[ShownWave, ...] = ()
    gates: tuple[str, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether nodes follow it."""
        return self.rollout is not None and not self.rollout.is_finished and self.state != "overtaken"

    @property
    def reach(self) -> str:
        """'5%', '25%, region=eu-west-1'."""
        return ", ".join(map(str, self.rollout.reach)) if self.rollout else ""


def read_rollouts(store: Store, model: str, channels: Iterable[tuple[str, Channel | None]]) -> tuple[ShownRollout, ...]:
    """The rollout of each channel that has or had one. channels: names, with what can be read of each."""
    found = (_read(store, model, name, channel) for name, channel in channels)
    return tuple(item for item in found if item)


def _read(store: Store, model: str, name: str, channel: Channel | None) -> ShownRollout | None:
    try:
        rollout = read_rollout(store, model, name)
    except (IntegrityError, InputError) as error:
        return ShownRollout(name, problem=str(error))
    if rollout is None:
        return None
    moved = not rollout.is_finished and (channel is None or len(channel.history) != rollout.base_moves)
    state = "overtaken" if moved else rollout.state
    return ShownRollout(name, rollout, "", state, tuple(_waves(rollout)), tuple(_gates(rollout.plan.gates)))


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
