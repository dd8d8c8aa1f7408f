"""A rollout of a version to a channel, as a value: its plan, how far it is, what was decided.

It is a part of the channel's document (`versions.state`), so that a channel and its rollout are never at odds: whoever
moves the channel ends the rollout by the same write, and what halts a rollout is the write that nodes read.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Literal

from annotated_types import Len

from enginesmith.core.codec import OMIT_DEFAULT, OMIT_NONE
from enginesmith.core.constraints import Count
from enginesmith.core.digest import Digest
from enginesmith.core.moments import Seconds, Timestamp, read_stamp
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
from enginesmith.registry.rollouts.waves import WHOLE, ServingNode, Slice, add_slice, is_reached

# Of the decisions, the first ones and the last ones, and of the letters of who decided and why, so that the document
# that nodes read stays small.
MOST_DECISIONS, FIRST_DECISIONS, MOST_BY, MOST_WHY = 60, 20, 200, 500

State = Literal["running", "paused", "done", "halted", "aborted"]
UNFINISHED: tuple[State, ...] = ("running", "paused")


@dataclass(frozen=True)
class Gates:
    """What a wave needs before the next one. health_ppm: least share of reporting nodes that are well.

    errors_ppm: largest share of requests that failed.  canary: whether a canary's PASS is needed.  approve: whether a
    person ends each wave.  least_reports: fewest nodes that must have reported for `health_ppm`.
    """

    health_ppm: Count | None = None
    errors_ppm: Count | None = None
    canary: bool = False
    approve: bool = False
    least_reports: Count = 1


@dataclass(frozen=True)
class RolloutPlan:
    """The waves, each with the least time that it lasts in seconds, the gates of all of them, and how fast they open.

    look_s: seconds between two looks of a node.  step_ppm: parts per million of the nodes that may be reached within
    one look; None: a wave opens at once.  nodes: how many nodes there are at least, of which the waves' shares are
    limits; None: not said.
    """

    waves: tuple[Slice, ...]
    soaks_s: tuple[Seconds, ...]
    gates: Gates = Gates()
    look_s: Seconds = 120
    step_ppm: Count | None = None
    nodes: Count | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class Decision:
    """What was decided. at: ISO 8601, UTC.  wave: the one that it was in, from 1."""

    at: Timestamp
    what: str
    wave: Count
    by: str = ""
    why: str = ""


@dataclass(frozen=True)
class EarlierRollout:
    """A finished rollout of the same channel. began, ended: ISO 8601, UTC."""

    id: str
    version: str
    state: str
    began: str
    ended: str
    by: str
    why: str


@dataclass(frozen=True)
class Rollout:
    """A rollout of a version to a channel.

    manifest: digest of the version's.  base, base_manifest: the version that the channel serves meanwhile, and its
    manifest's digest.  wave: index of the open one.  opened: when it was.
    since: when a look first saw that `reach` is what it is, later by the pauses since; None: no look has.  paused: when
    it was, until a look has taken the pause off.  approved: number of waves that a person has approved; waived: of
    those whose gates without data a person lets pass.
    nodes: how many there are at least, by the plan or the reports of the rollout before; None: not known.  shares_ppm:
    of each wave the share of places that keeps it within its share of `nodes`; none: the plan's.
    losses: what the channel serves and the version has not, as whoever started it accepted.
    reporters_ppm: parts per million of the nodes that report.
    """

    id: Name
    model: str
    channel: str
    version: Name
    manifest: Digest
    proven_only: bool
    base: str
    base_manifest: str
    plan: RolloutPlan
    state: State
    wave: Count
    reach: tuple[Slice, ...]
    opened: Timestamp
    since: Timestamp | None
    history: Annotated[tuple[Decision, ...], Len(1)]
    approved: Count = 0
    waived: Count = 0
    reporters_ppm: Count = WHOLE
    paused: Timestamp | None = field(default=None, metadata=OMIT_NONE)
    nodes: Count | None = field(default=None, metadata=OMIT_NONE)
    shares_ppm: tuple[Count, ...] = field(default=(), metadata=OMIT_DEFAULT)
    losses: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def check_fields(self) -> None:
        """Raise Malformed for a wave that is none, and for soaks or shares that are not one for each wave."""
        waves = len(self.plan.waves)
        if not self.wave < waves == len(self.plan.soaks_s) or len(self.shares_ppm) not in (0, waves):
            soaks, shares = len(self.plan.soaks_s), len(self.shares_ppm)
            raise Malformed(f"it is in wave {self.wave} of {waves}, with {soaks} soaks and {shares} shares")

    @property
    def is_finished(self) -> bool:
        """Whether it will not go on."""
        return self.state not in UNFINISHED

    @property
    def target(self) -> Slice:
        """The slice of the open wave."""
        return self.plan.waves[self.wave]

    @property
    def aim(self) -> Slice:
        """The slice that nodes follow once all of the open wave is reached: `target`, or less where that is a limit."""
        return replace(self.target, share_ppm=self.shares_ppm[self.wave]) if self.shares_ppm else self.target

    @property
    def is_open(self) -> bool:
        """Whether all of the open wave is reached."""
        return any(item.covers(self.aim) for item in self.reach)

    @property
    def soaking(self) -> str | None:
        """Since when all of the open wave is reached; None where a part is not, or no look has seen that it is."""
        return self.since if self.is_open else None

    @property
    def where(self) -> str:
        """'model:channel'."""
        return f"{self.model}:{self.channel}"

    def decide(self, at: datetime, what: str, by: str, why: str, **changes: object) -> "Rollout":
        """The rollout with a decision in its history, and other fields changed. The first decisions are kept."""
        made = Decision(format_time(at), what, self.wave + 1, by[:MOST_BY], why[:MOST_WHY])
        first, rest = self.history[:FIRST_DECISIONS], self.history[FIRST_DECISIONS:]
        kept = (*first, *rest[-(MOST_DECISIONS - FIRST_DECISIONS - 1) :], made)
        return replace(self, history=kept, **changes)  # type: ignore[arg-type]

    def serves(self, node: ServingNode) -> bool:
        """Whether a node gets the version that it brings: it is not finished, and has reached the node."""
        return not self.is_finished and is_reached(node, self.id, self.reach)

    def summarize(self) -> EarlierRollout:
        """What the channel's history has of it."""
        first, last = self.history[0], self.history[-1]
        return EarlierRollout(self.id, self.version, self.state, first.at, last.at, last.by, last.why)


def open_wave(rollout: Rollout, wave: int, at: datetime) -> Rollout:
    """The rollout with its wave of this index opened: at once, or by its first step."""
    before = replace(rollout, wave=wave, opened=format_time(at), since=None)
    if rollout.plan.step_ppm is None:
        return replace(before, reach=add_slice(rollout.reach, before.aim))
    return raise_reach(before)


def raise_reach(rollout: Rollout) -> Rollout:
    """The rollout with one more step of its open wave reached."""
    target = rollout.aim
    like = [item for item in rollout.reach if (item.region, item.label) == (target.region, target.label)]
    share = max((item.share_ppm for item in like), default=0) + (rollout.plan.step_ppm or WHOLE)
    item = target if share >= target.share_ppm else replace(target, share_ppm=share)
    return replace(rollout, reach=add_slice(rollout.reach, item), since=None)


def count_time(rollout: Rollout, now: datetime) -> Rollout:
    """The rollout, whose time runs from now on where no look has seen what it reaches, without a pause that has ended.

    now: by the store's clock, read after the rollout: its writer may have stood still between its own reading of the
    clock and the write.
    """
    if rollout.state != "running" or (rollout.since and not rollout.paused):
        return rollout
    pause = now - parse_time(rollout.paused) if rollout.paused else timedelta(0)
    since = parse_time(rollout.since) + pause if rollout.since else now
    return replace(rollout, since=format_time(since), paused=None)


def format_time(at: datetime) -> str:
    """A time as documents of rollouts hold it: ISO 8601, UTC, to the millisecond."""
    return at.isoformat(timespec="milliseconds")


def parse_time(text: str) -> datetime:
    """A time that `format_time` wrote. Raises Malformed."""
    return read_stamp(text, "time")
