"""The state of a channel's rollout, one document, changed by compare-and-swap; finished ones stay until the next.

A rollout remembers how many moves its channel had when it began. It counts as long as the channel has no more: whoever
moves the channel (a rollback, a promotion by force) ends the rollout by that alone, in one write, before anything else
is recorded. `Pointer.rollout` is made from this document and the channel, by whoever writes a pointer.

A document under `rollouts/` marks a channel whose rollout is not finished, so that a controller of ten thousand models
lists those alone. The mark is written first and removed last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from enginery.core import parsing
from enginery.core.codec import OMIT_DEFAULT, OMIT_NONE, encode
from enginery.core.digest import canonical_json, is_digest
from enginery.core.errors import ConflictError, InputError, IntegrityError, UndecidedError
from enginery.core.names import is_name
from enginery.core.parsing import Malformed
from enginery.registry.rollouts.waves import WHOLE, Slice, add_slice
from enginery.registry.store.base import Documents, Store
from enginery.registry.store.layout import ROLLOUTS, rollout_key, running_rollout_key

FORMAT = 1
MAX_BYTES = 1 << 20
# Of the decisions and of earlier rollouts, so that the document stays small.
MOST_DECISIONS, MOST_EARLIER = 500, 50

State = Literal["running", "paused", "promoting", "done", "halted", "aborted"]
UNFINISHED: tuple[State, ...] = ("running", "paused", "promoting")


@dataclass(frozen=True)
class Gates:
    """What a wave needs before the next one. health_ppm: least share of reporting nodes that are well.

    errors_ppm: largest share of requests that failed.  canary: whether a canary's PASS is needed.  approve: whether a
    person ends each wave.  least_reports: fewest nodes that must have reported for `health_ppm`.
    """

    health_ppm: int | None = None
    errors_ppm: int | None = None
    canary: bool = False
    approve: bool = False
    least_reports: int = 1


@dataclass(frozen=True)
class RolloutPlan:
    """The waves, each with the least time that it lasts in seconds, the gates of all of them, and how fast they open.

    look_s: seconds between two looks of a node.  step_ppm: parts per million of the nodes that may be reached within
    one look; None: a wave opens at once.  nodes: how many nodes there are at least, of which the waves' shares are
    limits; None: not said.
    """

    waves: tuple[Slice, ...]
    soaks_s: tuple[int, ...]
    gates: Gates = Gates()
    look_s: int = 120
    step_ppm: int | None = None
    nodes: int | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class Decision:
    """What was decided. at: ISO 8601, UTC.  wave: the one that it was in, from 1."""

    at: str
    what: str
    wave: int
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

    manifest: digest of the version's.  base, base_manifest, base_moves: the version that the channel serves meanwhile,
    its manifest's digest, and how many moves the channel had.  wave: index of the open one.  opened, soaking: when it
    was opened, and when all of it was reached (None: not yet).  raised: when `reach` grew last.  approved: number of
    waves that a person has approved; waived: of those whose gates without data a person lets pass.
    nodes: how many there are at least, by the plan or the reports of the rollout before; None: not known.  shares_ppm:
    of each wave the share of places that keeps it within its share of `nodes`; none: the plan's.
    losses: what the channel serves and the version has not, as whoever started it accepted.
    reporters_ppm: parts per million of the nodes that report.  revision: grows with every write, from one rollout of
    the channel to the next too.
    """

    id: str
    model: str
    channel: str
    version: str
    manifest: str
    proven_only: bool
    base: str
    base_manifest: str
    base_moves: int
    plan: RolloutPlan
    state: State
    wave: int
    reach: tuple[Slice, ...]
    opened: str
    raised: str
    soaking: str | None
    history: tuple[Decision, ...]
    revision: int = 0
    approved: int = 0
    waived: int = 0
    reporters_ppm: int = WHOLE
    paused: str | None = field(default=None, metadata=OMIT_NONE)
    earlier: tuple[EarlierRollout, ...] = ()
    nodes: int | None = field(default=None, metadata=OMIT_NONE)
    shares_ppm: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    losses: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    format: int = FORMAT

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
    def where(self) -> str:
        """'model:channel'."""
        return f"{self.model}:{self.channel}"

    def decide(self, at: datetime, what: str, by: str, why: str, **changes: object) -> "Rollout":
        """The rollout with a decision in its history, and other fields changed. The first decisions are kept."""
        made = Decision(format_time(at), what, self.wave + 1, by, why[:1000])
        kept = (*self.history[:50], *self.history[50:][-(MOST_DECISIONS - 51) :], made)
        return replace(self, history=kept, **changes)  # type: ignore[arg-type]

    def summarize(self) -> EarlierRollout:
        """What is kept of it in the document of the next one."""
        first, last = self.history[0], self.history[-1]
        return EarlierRollout(self.id, self.version, self.state, first.at, last.at, last.by, last.why)

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        return canonical_json(encode(self))


def open_wave(rollout: Rollout, wave: int, at: datetime) -> Rollout:
    """The rollout with its wave of this index opened: at once, or by its first step."""
    plan, now = rollout.plan, format_time(at)
    before = replace(rollout, wave=wave, opened=now, raised=now, soaking=None)
    if plan.step_ppm is None:
        return replace(before, reach=add_slice(rollout.reach, before.aim), soaking=now)
    return raise_reach(before, at)


def raise_reach(rollout: Rollout, at: datetime) -> Rollout:
    """The rollout with one more step of its open wave reached."""
    target, now = rollout.aim, format_time(at)
    like = [item for item in rollout.reach if (item.region, item.label) == (target.region, target.label)]
    share = max((item.share_ppm for item in like), default=0) + (rollout.plan.step_ppm or WHOLE)
    whole = share >= target.share_ppm
    item = target if whole else replace(target, share_ppm=share)
    return replace(rollout, reach=add_slice(rollout.reach, item), raised=now, soaking=now if whole else None)


def read_rollout(store: Documents, model: str, channel: str) -> Rollout | None:
    """The rollout of a channel, which may be finished; None where there never was one. Raises as `parse_rollout`."""
    return parse_rollout(store.read(rollout_key(model, channel)), model, channel)


def parse_rollout(data: bytes | None, model: str, channel: str) -> Rollout | None:
    """A rollout from its document's bytes. Raises IntegrityError for a damaged one, InputError for a newer format."""
    if data is None:
        return None
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        if (found := parsing.field(document, "format", parsing.count)) > FORMAT:
            raise InputError(
                f"rollout {model}:{channel} has format {found}; this enginery reads {FORMAT}: upgrade enginery"
            )
        rollout = parsing.parse_as(data, MAX_BYTES, Rollout)
        if (rollout.model, rollout.channel) != (model, channel):
            raise Malformed(f"is that of {rollout.where}: it was moved by hand")
        if not (is_name(rollout.version) and is_digest(rollout.manifest) and rollout.history):
            raise Malformed("names no version, or has no history")
        if not rollout.wave < len(rollout.plan.waves) == len(rollout.plan.soaks_s):
            raise Malformed(f"is in wave {rollout.wave} of {len(rollout.plan.waves)}")
        if rollout.shares_ppm and len(rollout.shares_ppm) != len(rollout.plan.waves):
            raise Malformed(f"has {len(rollout.shares_ppm)} shares for {len(rollout.plan.waves)} waves")
        for text in (rollout.opened, rollout.raised, rollout.soaking or rollout.opened):
            parse_time(text)
    except IntegrityError as error:
        raise IntegrityError(f"rollout {model}:{channel}: {error}; delete {rollout_key(model, channel)}") from error
    return rollout


def write_rollout(store: Store, after: Rollout, before: Rollout | None) -> Rollout | None:
    """Write a rollout if its document still says `before`; what was written, None where another writer was faster.

    Writes or removes its mark. The bytes are read again: another release may write the same state in other words.
    """
    after = replace(after, revision=(before.revision if before else 0) + 1)
    key = rollout_key(after.model, after.channel)
    stored = store.read(key)
    if parse_rollout(stored, after.model, after.channel) != before:
        return None
    if not after.is_finished:
        _mark(store, after)
    try:
        written = store.replace(key, after.to_bytes(), stored)
    except UndecidedError:
        written = store.read(key) == after.to_bytes()
    if written and after.is_finished:
        remove_mark(store, after.model, after.channel)
    elif written:
        _mark(store, after)  # the end of the one before may have removed it meanwhile
    return after if written else None


def _mark(store: Store, rollout: Rollout) -> None:
    mark = canonical_json({"format": FORMAT, "rollout": rollout.id})
    store.create(running_rollout_key(rollout.model, rollout.channel), mark)


def remove_mark(store: Store, model: str, channel: str) -> None:
    """Remove the mark of a finished rollout; that of one that was started at the same time stays."""
    store.remove(running_rollout_key(model, channel))
    found = read_rollout(store, model, channel)
    if found and not found.is_finished:
        _mark(store, found)


def change_rollout(store: Store, before: Rollout, after: Rollout) -> Rollout:
    """`write_rollout`; the new state. Raises ConflictError, with what the other writer did, where one was faster."""
    if written := write_rollout(store, after, before):
        return written
    found = read_rollout(store, before.model, before.channel)
    last = f"{found.history[-1].what} by {found.history[-1].by or '?'}" if found else "deleted"
    raise ConflictError(
        f"the rollout of {before.where} was changed at the same time ({last}); look at `enginery rollout status "
        f"{before.where}`, and decide again"
    )


def running_rollouts(store: Documents) -> Iterator[tuple[str, str]]:
    """Model and channel of each rollout that may be unfinished, sorted; one list of keys."""
    for key in store.list(ROLLOUTS):
        match key.removeprefix(ROLLOUTS).split("/"):
            case [model, name] if is_name(model) and name.endswith(".json") and is_name(name.removesuffix(".json")):
                yield model, name.removesuffix(".json")


def format_time(at: datetime) -> str:
    """A time as documents of rollouts hold it: ISO 8601, UTC, to the millisecond."""
    return at.isoformat(timespec="milliseconds")


def parse_time(text: str) -> datetime:
    """A time that `format_time` wrote. Raises Malformed."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Malformed(f"{text[:40]!r} is no time in ISO 8601") from None
    if found.tzinfo is None:
        raise Malformed(f"{text[:40]!r} must say its time zone")
    return found
