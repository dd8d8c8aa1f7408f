"""What a registry's keys say of its models: which versions and channels there are, and whether anything changed.

One listing of all keys with their sizes, and no document is read but policies and the channels whose rollout is not
finished, which are few and are replaced. All other documents that a page shows are named by their digest, or only grow
(the histories of channels, series), so that a change of any shows in the names or the sizes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from enginesmith.core.digest import digest_of_bytes, is_digest
from enginesmith.core.names import is_name, version_order
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import MANIFEST, MODELS, SERIES, channel_key
from enginesmith.registry.versions.rolling import running_rollouts


@dataclass(frozen=True)
class ModelKeys:
    """A model with its versions in the order of their names, each with the digest of the keys beneath it, its channels
    in the order of their names, the digests of its canaries' reports, and the digest of all its keys."""

    model: str
    versions: tuple[tuple[str, str], ...]
    channels: tuple[str, ...]
    canaries: tuple[str, ...]
    digest: str

    def with_lines(self, lines: Sequence[str]) -> "ModelKeys":
        """The same with digests that depend on these lines, too; itself for none."""
        if not lines:
            return self
        versions = tuple((version, digest_lines([digest, *lines])) for version, digest in self.versions)
        return replace(self, versions=versions, digest=digest_lines([self.digest, *lines]))


def read_models(store: Store, salt: str = "") -> list[ModelKeys]:
    """The models that have a version, sorted. salt: text that every digest depends on, too.

    Raises UnavailableError when the registry is out of reach.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for key, size in store.sizes(MODELS):
        model, _, rest = key.removeprefix(MODELS).partition("/")
        if is_name(model) and rest:
            found.setdefault(model, []).append((rest, size))
    beside = _read_beside(store)
    shared = [salt, *(digest_of_bytes(store.read(key) or b"") for key, _ in sorted(store.sizes("policies/")))]
    models = (
        _model(store, model, sorted(keys), shared, beside.get(model, ())) for model, keys in sorted(found.items())
    )
    return [model for model in models if model.versions]


def _read_beside(store: Store) -> dict[str, list[str]]:
    """By model a line for each document that its pages show and that lies elsewhere, or is replaced."""
    found: dict[str, list[str]] = {}
    for key, size in sorted(store.sizes(SERIES)):
        found.setdefault(key.removeprefix(SERIES).partition("/")[0], []).append(f"{key} {size}")
    for model, channel in running_rollouts(store):
        data = store.read(channel_key(model, channel)) or b""
        found.setdefault(model, []).append(f"rollout {channel} {digest_of_bytes(data)}")
    return found


def _model(
    store: Store, model: str, keys: list[tuple[str, int]], shared: list[str], beside: Iterable[str]
) -> ModelKeys:
    versions: dict[str, list[str]] = {}
    channels, canaries, complete, all_keys = [], set(), set(), [*shared, *beside]
    for key, size in keys:
        all_keys.append(f"{key} {size}")
        match key.split("/"):
            case ["versions", version, *rest] if is_name(version):
                versions.setdefault(version, [*shared]).append(all_keys[-1])
                if rest == [MANIFEST]:
                    complete.add(version)
                elif rest[0] == "canaries" and is_digest(rest[-1].removesuffix(".json")):
                    canaries.add(rest[-1].removesuffix(".json"))
            case ["channels", name] if name.endswith(".json") and is_name(name.removesuffix(".json")):
                channels.append(name.removesuffix(".json"))
            case ["policies", _]:
                all_keys.append(digest_of_bytes(store.read(f"{MODELS}{model}/{key}") or b""))
    ordered = sorted(complete, key=version_order)
    digests = tuple((version, digest_lines(versions[version])) for version in ordered)
    return ModelKeys(model, digests, tuple(channels), tuple(sorted(canaries)), digest_lines(all_keys))


def digest_lines(lines: Iterable[str]) -> str:
    """The digest of these lines in this order."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
