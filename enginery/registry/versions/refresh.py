"""Writes pointers and their snapshots: whoever moves a channel or adds evidence to a version calls these functions.

A pointer says no more than the channel and the version's documents do, so that it can be made anew at any time. Two
writers who refresh at once agree: each reads the pointer first and the rest after it, and writes by compare-and-swap,
so that what is written last was read last. A mark of another writer (`Pointer.moving`) is left to that one.
"""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import EngineryError, IntegrityError, UnknownNameError
from enginery.registry.leases import Guard, hold_lease
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store, change
from enginery.registry.store.layout import pointer_key
from enginery.registry.versions.feeds import update_feeds
from enginery.registry.versions.lookup import Channel, channel_names, load, read_channel
from enginery.registry.versions.pointers import PointedVersion, Pointer, parse_pointer, read_pointer
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

    mark: what `mark_moving` returned.  force: replace the mark of another writer, which is dead.
    """

    def make(data: bytes | None) -> bytes | None:
        known = _known(data, model, channel)
        if known.moving not in (None, mark) and not force:
            return None
        found = read_channel(guard.store, model, channel)
        if found is None:
            return None
        pointer = _point(guard, found, known)
        update_feeds(guard, pointer)
        return pointer.to_bytes()

    change(guard.store, pointer_key(model, channel), make)


def refresh_moved(guard: Guard, channel: Channel, mark: str | None) -> None:
    """`refresh_channel` after a move; without one (mark: None) only where the pointer leads elsewhere.

    Raises what the store raises, with the message that the channel has moved.
    """
    try:
        if mark is None:
            known = _known(guard.store.read(pointer_key(channel.model, channel.name)), channel.model, channel.name)
            if known.moving or is_current(known, channel):
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
            if pointer and pointer.serves and pointer.serves.version != manifest.version and not pointer.moving:
                continue
            channel = read_channel(store, manifest.model, name)
            if channel and channel.version == manifest.version:
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
    try:
        snapshot = pack_of(store, found)
    except IntegrityError:  # which is told of the version
        return None
    if pointer.serves.snapshot != (digest_of_bytes(snapshot) if snapshot else None):
        return True, f"its snapshot has not all documents of version {found.version}, or others"
    return None


def pack_of(store: Store, channel: Channel) -> bytes | None:
    """The snapshot's blob of the version that a channel serves; None where it can have none.

    Raises IntegrityError for a damaged document.
    """
    try:
        manifest = load(store, channel.model, channel.version)
    except UnknownNameError:
        return None
    return pack_snapshot(read_documents(store, manifest)) if manifest.digest == channel.manifest else None


def _known(data: bytes | None, model: str, channel: str) -> Pointer:
    """The pointer in a document; an empty one for none, and for a damaged one, which is then written anew."""
    with suppress(IntegrityError):
        if found := parse_pointer(data, model, channel):
            return found
    return Pointer(model, channel, 0, None)


def _point(guard: Guard, channel: Channel, known: Pointer) -> Pointer:
    """The pointer of a channel; its snapshot is stored, and no collection deletes it while the lease is held.

    Evidence that was damaged since comes into no snapshot: the one that is `known` stays.
    """
    move = channel.history[-1]
    try:
        data = pack_of(guard.store, channel)
        digest = digest_of_bytes(data) if data is not None else None
    except IntegrityError:
        served = known.serves
        data, digest = None, served.snapshot if served and served.manifest == move.manifest else None
    if digest is not None:
        guard.secure([digest])
    if data is not None:
        guard.store.put_bytes(data)
    served = PointedVersion(move.version, move.manifest, move.at, move.proven_only, digest)
    return Pointer(channel.model, channel.name, len(channel.history), served)
