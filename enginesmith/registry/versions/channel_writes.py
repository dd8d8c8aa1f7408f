"""Writes a channel's state except its move: snapshots of the versions that it serves, and the rollout."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from enginesmith.core.errors import (
    ConflictError,
    EnginesmithError,
    IntegrityError,
    UnknownNameError,
    canonical_json,
    digest_of_bytes,
)
from enginesmith.core.names import is_name
from enginesmith.registry.evidence.attestations import attestations
from enginesmith.registry.evidence.latencies import latency_reports, newest_of_each
from enginesmith.registry.leases import Guard, hold_lease
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.rollouts.rollout_state import Rollout
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.layout import ROLLOUTS, evidence_prefix, running_rollout_key, version_prefix
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Channel, change_channel, read_channel, read_history

# Writes the snapshots of the versions that a channel serves, which its state names.
#
# They are made from the documents of the versions, and may be made anew at any time. Two writers who refresh at once
# agree: each reads the state first and the documents after it, and writes by compare-and-swap, so the last write has
# the last read.


def with_snapshots(guard: Guard, channel: Channel) -> Channel:
    """The state with the snapshots of the versions that nodes get. These are stored, and no collection deletes them
    while the lease is held. Evidence that was damaged since enters no snapshot: the known one stays.

    Raises ConflictError if the lease is over, as the state is written next.
    """
    snapshots: dict[str, str] = {}
    for manifest, version in channel.served.items():
        try:
            snapshot_bytes = _pack(guard.store, channel.model, version, manifest)
        except IntegrityError:
            snapshots |= {manifest: channel.snapshots[manifest]} if manifest in channel.snapshots else {}
            continue
        if snapshot_bytes is not None:
            snapshots[manifest] = digest_of_bytes(snapshot_bytes)
            guard.secure([snapshots[manifest]])
            guard.store.put_bytes(snapshot_bytes)
    guard.check()
    return replace(channel, snapshots=snapshots)


def refresh_channel(guard: Guard, model: str, channel: str) -> None:
    """Write the snapshots of a channel's versions, unless they are up to date."""
    change_channel(guard.store, model, channel, lambda state: with_snapshots(guard, state) if state else None)


def refresh_version(guard: Guard, manifest: Manifest) -> None:
    """Refresh the channels that serve a version, after evidence was added to it."""
    for name in lookup.channel_names(guard.store, manifest.model):
        with suppress(IntegrityError):  # `verify` reports a damaged channel
            channel = read_channel(guard.store, manifest.model, name)
            if channel and manifest.version in channel.served.values():
                refresh_channel(guard, manifest.model, name)


def refresh_models(store: Store, models: Iterable[str]) -> None:
    """Refresh all channels of models whose writers may have died before they did it."""
    for model in sorted(set(models)):
        with hold_lease(store, f"refreshing the channels of {model}") as guard:
            for name in lookup.channel_names(store, model):
                with suppress(IntegrityError):
                    refresh_channel(guard, model, name)


def find_fault(store: Store, channel: Channel) -> str | None:
    """The problem of a channel's snapshots; None if they are complete. Raises IntegrityError for a damaged history."""
    read_history(store, channel)
    for manifest, version in channel.served.items():
        try:
            snapshot_bytes = _pack(store, channel.model, version, manifest)
        except IntegrityError:  # which is reported for the version
            continue
        if channel.snapshots.get(manifest) != (digest_of_bytes(snapshot_bytes) if snapshot_bytes is not None else None):
            return f"its snapshot does not have the same documents as version {version}"
    return None


def _pack(store: Store, model: str, version: str, digest: str) -> bytes | None:
    """The snapshot's blob of a version whose manifest has this digest; None if it cannot have one.

    Raises IntegrityError for a damaged document.
    """
    try:
        manifest = lookup.load(store, model, version)
    except UnknownNameError:
        return None
    return pack_snapshot(read_documents(store, manifest)) if manifest.digest == digest else None


def read_documents(store: Documents, manifest: Manifest) -> lookup.Snapshot:
    """The documents of a version that a client needs, read in parallel. Raises IntegrityError for a damaged one."""
    prefix = version_prefix(manifest.model, manifest.version)
    keys = [key for key in store.list(prefix) if lookup.is_needed(key.removeprefix(prefix))]
    documents = {key: document for key, document in side_by_side(store.read, keys) if document is not None}
    full_snapshot = lookup.Snapshot(manifest.model, manifest.version, documents)
    list(attestations(lookup.SnapshotDocuments(full_snapshot), manifest))
    # Latency reports that newer ones replace are left out.
    documents = dict(full_snapshot.documents)
    folder = evidence_prefix("latency", manifest.model, manifest.version)
    keys = [key for key in sorted(documents, key=lambda key: key.split("/")) if key.startswith(folder)]
    reports = list(latency_reports(lookup.SnapshotDocuments(full_snapshot), manifest))
    newest_ids = {id(report) for report in newest_of_each(reports)}
    for key, report in zip(keys, reports, strict=True):
        if id(report) not in newest_ids:
            del documents[key]
    return lookup.Snapshot(manifest.model, manifest.version, documents)


def pack_snapshot(snapshot: lookup.Snapshot) -> bytes | None:
    """The blob of a snapshot; None if it is too large, or a document is no text."""
    if sum(map(len, snapshot.documents.values())) > lookup.MAX_DOCUMENTS_BYTES:
        return None
    try:
        snapshot_bytes = snapshot.to_bytes()
    except UnicodeDecodeError:
        return None
    return snapshot_bytes if len(snapshot_bytes) <= lookup.SNAPSHOT_MAX_BYTES else None


# Reads and changes the rollout in a channel's state, and finds the rollouts that may be unfinished.
#
# A document under `rollouts/` marks such a rollout, so that a controller of ten thousand models lists only those. It is
# written before the rollout begins, under an id that only this attempt has, and removed when the rollout has ended. A
# writer that is killed leaves a surplus mark, which the next poll removes (`clear_marks`).


def read_rollout(store: Documents, model: str, channel: str) -> Rollout | None:
    """The rollout of a channel, which may be finished; None if there never was one. Raises as `read_channel`."""
    state = read_channel(store, model, channel)
    return state.rollout if state else None


def begin_rollout(guard: Guard, model: str, channel: str, make: Callable[[Channel | None], Rollout]) -> Rollout:
    """Write the rollout that `make` returns for a channel's state, and return it. `make` is called again after a lost
    race, and returns another id each time.

    Raises what `make` raises, as `change_channel`, and ConflictError if the channel was deleted meanwhile.
    """
    store = guard.store

    def begin(state: Channel | None) -> Channel | None:
        rollout = make(state)
        if state is None:
            return None
        store.create(running_rollout_key(model, channel, rollout.id), canonical_json({"rollout": rollout.id}))
        return with_snapshots(guard, replace(state, rollout=rollout))

    new_state = change_channel(store, model, channel, begin)
    if new_state is None or new_state.rollout is None:
        raise ConflictError(f"channel {model}:{channel} was deleted at the same time; start again")
    refresh_channel(guard, model, channel)  # see `channels._move`
    return new_state.rollout


def change_rollout(store: Store, old_rollout: Rollout, new_rollout: Rollout) -> Channel:
    """Replace a rollout in its channel's state, and return the new state. Nodes read this single write.

    Raises ConflictError, with the other writer's change, if another writer was faster.
    """

    def make(state: Channel | None) -> Channel | None:
        if state is None or state.rollout != old_rollout:
            raise ConflictError(_describe_change(old_rollout, state))
        new_state = replace(state, rollout=new_rollout)
        return replace(new_state, snapshots={k: v for k, v in state.snapshots.items() if k in new_state.served})

    new_state = change_channel(store, old_rollout.model, old_rollout.channel, make)
    if new_state is None:
        raise ConflictError(_describe_change(old_rollout, None))
    return new_state


def _describe_change(rollout: Rollout, state: Channel | None) -> str:
    last_decision = state.rollout.history[-1] if state and state.rollout else None
    last_change = f"{last_decision.what} by {last_decision.by or '?'}" if last_decision else "deleted"
    return (
        f"the rollout of {rollout.where} was changed at the same time ({last_change}); look at `enginesmith rollout "
        f"status {rollout.where}`, and decide again"
    )


def running_rollouts(store: Documents) -> list[tuple[str, str]]:
    """Model and channel of each rollout that may be unfinished, sorted; lists keys once."""
    return sorted({mark[:2] for mark in _marks(store, ROLLOUTS)})


def clear_marks(store: Store, model: str, name: str) -> None:
    """Remove the marks of a channel's rollouts that do not run. Marks that cannot be removed are left to the next poll:
    a surplus mark costs one poll and changes no node.

    A mark may belong to a rollout that is about to begin. So the state is written anew first: a writer that read it
    before can no longer begin a rollout with that id.
    """
    with suppress(EnginesmithError):
        for _, _, rollout in list(_marks(store, f"{ROLLOUTS}{model}/{name}/")):
            if not _runs(store, model, name, rollout):
                store.remove(running_rollout_key(model, name, rollout))


def _runs(store: Store, model: str, name: str, rollout: str) -> bool:
    """Whether a channel's rollout with this id runs; if not, it cannot begin any more."""
    is_running = False

    def fence(state: Channel | None) -> Channel | None:
        nonlocal is_running
        current_rollout = state.rollout if state else None
        is_running = current_rollout is not None and current_rollout.id == rollout and not current_rollout.is_finished
        has_begun = state is None or (current_rollout is not None and current_rollout.id == rollout)
        return None if state is None or has_begun else replace(state, revision=state.revision + 1)

    change_channel(store, model, name, fence)
    return is_running


def _marks(store: Documents, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Model, channel and id of each mark."""
    for key in store.list(prefix):
        match key.removeprefix(ROLLOUTS).removesuffix(".json").split("/"):
            case [model, channel, rollout] if all(map(is_name, (model, channel, rollout))):
                yield model, channel, rollout
