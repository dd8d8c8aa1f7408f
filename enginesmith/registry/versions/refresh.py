"""Writes the snapshots of the versions that a channel serves, which its state names.

They are made from the documents of the versions, and may be made anew at any time. Two writers who refresh at once
agree: each reads the state first and the documents after it, and writes by compare-and-swap, so that what is written
last was read last.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.registry.leases import Guard, hold_lease
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import channel_names, load
from enginesmith.registry.versions.snapshots import pack_snapshot, read_documents
from enginesmith.registry.versions.state import Channel, change_channel, read_channel, read_history


def with_snapshots(guard: Guard, channel: Channel) -> Channel:
    """The state with the snapshots of the versions that nodes get, which are stored, and deleted by no collection while
    the lease is held. Evidence that was damaged since comes into no snapshot: the one that is known stays.

    Raises ConflictError when the lease is over, as the state is written next.
    """
    found: dict[str, str] = {}
    for manifest, version in channel.served.items():
        try:
            data = _pack(guard.store, channel.model, version, manifest)
        except IntegrityError:
            found |= {manifest: channel.snapshots[manifest]} if manifest in channel.snapshots else {}
            continue
        if data is not None:
            found[manifest] = digest_of_bytes(data)
            guard.secure([found[manifest]])
            guard.store.put_bytes(data)
    guard.check()
    return replace(channel, snapshots=found)


def refresh_channel(guard: Guard, model: str, channel: str) -> None:
    """Write the snapshots of a channel's versions, unless they are as they should be."""
    change_channel(guard.store, model, channel, lambda state: with_snapshots(guard, state) if state else None)


def refresh_version(guard: Guard, manifest: Manifest) -> None:
    """Refresh the channels that serve a version, after evidence was added to it."""
    for name in channel_names(guard.store, manifest.model):
        with suppress(IntegrityError):  # a damaged channel is `verify`'s to tell
            channel = read_channel(guard.store, manifest.model, name)
            if channel and manifest.version in channel.served.values():
                refresh_channel(guard, manifest.model, name)


def refresh_models(store: Store, models: Iterable[str]) -> None:
    """Refresh all channels of models, whose writers may have died before they did."""
    for model in sorted(set(models)):
        with hold_lease(store, f"refreshing the channels of {model}") as guard:
            for name in channel_names(store, model):
                with suppress(IntegrityError):
                    refresh_channel(guard, model, name)


def find_fault(store: Store, channel: Channel) -> str | None:
    """What is wrong with the snapshots of a channel; None if they have all documents of their versions.

    Raises IntegrityError for a damaged history.
    """
    read_history(store, channel)
    for manifest, version in channel.served.items():
        try:
            data = _pack(store, channel.model, version, manifest)
        except IntegrityError:  # which is told of the version
            continue
        if channel.snapshots.get(manifest) != (digest_of_bytes(data) if data is not None else None):
            return f"its snapshot has not all documents of version {version}, or others"
    return None


def _pack(store: Store, model: str, version: str, digest: str) -> bytes | None:
    """The snapshot's blob of a version whose manifest has this digest; None where it can have none.

    Raises IntegrityError for a damaged document.
    """
    try:
        manifest = load(store, model, version)
    except UnknownNameError:
        return None
    return pack_snapshot(read_documents(store, manifest)) if manifest.digest == digest else None
