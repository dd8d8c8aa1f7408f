"""A rollout of a version to a channel, as a value, and the nodes in each wave."""

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Annotated, Literal

from annotated_types import Len

from enginesmith.core.errors import Digest, InputError
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed, Seconds, Timestamp, read_stamp
from enginesmith.core.requirements import Count

# The nodes in a wave of a rollout: a pure function of a node, the rollout's id and the shares that are reached.
#
# A node's place is a number in [0, 1): the first 64 bits of SHA-256 over the rollout's id and the node's name. A share
# reaches the nodes whose place is below it. So shares are nested (1 % is a part of 5 %), each rollout starts with other
# nodes, and no list of nodes is needed.

# Shares are whole parts per million, so that all programs round them equally.
WHOLE = 1_000_000
MOST_LABELS = 32
# The maximum number of waves; all of them are in the document that nodes read.
MOST_WAVES = 100
_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%")


@dataclass(frozen=True)
class ServingNode:
    """A serving node. name: unique in the fleet.  region: '' if it has none.  labels: any words.

    Raises InputError for an invalid name, region or label.
    """

    name: str
    region: str = ""
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, text in (
            ("name", self.name),
            ("region", self.region or "-"),
            *(("label", label) for label in self.labels),
        ):
            if text != "-" and not _TEXT.fullmatch(text):
                option = {"name": "node", "label": "labels"}.get(field, field)
                remedy = f"give another by --{option} or ENGINESMITH_{option.upper()}"
                raise InputError(f"node {field} {text[:80]!r} must match {_TEXT.pattern}; {remedy}")
        if len(self.labels) > MOST_LABELS:
            raise InputError(f"node {self.name} has {len(self.labels)} labels; at most {MOST_LABELS} are allowed")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ServingNode":
        """The node of ENGINESMITH_NODE (else the host), ENGINESMITH_REGION and ENGINESMITH_LABELS ('canary,gpu')."""
        labels = environment.get("ENGINESMITH_LABELS", "").replace(",", " ").split()
        host = re.sub(r"[^A-Za-z0-9._/:-]", "-", socket.gethostname()).lstrip("._/:-")[:128]
        return cls(
            environment.get("ENGINESMITH_NODE") or host,
            environment.get("ENGINESMITH_REGION", ""),
            tuple(sorted(set(labels))),
        )


@dataclass(frozen=True)
class Slice:
    """A share of the nodes by their places, in a region or with a label if given. share_ppm: parts per million."""

    share_ppm: Count
    region: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share_ppm <= WHOLE:
            raise ValueError(f"share_ppm is {self.share_ppm}; it must be 0 to {WHOLE}")
        if self.region is not None and self.label is not None:
            raise ValueError("region and label are both given; a wave has only one of them")

    def covers(self, other: "Slice") -> bool:
        """Whether every node of `other` is in this slice."""
        has_same_nodes = (self.region, self.label) in ((other.region, other.label), (None, None))
        return has_same_nodes and self.share_ppm >= other.share_ppm

    def __str__(self) -> str:
        share_text = f"{self.share_ppm / 10_000:g}%"
        selector = f"region={self.region}" if self.region else f"label={self.label}" if self.label else ""
        return share_text if not selector else selector if self.share_ppm == WHOLE else f"{selector}:{share_text}"


def is_below(place: int, share_ppm: int) -> bool:
    """Whether a place (a whole number below 2^64) is within a share."""
    return place * WHOLE < share_ppm << 64


def is_reached(node: ServingNode, rollout: str, reach: Iterable[Slice]) -> bool:
    """Whether a rollout has reached a node. reach: the open slices; one of them suffices."""
    # A node's position in a rollout, as a whole number below 2^64.
    position = int.from_bytes(sha256(f"{rollout}\n{node.name}".encode()).digest()[:8], "big")
    return any(
        is_below(position, open_slice.share_ppm)
        and open_slice.region in (None, node.region)
        and (open_slice.label is None or open_slice.label in node.labels)
        for open_slice in reach
    )


def is_reporter(node: str, reporters_ppm: int) -> bool:
    """Whether a node is among those that report. node: SHA-256 of its name in hexadecimal digits, as in the key of its
    report. It is independent of the node's places, so that every wave has reporting nodes."""
    return is_below(int(node[:16], 16), reporters_ppm)


def add_slice(reach: Sequence[Slice], new_slice: Slice) -> tuple[Slice, ...]:
    """The slices and a new one. Slices that the new one covers are left out, and so is the new one if one covers it."""
    if any(old_slice.covers(new_slice) for old_slice in reach):
        return tuple(reach)
    return (*(old_slice for old_slice in reach if not new_slice.covers(old_slice)), new_slice)


def parse_share(text: str, what: str) -> int:
    """Parse a share such as '5%' or '0.5%' to parts per million. what: for errors. Raises InputError."""
    match = _PERCENT.fullmatch(text.strip())
    share_ppm = round(float(match[1]) * 10_000) if match else 0
    if not 0 < share_ppm <= WHOLE:
        raise InputError(f"{what} {text!r}: give a share above 0% and up to 100%, such as 5%")
    return share_ppm


def parse_wave(text: str) -> Slice:
    """The slice of '5%', 'region=eu-west-1', 'label=canary', or 'region=eu-west-1:5%'. Raises InputError."""
    selector, separator, value = text.partition("=")
    if not separator:
        return Slice(parse_share(text, "wave"))
    name, _, share_text = value.partition(":") if value.endswith("%") else (value, "", "")
    if selector not in ("region", "label") or not _TEXT.fullmatch(name):
        raise InputError(
            f"wave {text!r}: give 5%, region=NAME, label=NAME, or one of these with a share, label=NAME:5%"
        )
    share_ppm = parse_share(share_text, f"wave {text!r}: share") if share_text else WHOLE
    return Slice(share_ppm, name, None) if selector == "region" else Slice(share_ppm, None, name)


def check_waves(waves: Sequence[Slice]) -> None:
    """Raise InputError unless each wave reaches more nodes than those before it, the last one reaches all, and there
    are not too many."""
    if not waves or waves[-1] != Slice(WHOLE):
        raise InputError("the last wave must be 100%, so that the rollout ends with every node")
    if len(waves) > MOST_WAVES:
        raise InputError(f"{len(waves)} waves; at most {MOST_WAVES} are allowed")
    reach: tuple[Slice, ...] = ()
    for wave in waves:
        grown_reach = add_slice(reach, wave)
        if grown_reach == reach:
            raise InputError(f"wave {wave} reaches no node that the waves before it have not reached; leave it out")
        reach = grown_reach


# A rollout of a version to a channel, as a value: its plan, its progress, its decisions.
#
# It is part of the channel's document (`versions.channel_state`), so that both always agree: a write that moves the
# channel also ends the rollout, and nodes read the same write that halts a rollout.

# The first and last decisions are kept, and the texts of who decided and why are cut, so that the document that nodes
# read stays small.
MOST_DECISIONS, FIRST_DECISIONS, MOST_BY, MOST_WHY = 60, 20, 200, 500

State = Literal["running", "paused", "done", "halted", "aborted"]
UNFINISHED: tuple[State, ...] = ("running", "paused")


@dataclass(frozen=True)
class Gates:
    """Conditions of a wave for the next one. health_ppm: least share of reporting nodes that are healthy.

    errors_ppm: largest share of requests that failed.  canary: whether a canary's PASS is needed.  approve: whether a
    person ends each wave. least_reports: fewest nodes that must have reported for `health_ppm`.
    """

    health_ppm: Count | None = None
    errors_ppm: Count | None = None
    canary: bool = False
    approve: bool = False
    least_reports: Count = 1


@dataclass(frozen=True)
class RolloutPlan:
    """The waves, each with its minimum duration in seconds, the gates for all of them, and how fast they open.

    look_s: polling interval of a node in seconds.  step_ppm: parts per million of the nodes that may be reached within
    one interval; None: a wave opens at once.  nodes: the least number of nodes, of which the waves' shares are limits;
    None if unknown.
    """

    waves: tuple[Slice, ...]
    soaks_s: tuple[Seconds, ...]
    gates: Gates = Gates()
    look_s: Seconds = 120
    step_ppm: Count | None = None
    nodes: Count | None = None


@dataclass(frozen=True)
class Decision:
    """A decision about a rollout. at: ISO 8601, UTC.  wave: the open wave, from 1."""

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
    since: when the controller first saw that `reach` has this value, plus the pauses since; None if it did not yet.
    paused: the start of a pause, until the controller has subtracted it.  approved: number of waves that a person has
    approved; waived: of those whose gates a person lets pass without data.
    nodes: the least number of nodes, from the plan or the reports of the last rollout; None if unknown.  shares_ppm:
    for each wave the share of places that keeps it within its share of `nodes`; empty: the plan's.
    losses: what the channel serves and the version lacks, as accepted by whoever started it.  random_inputs: whether
    engines proven only on random inputs were accepted.
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
    paused: Timestamp | None = None
    nodes: Count | None = None
    shares_ppm: tuple[Count, ...] = ()
    losses: tuple[str, ...] = ()
    random_inputs: bool = False

    def check_fields(self) -> None:
        """Raise Malformed for an invalid wave index, and if soaks or shares are not one per wave."""
        wave_count = len(self.plan.waves)
        if not self.wave < wave_count == len(self.plan.soaks_s) or len(self.shares_ppm) not in (0, wave_count):
            soak_count, share_count = len(self.plan.soaks_s), len(self.shares_ppm)
            raise Malformed(
                f"it is in wave {self.wave} of {wave_count}, with {soak_count} soaks and {share_count} shares"
            )

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.state not in UNFINISHED

    @property
    def target(self) -> Slice:
        """The slice of the open wave."""
        return self.plan.waves[self.wave]

    @property
    def aim(self) -> Slice:
        """The slice that nodes follow once the open wave is fully reached: `target`, or less if `nodes` limits it."""
        return replace(self.target, share_ppm=self.shares_ppm[self.wave]) if self.shares_ppm else self.target

    @property
    def is_open(self) -> bool:
        """Whether the open wave is fully reached."""
        return any(open_slice.covers(self.aim) for open_slice in self.reach)

    @property
    def soaking(self) -> str | None:
        """Since when the open wave is fully reached; None if it is not, or the controller has not seen it yet."""
        return self.since if self.is_open else None

    @property
    def where(self) -> str:
        """'model:channel'."""
        return f"{self.model}:{self.channel}"

    def decide(self, at: datetime, what: str, by: str, why: str, **changes: object) -> "Rollout":
        """The rollout with a new decision in its history and changed fields. The first decisions are kept."""
        decision = Decision(format_time(at), what, self.wave + 1, by[:MOST_BY], why[:MOST_WHY])
        first_decisions, later_decisions = self.history[:FIRST_DECISIONS], self.history[FIRST_DECISIONS:]
        decisions = (*first_decisions, *later_decisions[-(MOST_DECISIONS - FIRST_DECISIONS - 1) :], decision)
        return replace(self, history=decisions, **changes)  # type: ignore[arg-type]

    def serves(self, node: ServingNode) -> bool:
        """Whether a node gets the rollout's version: the rollout is not finished, and has reached the node."""
        return not self.is_finished and is_reached(node, self.id, self.reach)

    def summarize(self) -> EarlierRollout:
        """The rollout's entry in the channel's history."""
        first_decision, last_decision = self.history[0], self.history[-1]
        return EarlierRollout(
            self.id, self.version, self.state, first_decision.at, last_decision.at, last_decision.by, last_decision.why
        )


def open_wave(rollout: Rollout, wave: int, at: datetime) -> Rollout:
    """The rollout with the wave of this index opened: at once, or by its first step."""
    new_rollout = replace(rollout, wave=wave, opened=format_time(at), since=None)
    if rollout.plan.step_ppm is None:
        return replace(new_rollout, reach=add_slice(rollout.reach, new_rollout.aim))
    return raise_reach(new_rollout)


def raise_reach(rollout: Rollout) -> Rollout:
    """The rollout with one more step of its open wave."""
    target = rollout.aim
    same_slices = [
        open_slice
        for open_slice in rollout.reach
        if (open_slice.region, open_slice.label) == (target.region, target.label)
    ]
    next_share_ppm = max((open_slice.share_ppm for open_slice in same_slices), default=0) + (
        rollout.plan.step_ppm or WHOLE
    )
    next_slice = target if next_share_ppm >= target.share_ppm else replace(target, share_ppm=next_share_ppm)
    return replace(rollout, reach=add_slice(rollout.reach, next_slice), since=None)


def count_time(rollout: Rollout, now: datetime) -> Rollout:
    """The rollout with its time started if `since` was None, and with a pause that has ended taken off.

    now: the time on the store's clock, read after the rollout, since its writer may have been suspended between reading
    the clock and the write.
    """
    if rollout.state != "running" or (rollout.since and not rollout.paused):
        return rollout
    pause = now - parse_time(rollout.paused) if rollout.paused else timedelta(0)
    start_time = parse_time(rollout.since) + pause if rollout.since else now
    return replace(rollout, since=format_time(start_time), paused=None)


def format_time(at: datetime) -> str:
    """A time in the format of rollouts: ISO 8601, UTC, to the millisecond."""
    return at.isoformat(timespec="milliseconds")


def parse_time(text: str) -> datetime:
    """Parse a time that `format_time` wrote. Raises Malformed."""
    try:
        return read_stamp(text)
    except ValueError as error:
        raise Malformed(f"time {error}") from error
