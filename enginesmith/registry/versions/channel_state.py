"""The state of a channel, one document: the version that it serves, and the rollout that brings another one.

Nodes read this document, and only it decides: a move, and each step, halt or end of a rollout, is one compare-and-swap
of it. So the channel and the nodes never disagree, and a writer that is killed leaves either the state before or the
state after (docs/decisions/0026-one-document-for-a-channel.md).

It contains only the last move and the last rollout, so that nodes can read it after every change. Earlier moves and
rollouts are in the channel's history, a document that grows. A writer that replaces a move or a rollout first writes it
to the history, so that the two documents together always contain all moves. Other copies of the state (the index, the
marks of running rollouts) are corrected by the next reader.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from annotated_types import Interval

from enginesmith.core.codec import NewerFormatError, encode, explain_damage, parse_as
from enginesmith.core.errors import ConflictError, Digest, EnginesmithError, InputError, IntegrityError, canonical_json
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import MAX_COUNT, Count, Format
from enginesmith.registry.rollouts.rollout_state import WHOLE, EarlierRollout, Rollout, ServingNode
from enginesmith.registry.store.base import Documents, Store, change, place_of
from enginesmith.registry.store.layout import FORMAT as REGISTRY_FORMAT
from enginesmith.registry.store.layout import channel_history_key, channel_key

FORMAT = 1
# Maximum sizes: of the state, which all nodes read; and of the history.
MAX_BYTES, HISTORY_MAX_BYTES = 256 << 10, 16 << 20
MOST_EARLIER = 50

Action = Literal["promote", "rollback"]
# The number of a channel's moves, and the id of the running rollout ('' for none).
Position = tuple[int, str]


@dataclass(frozen=True)
class Move:
    """One entry of a channel's history: the version, when (ISO 8601, UTC), by whom and why.

    manifest: digest of the version's manifest.  canary: digests of the canary reports for its promotion, which are
    blobs of the registry.  losses: what was served before and not after it, and was accepted (`policies.list_losses`).
    random_inputs: whether engines proven only on random inputs were accepted.
    """

    version: Name
    manifest: Digest
    at: str
    by: str = ""
    why: str = ""
    proven_only: bool = False
    action: Action = "promote"
    canary: tuple[Digest, ...] = ()
    losses: tuple[str, ...] = ()
    random_inputs: bool = False


@dataclass(frozen=True)
class Channel:
    """A name such as `stable` that points at one version.

    moves: the number of its moves.  move: the last one.  rollout: the running or last one.  snapshots: manifest's
    digest -> digest of the blob with the version's documents (`snapshots`); a version without one is read document by
    document.  revision: number of the write.  registry: the format of the registry, so that a reader needs no marker.
    reporters_ppm: parts per million of the nodes that report outside of a rollout.
    """

    model: str
    name: str
    moves: Annotated[int, Interval(ge=1, le=MAX_COUNT)]
    move: Move
    rollout: Rollout | None = None
    snapshots: Mapping[Digest, Digest] = field(default_factory=dict)
    revision: Count = 0
    reporters_ppm: Count = WHOLE
    registry: Annotated[int, Format(REGISTRY_FORMAT)] = REGISTRY_FORMAT
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def check_fields(self) -> None:
        """Raise Malformed for a rollout of another channel."""
        if self.rollout and (self.rollout.model, self.rollout.channel) != (self.model, self.name):
            raise Malformed(f"its rollout belongs to {self.rollout.where}")

    @property
    def version(self) -> str:
        """The version it serves."""
        return self.move.version

    @property
    def manifest(self) -> str:
        """Digest of that version's manifest."""
        return self.move.manifest

    @property
    def proven_only(self) -> bool:
        """Whether it serves only proven engines."""
        return self.move.proven_only

    @property
    def active_rollout(self) -> Rollout | None:
        """The rollout if it is not finished, else None."""
        return self.rollout if self.rollout and not self.rollout.is_finished else None

    def served_to(self, node: ServingNode | None) -> Move:
        """The version that a node gets, as the move to it. node: None means a node that no rollout reaches."""
        rollout = self.rollout
        if rollout is None or node is None or not rollout.serves(node):
            return self.move
        start = rollout.history[0].at
        return Move(
            rollout.version,
            rollout.manifest,
            start,
            proven_only=rollout.proven_only,
            random_inputs=rollout.random_inputs,
        )

    @property
    def served(self) -> dict[str, str]:
        """The versions that nodes get, by the digest of the manifest."""
        rollout = self.active_rollout
        return {self.manifest: self.version} | ({rollout.manifest: rollout.version} if rollout else {})

    def to_bytes(self) -> bytes:
        """The document as it is stored; below `MAX_BYTES`, as its texts and the number of waves are limited."""
        return canonical_json(encode(self))


@dataclass(frozen=True)
class ChannelHistory:
    """The moves of a channel, oldest first, and its finished rollouts."""

    moves: tuple[Move, ...] = ()
    rollouts: tuple[EarlierRollout, ...] = ()
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def previous(self) -> Move | None:
        """The move that a rollback returns to: the active promotion before the last one; None if there is none."""
        active_moves = self.active_promotions()
        return active_moves[-2] if len(active_moves) > 1 else None

    def active_promotions(self) -> list[Move]:
        """The promotions that were not rolled back, oldest first; for a version promoted again, only the last one.

        A rollback to the version that is already active, which older releases wrote after such a promotion, ends none.
        """
        active_moves: list[Move] = []
        for move in self.moves:
            is_same_version = bool(active_moves) and active_moves[-1].manifest == move.manifest
            if is_same_version == (move.action == "promote"):
                del active_moves[-1:]
            if move.action == "promote":
                active_moves.append(move)
        return active_moves

    def with_state(self, channel: Channel) -> "ChannelHistory":
        """The history up to a state of the channel, with its move, and its rollout if that is finished.

        Raises Malformed if moves before that are missing.
        """
        if len(self.moves) < channel.moves - 1 or self.moves[channel.moves - 1 : channel.moves] not in (
            (),
            (channel.move,),
        ):
            raise Malformed(f"has {len(self.moves)} moves, which do not lead to move {channel.moves} of the channel")
        rollouts, last_rollout = self.rollouts, channel.rollout
        if last_rollout and last_rollout.is_finished and all(rollout.id != last_rollout.id for rollout in rollouts):
            rollouts = (*rollouts, last_rollout.summarize())[-MOST_EARLIER:]
        return ChannelHistory((*self.moves[: channel.moves - 1], channel.move), rollouts)


def position_of(channel: Channel | None) -> Position:
    """The position of a channel, which changes with each move and rollout's begin and end; (0, '') without one."""
    rollout = channel.active_rollout if channel else None
    return channel.moves if channel else 0, rollout.id if rollout else ""


def check_unmoved(channel: Channel | None, decided_on: Position | None) -> None:
    """Raise ConflictError, with the mover's name, if a channel changed its position since a move was decided."""
    if channel is None or decided_on in (None, position_of(channel)):
        return
    where, change = f"{channel.model}:{channel.name}", f"{channel.move.by or '?'} moved it to {channel.version}"
    if rollout := channel.active_rollout:
        change = f"{rollout.history[0].by or '?'} started a rollout of {rollout.version}"
    elif decided_on and channel.moves == decided_on[0]:
        change = "its rollout was ended"
    raise ConflictError(f"channel {where}: {change} meanwhile; nothing was changed: look at it and decide again")


def read_channel(store: Documents, model: str, name: str) -> Channel | None:
    """The state of a channel; None if it does not exist. Raises as `parse_channel`."""
    return parse_channel(store.read(channel_key(model, name)), model, name, place_of(store, channel_key(model, name)))


def parse_channel(data: bytes | None, model: str, name: str, place: str = "") -> Channel | None:
    """Parse a channel's state; None without a document. place: of the document, for messages.

    Raises IntegrityError for a damaged document, InputError for one of a newer format, or of a newer registry.
    """
    if data is None:
        return None
    document_name = f"channel {model}:{name}" + (f" ({place})" if place else "")
    try:
        channel = parse_as(data, MAX_BYTES, Channel)
        if (channel.model, channel.name) != (model, name):
            raise Malformed(f"belongs to {channel.model}:{channel.name}: it was moved by hand")
    except NewerFormatError as error:
        raise InputError(f"{document_name}: {error}") from error
    except IntegrityError as error:
        remedy = "restore it from a copy, or delete this file and promote a version again"
        raise IntegrityError(f"{document_name}: {error}; {remedy}") from error
    return channel


def read_history(store: Documents, channel: Channel) -> ChannelHistory:
    """The history of a channel, up to the given state. Raises IntegrityError if it is damaged or lost."""
    history = _read_stored(store, channel.model, channel.name)
    return with_state(store, history, channel)


def parse_history(data: bytes | None, what: str) -> ChannelHistory:
    """Parse a history; an empty one without a document. what: the document, for messages.

    Raises IntegrityError for a damaged document, InputError for one of a newer format.
    """
    if data is None:
        return ChannelHistory()
    try:
        return parse_as(data, HISTORY_MAX_BYTES, ChannelHistory)
    except NewerFormatError as error:
        raise InputError(f"{what}: {error}") from error
    except IntegrityError as error:
        raise IntegrityError(f"{what}: {error}; {_REMEDY}") from error


_REMEDY = "restore it from a copy, or delete it and the channel's document, and promote a version again"


def _read_stored(store: Documents, model: str, name: str) -> ChannelHistory:
    return parse_history(store.read(channel_history_key(model, name)), f"history of {model}:{name}")


def with_state(store: Documents, history: ChannelHistory, channel: Channel) -> ChannelHistory:
    """`ChannelHistory.with_state`. Raises IntegrityError with the history's place if moves are missing."""
    locator = place_of(store, channel_history_key(channel.model, channel.name))
    with explain_damage(f"history of {channel.model}:{channel.name} ({locator})", _REMEDY):
        return history.with_state(channel)


def count_moves(store: Documents, model: str, name: str) -> int:
    """The number of moves in the history of a channel without a state: 0, unless the state was deleted by hand."""
    return len(_read_stored(store, model, name).moves)


def keep_history(store: Store, channel: Channel) -> None:
    """Write the last move and rollout of a state to the channel's history, unless they are in it. Raises as
    `read_history`, and errors of the store."""
    key, document_name = channel_history_key(channel.model, channel.name), f"history of {channel.model}:{channel.name}"

    def make(data: bytes | None) -> bytes | None:
        history = parse_history(data, document_name)
        if len(history.moves) > channel.moves:
            return None  # the state was replaced, and its replacer wrote the history
        return canonical_json(encode(with_state(store, history, channel)))

    change(store, key, make)


def change_channel(
    store: Store, model: str, name: str, make: Callable[[Channel | None], Channel | None]
) -> Channel | None:
    """Replace the state of a channel by the result of `make` for it (None: no state), and return the new state.

    `make` may return None to change nothing, and is called again after a lost race. Moves and rollouts that the new
    state drops are in the history first. Raises ConflictError while others keep changing it, IntegrityError for a
    damaged document, and what `make` and the store raise.

    The versions that the channel leaves lose their garbage marks: a collection that read the references before they
    were served may have marked them since, and their grace period begins now. This happens before the write, after
    which the writer may be killed, and after it, as the writer may have been suspended in between.
    """
    old_state: Channel | None = None
    unserved_versions: list[str] = []

    def write(data: bytes | None) -> bytes | None:
        nonlocal old_state, unserved_versions
        old_state = read(data)
        new_state = make(old_state)
        if new_state is None or new_state == old_state:
            return data
        if old_state:
            unserved_versions = sorted({*old_state.served.values()} - {*new_state.served.values()})
            with suppress(ConflictError, IntegrityError):  # a failure to unmark must not prevent the end of a rollout
                unmark_versions(store, model, unserved_versions)
            if _loses(old_state, new_state):
                keep_history(store, old_state)
        return replace(new_state, revision=(old_state.revision if old_state else 0) + 1).to_bytes()

    def read(data: bytes | None) -> Channel | None:
        return parse_channel(data, model, name, place_of(store, channel_key(model, name)))

    def contains(data: bytes | None, written: bytes) -> bool:
        current_channel, own_channel = read(data), read(written)
        if current_channel is None or own_channel is None or current_channel.moves < own_channel.moves:
            return False
        if old_state is not None and old_state.moves == own_channel.moves:
            if old_state.rollout == own_channel.rollout:  # other fields were changed, as snapshots: compare them all
                return current_channel == own_channel
            return (current_channel.moves, current_channel.rollout) == (own_channel.moves, own_channel.rollout)
        return read_history(store, current_channel).moves[own_channel.moves - 1] == own_channel.move

    channel = read(change(store, channel_key(model, name), write, contains))
    with suppress(EnginesmithError):
        unmark_versions(store, model, unserved_versions)
    return channel


def unmark_versions(store: Store, model: str, versions: list[str]) -> None:
    """Remove the garbage marks of versions. Raises as `leases.unmark`."""
    from enginesmith.registry.leases import unmark, version_name  # code that only reads channels does not import leases

    unmark(store, (version_name(model, version) for version in versions))


def _loses(old: Channel, new: Channel) -> bool:
    """Whether a state has another move or another rollout than the one before it."""
    rollout = old.rollout
    return new.moves != old.moves or (rollout is not None and (new.rollout is None or new.rollout.id != rollout.id))
