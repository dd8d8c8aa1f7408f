"""Which version a reference stands for, during a rollout too, and whether that changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from enginesmith.core.errors import (
    ConflictError,
    EnginesmithError,
    IntegrityError,
    UnknownNameError,
    canonical_json,
    digest_of_bytes,
)
from enginesmith.core.names import STABLE, Reference, is_name, version_order
from enginesmith.core.text import suggest
from enginesmith.registry.leases import Guard, hold_lease, unmark, version_name
from enginesmith.registry.manifest import EngineEntry, Manifest, parse
from enginesmith.registry.rollouts.state import Rollout
from enginesmith.registry.store.base import Documents, Store, place_of
from enginesmith.registry.store.layout import (
    MANIFEST,
    MODELS,
    ROLLOUTS,
    manifest_key,
    model_prefix,
    running_rollout_key,
)
from enginesmith.registry.versions.snapshots import pack_snapshot, read_documents
from enginesmith.registry.versions.state import Channel as Channel
from enginesmith.registry.versions.state import Move as Move
from enginesmith.registry.versions.state import change_channel, read_history
from enginesmith.registry.versions.state import read_channel as read_channel

# Finds models, versions and channels, resolves a reference to a version's manifest, and finds blobs that are lost.
#
# A blob is lost when it is missing, truncated, or a link out of the registry, which one stat or HEAD request shows.
# Other bytes of the same size are found when they are read: by a pull, and by `verify`.


DEFAULT_CHANNELS = (STABLE, "candidate")
# Concurrent requests to a remote registry.
_AT_ONCE = 16


@dataclass(frozen=True)
class Located:
    """The manifest that a reference resolves to, and the channel that it was found through, or None.

    signed_by: the trust policy's names of its signers, once that was checked; empty where no signature is needed.
    documents: the version's documents out of a snapshot; None where they are read from the registry.
    """

    reference: Reference
    manifest: Manifest
    channel: Channel | None = None
    signed_by: tuple[str, ...] = ()
    documents: Documents | None = field(default=None, repr=False, compare=False)

    @property
    def proven_only(self) -> bool:
        """Whether the channel serves only proven engines."""
        return self.channel is not None and self.channel.proven_only


@dataclass(frozen=True)
class Listed:
    """A model, its versions in the order of their names, and the names of its channels."""

    model: str
    versions: tuple[str, ...]
    channels: tuple[str, ...]


def catalogue(store: Documents, prefix: str = MODELS) -> list[Listed]:
    """The models that have a version, sorted. Lists keys, and reads no document.

    prefix: 'models/' for all models, or 'models/<model>/' for one.
    """
    versions: dict[str, list[str]] = {}
    channels: dict[str, list[str]] = {}
    for key in store.list(prefix):
        match key.removeprefix(MODELS).split("/"):
            case [model, "versions", version, name] if name == MANIFEST and is_name(model) and is_name(version):
                versions.setdefault(model, []).append(version)
            case [model, "channels", name] if name.endswith(".json") and is_name(name.removesuffix(".json")):
                channels.setdefault(model, []).append(name.removesuffix(".json"))
    return [
        Listed(model, tuple(sorted(found, key=version_order)), tuple(channels.get(model, ())))
        for model, found in sorted(versions.items())
    ]


def page(store: Store, limit: int, after: str | None = None) -> list[Listed]:
    """At most `limit` models that have a version, sorted, with names after `after`. Lists the names of all models, and
    the keys of these only."""
    folders = (name.removesuffix("/") for name in store.children(MODELS) if name.endswith("/"))
    names = sorted(name for name in folders if is_name(name) and (after is None or name > after))
    found: list[Listed] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Models without a version are left out, so more names may be needed.
        while names and len(found) < limit:
            count = limit - len(found)
            for listed in pool.map(lambda name: catalogue(store, f"{MODELS}{name}/"), names[:count]):
                found += listed
            names = names[count:]
    return found


def folder_names(store: Documents) -> list[str]:
    """The names of models with any document at all, sorted. Lists names, and no keys below them."""
    return [name.removesuffix("/") for name in store.children(MODELS) if name.endswith("/")]


def models(store: Documents) -> list[str]:
    """The models that have a version, sorted."""
    return [listed.model for listed in catalogue(store)]


def versions(store: Documents, model: str) -> list[str]:
    """A model's versions in the order of their names ('2' before '10'). Lists keys, and reads no manifest."""
    prefix = model_prefix("versions", model)
    parts = (key.removeprefix(prefix).split("/") for key in store.list(prefix))
    complete = [part[0] for part in parts if len(part) == 2 and part[1] == MANIFEST and is_name(part[0])]
    return sorted(complete, key=version_order)


def channel_names(store: Store, model: str) -> list[str]:
    """The names of a model's channels, sorted."""
    files = (name for name in store.children(model_prefix("channels", model)) if name.endswith(".json"))
    return [name for name in (file.removesuffix(".json") for file in files) if is_name(name)]


def load(store: Documents, model: str, version: str) -> Manifest:
    """Read a version's manifest. Raises UnknownNameError if there is none, IntegrityError if it is damaged."""
    if manifest := load_if_there(store, model, version):
        return manifest
    if known := versions(store, model):
        raise _unknown(store, f"version of {model}", version, known)
    raise _unknown(store, "model", model, folder_names(store))


def load_if_there(store: Documents, model: str, version: str) -> Manifest | None:
    """Read a version's manifest; None if there is none. Raises IntegrityError if it is damaged."""
    key = manifest_key(model, version)
    data = store.read(key)
    return None if data is None else parse(data, model=model, version=version, place=place_of(store, key))


def locate(store: Store, reference: Reference) -> Located:
    """Resolve a reference. A name alone means the channel `stable`, else `candidate`, else the newest version.

    Raises UnknownNameError if there is no such model, version or channel, IntegrityError where the channel's digest and
    the manifest disagree.
    """
    model = reference.model
    if reference.version is not None:
        return Located(reference, load(store, model, reference.version))
    for name in (reference.channel,) if reference.channel else DEFAULT_CHANNELS:
        if channel := read_channel(store, model, name):
            return Located(reference, load_served(store, channel), channel)
    known = versions(store, model)
    if not known:
        raise _unknown(store, "model", model, folder_names(store))
    if reference.channel:
        raise _unknown(store, f"channel of {model}", reference.channel, channel_names(store, model))
    return Located(reference, load(store, model, known[-1]))


def load_served(store: Documents, channel: Channel) -> Manifest:
    """The manifest of the version that a channel leads to. Raises IntegrityError where that is gone, or another one."""
    try:
        manifest = load(store, channel.model, channel.version)
    except UnknownNameError as error:
        raise IntegrityError(
            f"channel {channel.model}:{channel.name} points nowhere: {error}; promote a version to it that is there"
        ) from error
    if manifest.digest != channel.manifest:
        raise IntegrityError(
            f"channel {channel.model}:{channel.name} was promoted to manifest {channel.manifest} of version "
            f"{channel.version}, and that is now {manifest.digest}: it was replaced by hand; restore it, or promote a "
            "version again"
        )
    return manifest


def _unknown(store: Documents, kind: str, name: str, known: list[str]) -> UnknownNameError:
    known_text = f"known: {', '.join(known[-10:])}" if known else "there is none yet; `enginesmith build` publishes one"
    return UnknownNameError(f"no {kind} {name!r} in {store.uri}; {suggest(name, known, known_text)}")


@dataclass(frozen=True)
class Loss:
    """A problem of a blob. kind: 'missing' or 'size', as in `verify`.  detail: the problem in words."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return self.detail


MISSING = Loss("missing", "published, and no file of this registry: it is not there, or a link that leads out of it")


def find_lost(store: Store, sizes: Mapping[str, int | None]) -> dict[str, Loss]:
    """Missing or truncated blobs by digest. sizes: digest -> expected size in bytes, None where it is unknown."""
    if store.near or len(sizes) < 2:
        found = [store.stored_size(digest) for digest in sizes]
    else:
        with ThreadPoolExecutor(min(_AT_ONCE, len(sizes))) as pool:
            found = list(pool.map(store.stored_size, sizes))
    lost: dict[str, Loss] = {}
    for (digest, size), stored in zip(sizes.items(), found, strict=True):
        if stored is None:
            lost[digest] = MISSING
        elif size not in (None, stored):
            lost[digest] = Loss("size", f"{stored} bytes; the manifest says {size}")
    return lost


def find_lost_of(store: Store, manifest: Manifest) -> dict[str, Loss]:
    """Missing or truncated blobs of a version by digest. Only the engines' sizes are compared."""
    sizes = engine_sizes(manifest)
    return find_lost(store, {digest: sizes.get(digest) for digest in manifest.blobs()})


def find_lost_engines(store: Store, entries: Sequence[EngineEntry]) -> dict[str, Loss]:
    """Missing or truncated engines, or models with their weights, by the engine's digest."""
    sizes: dict[str, int | None] = {str(entry.digest): entry.size_bytes for entry in entries}
    models = {str(entry.digest): entry.graph for entry in entries if entry.is_stripped}
    lost = find_lost(store, {**{model: None for model in models.values() if model}, **sizes})
    found = {digest: lost.get(digest) or lost.get(models.get(digest) or "") for digest in sizes}
    return {digest: loss for digest, loss in found.items() if loss}


def engine_sizes(manifest: Manifest) -> dict[str, int | None]:
    """The sizes of a version's engines and shards in bytes, by digest."""
    engines: dict[str, int | None] = {entry.digest: entry.size_bytes for entry in manifest.engines if entry.digest}
    return engines | {shard: size for shards in manifest.shards.values() for shard, size in shards.items()}


# Writes the snapshots of the versions that a channel serves, which its state names.
#
# They are made from the documents of the versions, and may be made anew at any time. Two writers who refresh at once
# agree: each reads the state first and the documents after it, and writes by compare-and-swap, so that what is written
# last was read last.


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


# Reads and changes the rollout in a channel's state, and finds the rollouts that may be unfinished.
#
# A document under `rollouts/` marks such a rollout, so that a controller of ten thousand models lists those alone. It
# is written before the rollout begins, by an id that only this attempt has, and removed when the rollout has ended: a
# writer that is killed leaves a mark too many, which the next look removes (`clear_marks`).


def read_rollout(store: Documents, model: str, channel: str) -> Rollout | None:
    """The rollout of a channel, which may be finished; None where there never was one. Raises as `read_channel`."""
    found = read_channel(store, model, channel)
    return found.rollout if found else None


def begin_rollout(guard: Guard, model: str, channel: str, make: Callable[[Channel | None], Rollout]) -> Rollout:
    """Write the rollout that `make` returns for a channel's state, and return it. `make` is called again after a lost
    race, and gives another id each time. Raises what it raises, and as `change_channel`."""
    store = guard.store

    def begin(state: Channel | None) -> Channel | None:
        rollout = make(state)
        if state is None:
            return None
        store.create(running_rollout_key(model, channel, rollout.id), canonical_json({"rollout": rollout.id}))
        return with_snapshots(guard, replace(state, rollout=rollout))

    found = change_channel(store, model, channel, begin)
    if found is None or found.rollout is None:
        raise ConflictError(f"channel {model}:{channel} was deleted at the same time; start again")
    return found.rollout


def change_rollout(store: Store, before: Rollout, after: Rollout) -> Channel:
    """Replace a rollout in its channel's state, and return the new state. One write, which is what nodes read.

    Raises ConflictError, with what the other writer did, where one was faster.
    """
    if after.is_finished:  # see `channels._move`; a mark that cannot be removed must not keep a rollout from its end
        with suppress(ConflictError, IntegrityError):
            unmark(store, [version_name(before.model, before.version)])

    def make(state: Channel | None) -> Channel | None:
        if state is None or state.rollout != before:
            raise ConflictError(_describe_change(before, state))
        changed = replace(state, rollout=after)
        return replace(changed, snapshots={k: v for k, v in state.snapshots.items() if k in changed.served})

    found = change_channel(store, before.model, before.channel, make)
    if found is None:
        raise ConflictError(_describe_change(before, None))
    return found


def _describe_change(before: Rollout, state: Channel | None) -> str:
    last = state.rollout.history[-1] if state and state.rollout else None
    told = f"{last.what} by {last.by or '?'}" if last else "deleted"
    return (
        f"the rollout of {before.where} was changed at the same time ({told}); look at `enginesmith rollout status "
        f"{before.where}`, and decide again"
    )


def running_rollouts(store: Documents) -> list[tuple[str, str]]:
    """Model and channel of each rollout that may be unfinished, sorted; one list of keys."""
    return sorted({where[:2] for where in _marks(store, ROLLOUTS)})


def clear_marks(store: Store, model: str, name: str) -> None:
    """Remove the marks of a channel's rollouts that do not run. What cannot be removed is left to the next look: a mark
    too many costs a look, and leads nobody.

    A mark may be of a rollout that is about to begin. So the state is written anew first: who read it before begins
    nothing with that id any more.
    """
    with suppress(EnginesmithError):
        for _, _, rollout in list(_marks(store, f"{ROLLOUTS}{model}/{name}/")):
            if not _runs(store, model, name, rollout):
                store.remove(running_rollout_key(model, name, rollout))


def _runs(store: Store, model: str, name: str, rollout: str) -> bool:
    """Whether a channel's rollout of this id runs; where not, it will not begin any more."""
    runs = False

    def fence(state: Channel | None) -> Channel | None:
        nonlocal runs
        last = state.rollout if state else None
        runs = last is not None and last.id == rollout and not last.is_finished
        begun = state is None or (last is not None and last.id == rollout)
        return None if state is None or begun else replace(state, revision=state.revision + 1)

    change_channel(store, model, name, fence)
    return runs


def _marks(store: Documents, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Model, channel and id of each mark."""
    for key in store.list(prefix):
        match key.removeprefix(ROLLOUTS).removesuffix(".json").split("/"):
            case [model, channel, rollout] if all(map(is_name, (model, channel, rollout))):
                yield model, channel, rollout
