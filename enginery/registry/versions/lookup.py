"""Finds models, versions and what a reference resolves to."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import STABLE, Reference, is_name, version_order
from enginery.core.text import suggest
from enginery.registry.manifest import Manifest, parse
from enginery.registry.store.base import Store, place_of
from enginery.registry.store.layout import MANIFEST, MODELS, manifest_key, versions_prefix
from enginery.registry.versions import channels
from enginery.registry.versions.channels import Channel

DEFAULT_CHANNELS = (STABLE, "candidate")
# Requests on their way at once, for a registry that is far away.
_AT_ONCE = 16


@dataclass(frozen=True)
class Located:
    """The manifest that a reference resolves to, and the channel that it was found through, or None.

    signed_by: the trust policy's names of its signers, once that was checked; empty where no signature is needed.
    """

    reference: Reference
    manifest: Manifest
    channel: Channel | None = None
    signed_by: tuple[str, ...] = ()

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


def catalogue(store: Store, prefix: str = MODELS) -> list[Listed]:
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


def models(store: Store) -> list[str]:
    """The models that have a version, sorted."""
    return [listed.model for listed in catalogue(store)]


def versions(store: Store, model: str) -> list[str]:
    """A model's versions in the order of their names ('2' before '10'). Lists keys, and reads no manifest."""
    prefix = versions_prefix(model)
    parts = (key.removeprefix(prefix).split("/") for key in store.list(prefix))
    complete = [part[0] for part in parts if len(part) == 2 and part[1] == MANIFEST and is_name(part[0])]
    return sorted(complete, key=version_order)


def load(store: Store, model: str, version: str) -> Manifest:
    """Read a version's manifest. Raises UnknownNameError if there is none, IntegrityError if it is damaged."""
    data = store.read(manifest_key(model, version))
    if data is None:
        known = versions(store, model)
        if not known:
            raise _unknown("model", model, models(store), store)
        raise _unknown(f"version of {model}", version, known, store)
    return parse(data, model=model, version=version, place=place_of(store, manifest_key(model, version)))


def locate(store: Store, reference: Reference) -> Located:
    """Resolve a reference. A name alone means the channel `stable`, else `candidate`, else the newest version.

    Raises UnknownNameError if there is no such model, version or channel, IntegrityError where the channel's digest and
    the manifest disagree.
    """
    model = reference.model
    if reference.version is not None:
        return Located(reference, load(store, model, reference.version))
    for name in (reference.channel,) if reference.channel else DEFAULT_CHANNELS:
        if channel := channels.read(store, model, name):
            return Located(reference, _load_served(store, channel), channel)
    if reference.channel:
        raise _no_channel(store, reference)
    newest = versions(store, model)[-1:] or [""]
    if not newest[0]:
        raise _unknown("model", model, models(store), store)
    return Located(reference, load(store, model, newest[0]))


def _load_served(store: Store, channel: Channel) -> Manifest:
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


def _no_channel(store: Store, reference: Reference) -> UnknownNameError:
    if not versions(store, reference.model):
        return _unknown("model", reference.model, models(store), store)
    return _unknown(
        f"channel of {reference.model}", str(reference.channel), channels.names(store, reference.model), store
    )


def _unknown(kind: str, name: str, known: list[str], store: Store) -> UnknownNameError:
    known_text = f"known: {', '.join(known[-10:])}" if known else "there is none yet; `enginery build` publishes one"
    return UnknownNameError(f"no {kind} {name!r} in {store.uri}; {suggest(name, known, known_text)}")
