"""Writes pointers and their snapshots: whoever moves a channel or adds evidence to a version calls these functions.

A pointer says no more than the channel and the version's documents do, so that it can be made anew at any time. Two
writers who refresh at once agree: each reads the pointer first and the rest after it, and writes by compare-and-swap,
so that what is written last was read last. A pointer's rollout is made from the rollout's own document in the same way,
and left out once the channel has moved on. A mark of another writer (`Pointer.moving`) is left to that one.
"""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import EngineryError, IntegrityError, UnknownNameError
from enginery.registry.leases import Guard, hold_lease
from enginery.registry.manifest import Manifest
from enginery.registry.rollouts.state import Rollout, read_rollout
from enginery.registry.store.base import Store, change
from enginery.registry.store.layout import pointer_key
from enginery.registry.versions.feeds import update_feeds
from enginery.registry.versions.lookup import Channel, channel_names, load, read_channel
from enginery.registry.versions.pointers import PointedRollout, PointedVersion, Pointer, parse_pointer, read_pointer
from enginery.registry.versions.snapshots import pack_snapshot, read_documents


def mark_moving(store: Store, model: str, channel: str) -> str:
    """Mark a pointer before its channel is moved, and return the mark, for `refresh_channel`.

    Raises InputError for a pointer of a newer format, which the channel's other readers understand and this one not.
    """
    token = secrets.token_hex(16)
    change(
        store,
        pointer_key(model, channel),
        lambda data: replace(_known(data, model, channel), moving=token).to_bytes(),
    )
    return token


def refresh_channel(guard: Guard, model: str, channel: str, mark: str | None = None, *, force: bool = False) -> None:
    """Write a channel's pointer, with a snapshot of the version that it leads to, unless both are so already.

    mark: what `mark_moving` returned.  force: replace the mark of another writer, which is dead. Under the mark of
    another writer only the rollout is written, so that one that was halted leads nobody any longer.
    """

    def make(data: bytes | None) -> bytes | None:
        known = _known(data, model, channel)
        found = read_channel(guard.store, model, channel)
        if found is None:
            return None
        pointer = _point(guard, found, known)
        if known.moving not in (None, mark) and not force:
            pointer = known.with_rollout(pointer.rollout, pointer.revision)
        update_feeds(guard, pointer)
        return pointer.to_bytes()

    change(guard.store, pointer_key(model, channel), make)


def refresh_rollout(store: Store, model: str, channel: str) -> bool:
    """Write a channel's pointer if it does not say of the rollout what its document does; whether it did not."""
    known, found = _known(store.read(pointer_key(model, channel)), model, channel), read_channel(store, model, channel)
    if found is None or is_rollout_current(store, known, found):
        return False
    with hold_lease(store, f"writing the pointer of {model}:{channel}") as guard:
        refresh_channel(guard, model, channel)
    return True


def refresh_moved(guard: Guard, channel: Channel, mark: str | None) -> None:
    """`refresh_channel` after a move; without one (mark: None) only where the pointer leads elsewhere.

    Raises what the store raises, with the message that the channel has moved.
    """
    try:
        if mark is None:
            known = _known(guard.store.read(pointer_key(channel.model, channel.name)), channel.model, channel.name)
            if known.moving or (is_current(known, channel) and is_rollout_current(guard.store, known, channel)):
                return
        refresh_channel(guard, channel.model, channel.name, mark)
    except EngineryError as error:
        where = f"{channel.model}:{channel.name}"
        raise type(error)(
            f"{where} leads to version {channel.version}, but its pointer could not be written, so that clients read "
            f"the channel itself: {error}; `enginery verify --repair` writes it"
        ) from error


def refresh_version(store: Store, manifest: Manifest) -> None:
    """Refresh the pointers of the channels that serve a version, after evidence was added to it."""
    served = list(_serving(store, manifest))
    if not served:
        return
    with hold_lease(store, f"refreshing the pointers of {manifest.model}") as guard:
        for channel in served:
            refresh_channel(guard, manifest.model, channel)


def _serving(store: Store, manifest: Manifest) -> Iterator[str]:
    for name in channel_names(store, manifest.model):
        with suppress(IntegrityError):  # a damaged channel or pointer is `verify`'s to tell
            pointer = read_pointer(store, manifest.model, name)
            brought = pointer.rollout.candidate.version if pointer and pointer.rollout else None
            if pointer and pointer.serves and not pointer.moving:
                if manifest.version in (pointer.serves.version, brought):
                    yield name
                continue
            channel = read_channel(store, manifest.model, name)
            rollout = active_rollout(store, channel) if channel else None
            if channel and manifest.version in (channel.version, rollout and rollout.version):
                yield name


def is_current(pointer: Pointer, channel: Channel) -> bool:
    """Whether a pointer leads where the channel leads by its last move."""
    served, move = pointer.serves, channel.history[-1]
    return (
        served is not None
        and pointer.moves == len(channel.history)
        and (served.manifest, served.proven_only) == (move.manifest, move.proven_only)
    )


def find_fault(store: Store, model: str, channel: str) -> tuple[bool, str] | None:
    """What is wrong with a pointer: whether it leads clients astray, and in words; None for one as it should be.

    Raises as `parse_pointer` and `read_channel`.
    """
    pointer, found = read_pointer(store, model, channel), read_channel(store, model, channel)
    if found is None:
        return None
    if pointer is None or pointer.moving or pointer.serves is None:
        why = "there is no pointer" if pointer is None else "a writer began to move it, and ended or goes on"
        return False, f"{why}; clients read the channel itself, with more requests"
    if not is_current(pointer, found):
        return True, f"leads to version {pointer.serves.version}, and the channel to {found.version}"
    if not is_rollout_current(store, pointer, found):
        return True, "its rollout is not as its document says"
    for served in pointer.versions:
        try:
            snapshot = _pack(store, model, served.version, served.manifest)
        except IntegrityError:  # which is told of the version
            continue
        if served.snapshot != (digest_of_bytes(snapshot) if snapshot else None):
            return True, f"its snapshot has not all documents of version {served.version}, or others"
    return None


def active_rollout(store: Store, channel: Channel) -> Rollout | None:
    """The rollout of a channel that nodes follow; None for none, a finished one, and one that the channel's moves have
    overtaken. Raises as `read_rollout`."""
    found = read_rollout(store, channel.model, channel.name)
    return found if found and _is_active(found, channel) else None


def _is_active(rollout: Rollout, channel: Channel) -> bool:
    return not rollout.is_finished and rollout.base_moves == len(channel.history)


def is_rollout_current(store: Store, pointer: Pointer, channel: Channel) -> bool:
    """Whether a pointer says of the channel's rollout what its document does."""
    found, told = active_rollout(store, channel), pointer.rollout
    if found is None or told is None:
        return found is None and told is None
    return (found.id, found.manifest, found.reach, found.reporters_ppm) == (
        told.id,
        told.candidate.manifest,
        told.reach,
        told.reporters_ppm,
    )


def _pack(store: Store, model: str, version: str, digest: str) -> bytes | None:
    """The snapshot's blob of a version whose manifest has this digest; None where it can have none.

    Raises IntegrityError for a damaged document.
    """
    try:
        manifest = load(store, model, version)
    except UnknownNameError:
        return None
    return pack_snapshot(read_documents(store, manifest)) if manifest.digest == digest else None


def _known(data: bytes | None, model: str, channel: str) -> Pointer:
    """The pointer in a document; an empty one for none, and for a damaged one, which is then written anew."""
    with suppress(IntegrityError):
        if found := parse_pointer(data, model, channel):
            return found
    return Pointer(model, channel, 0, None)


def _point(guard: Guard, channel: Channel, known: Pointer) -> Pointer:
    """The pointer of a channel; its snapshots are stored, and no collection deletes them while the lease is held.

    Evidence that was damaged since comes into no snapshot: those of the `known` pointer stay.
    """
    move, rollout = channel.history[-1], read_rollout(guard.store, channel.model, channel.name)
    served = _pointed(guard, known, PointedVersion(move.version, move.manifest, move.at, move.proven_only))
    pointer = Pointer(channel.model, channel.name, len(channel.history), served)
    if rollout is None or not _is_active(rollout, channel):
        return pointer.with_rollout(None, rollout.revision if rollout else 0)
    brought = PointedVersion(rollout.version, rollout.manifest, rollout.history[0].at, rollout.proven_only)
    brought = _pointed(guard, known, brought)
    told = PointedRollout(rollout.id, brought, rollout.reach, rollout.reporters_ppm)
    return pointer.with_rollout(told, rollout.revision)


def _pointed(guard: Guard, known: Pointer, served: PointedVersion) -> PointedVersion:
    """A version with its snapshot, which is stored."""
    try:
        data = _pack(guard.store, known.model, served.version, served.manifest)
        digest = digest_of_bytes(data) if data is not None else None
    except IntegrityError:
        data = None
        digest = next((old.snapshot for old in known.versions if old.manifest == served.manifest), None)
    if digest is not None:
        guard.secure([digest])
    if data is not None:
        guard.store.put_bytes(data)
    return replace(served, snapshot=digest)
