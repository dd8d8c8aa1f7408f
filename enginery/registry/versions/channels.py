"""Channels: names such as `stable` that point at one version, move atomically, and record every move.

Channels other than `candidate` accept only versions whose engines are all proven, unless they are set to serve the
proven ones only; that is recorded with the move, and pulls through the channel then never yield an unproven engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError
from enginery.core.names import is_name
from enginery.core.parsing import Malformed
from enginery.core.text import now
from enginery.registry.evidence.attestations import Attestation, judge_entries
from enginery.registry.leases import Guard, hold_lease, secure_version
from enginery.registry.manifest import Manifest, parse
from enginery.registry.missing_blobs import find_lost_of
from enginery.registry.store.base import Store, change, place_of
from enginery.registry.store.layout import channel_key, channels_prefix, manifest_key
from enginery.registry.versions import policies
from enginery.registry.versions.policies import CanaryPass

MAX_BYTES = 16 << 20

Action = Literal["promote", "rollback"]


@dataclass(frozen=True)
class Move:
    """One entry of a channel's history: the version, when (ISO 8601, UTC), by whom and why.

    manifest: digest of the version's manifest.  canary: digests of the canary reports that it was promoted with, which
    are blobs of the registry.
    """

    version: str
    manifest: str
    at: str
    by: str = ""
    why: str = ""
    proven_only: bool = False
    action: Action = "promote"
    canary: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The move as it is stored."""
        return {**asdict(self), "canary": list(self.canary)}


@dataclass(frozen=True)
class Channel:
    """A channel and its whole history; the last move is where it points."""

    model: str
    name: str
    history: tuple[Move, ...]

    @property
    def version(self) -> str:
        """The version it serves."""
        return self.history[-1].version

    @property
    def manifest(self) -> str:
        """Digest of that version's manifest."""
        return self.history[-1].manifest

    @property
    def proven_only(self) -> bool:
        """Whether it serves only proven engines."""
        return self.history[-1].proven_only

    def previous(self) -> Move | None:
        """The move that a rollback returns to: the active promotion before the last one; None if there is none."""
        active = self.active_promotions()
        return active[-2] if len(active) > 1 else None

    def active_promotions(self) -> list[Move]:
        """The promotions that were not rolled back, oldest first."""
        active: list[Move] = []
        for move in self.history:
            if move.action == "promote":
                active.append(move)
            else:
                del active[-1:]
        return active

    def to_json(self) -> dict[str, object]:
        """The document as it is stored."""
        return {
            "version": self.version,
            "manifest": self.manifest,
            "history": [move.to_json() for move in self.history],
        }


def names(store: Store, model: str) -> list[str]:
    """The names of a model's channels, sorted."""
    found = (name.removesuffix(".json") for name in store.children(channels_prefix(model)) if name.endswith(".json"))
    return [name for name in found if is_name(name)]


def read(store: Store, model: str, name: str) -> Channel | None:
    """Read a channel; None if it does not exist. Raises IntegrityError if it cannot be read."""
    return _parse(store, store.read(channel_key(model, name)), model, name)


def promote(
    store: Store,
    manifest: Manifest,
    name: str,
    *,
    by: str = "",
    why: str = "",
    proven_only: bool = False,
    canaries: Sequence[CanaryPass] = (),
    from_other_registry: bool = False,
    counts: Callable[[Attestation], bool] | None = None,
) -> Channel:
    """Point a channel at a version; nothing changes if it points there already.

    canaries: passed canaries, whose reports are stored as blobs.  from_other_registry: their baseline was served in
    another registry and not here.  counts: whether an attestation counts by a trust policy; None: all of them do.
    Raises InputError when the channel's policy does not allow it, ConflictError if the channel keeps changing or serves
    another version than a canary's baseline by now, IntegrityError if the version was deleted or has lost a blob.
    """
    refusal = policy_refusal(store, manifest, name, proven_only=proven_only, canaries=canaries, counts=counts)
    if refusal:
        raise InputError(refusal)
    with hold_lease(store, f"promoting {manifest.model}@{manifest.version} to {name}") as guard:
        secure_version(guard, manifest)
        _check_blobs(store, manifest, name)
        guard.secure(item.report for item in canaries)
        return point(
            store,
            manifest,
            name,
            by,
            why,
            proven_only=proven_only,
            canaries=canaries,
            from_other_registry=from_other_registry,
        )


def _check_blobs(store: Store, manifest: Manifest, name: str) -> None:
    """Raise IntegrityError for a version with a blob that is missing, truncated or outside the registry."""
    lost = find_lost_of(store, manifest)
    if lost:
        reference = f"{manifest.model}@{manifest.version}"
        lines = [f"  {manifest.blobs()[digest]} ({digest}): {loss}" for digest, loss in lost.items()]
        remedy = f"restore it, or build again; `enginery verify {reference}` says more"
        raise IntegrityError("\n".join([f"channel {name!r}: {reference} is damaged; {remedy}:", *lines]))


def point(
    store: Store,
    manifest: Manifest,
    name: str,
    by: str = "",
    why: str = "",
    *,
    proven_only: bool = False,
    canaries: Sequence[CanaryPass] = (),
    from_other_registry: bool = False,
) -> Channel:
    """Point a channel at a version as `promote` does, without its checks: the caller did them and holds the lease.

    Raises ConflictError and IntegrityError as `promote` does.
    """
    if lost := [item.report for item in canaries if not store.has(item.report)]:
        raise IntegrityError(f"canary report {lost[0]} is not in {store.uri}; promote again with --canary")
    reports = tuple(item.report for item in canaries)
    move = Move(manifest.version, manifest.digest, now(), by, why, proven_only, canary=reports)

    def next_move(channel: Channel | None) -> Move | None:
        if channel is not None and channel.manifest == move.manifest and channel.proven_only == proven_only:
            return None
        if (
            channel
            and not from_other_registry
            and any(channel.manifest not in (manifest.digest, item.baseline) for item in canaries)
        ):
            raise ConflictError(
                f"channel {channel.model}:{name} serves {channel.version} by now, not what the canary saw"
            )
        return move

    return _append(store, manifest.model, name, next_move)


def rollback(
    store: Store, model: str, name: str, *, by: str = "", why: str = "", serving: str | None = None
) -> Channel:
    """Point a channel at the version it served before. Raises UnknownNameError if there is none or it was deleted.

    No policy is checked, so that a rollback is never refused in an emergency.
    serving: digest of the manifest that the channel must serve now; otherwise ConflictError, and nothing changes.
    """

    def next_move(channel: Channel | None) -> Move:
        if channel and serving not in (None, channel.manifest):
            raise ConflictError(f"channel {model}:{name} serves version {channel.version} by now, another one")
        previous = channel.previous() if channel else None
        if previous is None:
            reason = "has served one version only" if channel else "does not exist"
            raise UnknownNameError(f"channel {model}:{name} {reason}; there is nothing to roll back to")
        _secure(guard, model, name, previous)
        return Move(previous.version, previous.manifest, now(), by, why, previous.proven_only, "rollback")

    with hold_lease(store, f"rolling back {model}:{name}") as guard:
        return _append(store, model, name, next_move)


def _secure(guard: Guard, model: str, name: str, move: Move) -> None:
    """Raise UnknownNameError if the version of a move was deleted: garbage collection keeps only the last moves'."""
    data = guard.store.read(manifest_key(model, move.version))
    manifest = None if data is None else parse(data, model=model, version=move.version)
    if manifest is not None and manifest.digest == move.manifest:
        secure_version(guard, manifest)
    else:
        raise UnknownNameError(
            f"channel {model}:{name} served version {move.version} before, which was deleted since; "
            f"promote another one: `enginery list {model}` shows them"
        )


def policy_refusal(
    store: Store,
    manifest: Manifest,
    name: str,
    *,
    proven_only: bool = False,
    canaries: Sequence[CanaryPass] = (),
    counts: Callable[[Attestation], bool] | None = None,
) -> str | None:
    """The reason why a channel does not accept a version, with the rule and the remedy; None if it does."""
    entries = judge_entries(store, manifest, counts)
    policy = policies.of_channel(store, manifest.model, name)
    return (
        policies.common_refusal(manifest, entries, name, proven_only=proven_only)
        or policies.refusal(policy, manifest, name, entries, canaries, proven_only=proven_only)
        or policies.signature_refusal(store, policy, manifest, name)
    )


def _append(store: Store, model: str, name: str, next_move: Callable[[Channel | None], Move | None]) -> Channel:
    """Add a move by compare-and-swap, repeated after a lost race, so that no move is lost."""
    key = channel_key(model, name)

    def make(data: bytes | None) -> bytes | None:
        channel = _parse(store, data, model, name)
        move = next_move(channel)
        if move is None:
            return None
        return canonical_json(Channel(model, name, (*(channel.history if channel else ()), move)).to_json())

    def contains(found: bytes | None, written: bytes) -> bool:
        """A history only ever grows, so a move that happened is where it was put, whatever came after."""
        now, moved = (_parse(store, data, model, name) for data in (found, written))
        return bool(now and moved and now.history[: len(moved.history)] == moved.history)

    return cast("Channel", _parse(store, change(store, key, make, contains), model, name))


def _parse(store: Store, data: bytes | None, model: str, name: str) -> Channel | None:
    if data is None:
        return None
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        channel = Channel(model, name, parsing.field(document, "history", parsing.many(_move)))
        if not channel.history or channel.to_json() != document:
            raise Malformed("its history does not lead to where it points: it was edited by hand")
    except Malformed as error:
        place = place_of(store, channel_key(model, name))
        remedy = "restore it from a copy, or delete this file and promote a version again; its history is then gone"
        raise IntegrityError(f"channel {model}:{name} ({place}): {error}; {remedy}") from error
    return channel


def _move(value: object, path: str) -> Move:
    data = parsing.mapping(value, path)
    return Move(
        version=parsing.field(data, "version", parsing.name, path),
        manifest=parsing.field(data, "manifest", parsing.digest, path),
        at=parsing.field(data, "at", parsing.text, path),
        by=parsing.field(data, "by", parsing.text, path),
        why=parsing.field(data, "why", parsing.text, path),
        proven_only=parsing.field(data, "proven_only", parsing.truth, path),
        action=parsing.field(data, "action", parsing.one_of(*get_args(Action)), path),
        canary=parsing.field(data, "canary", parsing.many(parsing.digest), path),
    )
