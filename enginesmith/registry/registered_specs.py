"""Registered specs, and pins."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from enginesmith.core.codec import encode, explain_damage, parse_as
from enginesmith.core.errors import (
    Digest,
    EnginesmithError,
    IntegrityError,
    UnknownNameError,
    canonical_json,
    digest_of,
)
from enginesmith.core.names import FilePath, Name, inside, is_name, version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.text import now
from enginesmith.registry.leases import hold_lease, secure_version, unmark, version_name
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import model_prefix, pin_key, registered_key
from enginesmith.registry.versions.lookup import folder_names


def list_pinned(store: Store, model: str) -> list[str]:
    """A model's pinned versions, sorted by name. Lists keys, and reads no pin."""
    prefix = model_prefix("pins", model)
    pinned_names = (name.removesuffix(".json") for name in store.children(prefix) if name.endswith(".json"))
    return sorted(filter(is_name, pinned_names), key=version_order)


def pin(store: Store, manifest: Manifest, *, by: str = "", why: str = "") -> bool:
    """Pin a version. Returns False if it was already pinned. Raises IntegrityError if it was deleted meanwhile."""
    document = canonical_json({"at": now(), "by": by, "why": why})
    with hold_lease(store, f"pinning {manifest.reference}") as guard:
        secure_version(guard, manifest)
        return store.create(pin_key(manifest.model, manifest.version), document)


def unpin(store: Store, model: str, version: str) -> None:
    """Remove a version's pin. Raises UnknownNameError if there is none."""
    if store.read(pin_key(model, version)) is None:
        raise UnknownNameError(
            f"{model}@{version} is not pinned; pinned: {', '.join(list_pinned(store, model)) or 'nothing'}"
        )
    unmark(store, [version_name(model, version)])  # see `state.change_channel`
    store.remove(pin_key(model, version))
    with suppress(EnginesmithError):
        unmark(store, [version_name(model, version)])


# Registered specs: bundles of a spec and its files, kept in the registry for the machines that build them.
#
# registered.json of a model has the last `KEPT` bundles, newest last; their files are blobs. Files of earlier ones are
# garbage for `enginesmith registry gc`, unless a version has them.

KEPT = 3
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class SpecBundle:
    """A model's spec and its files. spec: the spec file's name.  files: path below the spec's folder -> digest."""

    model: Name
    spec: str
    files: Mapping[FilePath, Digest]

    def check_fields(self) -> None:
        """Raise Malformed if the spec is not among the files."""
        if self.spec not in self.files:
            raise Malformed(f"spec is {self.spec!r:.80}, which is not one of its files")

    @cached_property
    def digest(self) -> str:
        """The bundle's identity: equal files with equal names give the same digest, in any folder."""
        return digest_of(encode(self))


@dataclass(frozen=True)
class Registration:
    """A bundle, when it was registered (ISO 8601, UTC) and by whom. digest: the bundle's."""

    bundle: SpecBundle
    at: str
    by: str
    digest: Digest = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest or self.bundle.digest)

    def check_fields(self) -> None:
        """Raise Malformed if the digest is not the bundle's."""
        if self.digest != self.bundle.digest:
            raise Malformed(f"its bundle has digest {self.bundle.digest}; it was edited")

    @property
    def address(self) -> str:
        """The address that flows use: 'registered:digits@8a41...'."""
        return f"registered:{self.bundle.model}@{self.bundle.digest}"


@dataclass(frozen=True)
class _Document:
    registered: tuple[Registration, ...] = ()


def registrations(store: Store, model: str) -> list[Registration]:
    """A model's registrations, newest last. Raises IntegrityError if the document is unreadable."""
    return parse(store.read(registered_key(model)), model)


def addresses(store: Store) -> list[str]:
    """The address of the newest registration of each model that has one, sorted by name.

    For an unreadable document the address has no digest: only the use of this address fails.
    """
    return [getattr(registration, "address", f"registered:{registration}") for registration in _newest(store)]


def newest_registrations(store: Store) -> Iterator[Registration]:
    """The newest registration of each model, sorted by name, without unreadable ones."""
    return (registration for registration in _newest(store) if isinstance(registration, Registration))


def _newest(store: Store) -> Iterator[Registration | str]:
    """The newest registration of each model that has one; the model's name if it is unreadable."""
    for model in filter(is_name, folder_names(store)):
        try:
            yield from registrations(store, model)[-1:]
        except IntegrityError:
            yield model


def find(store: Store, model: str, digest: str | None = None) -> Registration:
    """A model's registration whose bundle has this digest; None: the newest. Raises UnknownNameError."""
    entries = registrations(store, model)
    matching_entries = [registration for registration in entries if digest in (None, registration.bundle.digest)]
    if not matching_entries:
        name = f"{model}@{digest}" if digest else model
        digests_text = ", ".join(registration.bundle.digest[:12] for registration in entries) or "nothing"
        raise UnknownNameError(
            f"{name} is not registered in {store.uri}, which has {digests_text} of {model} (the last {KEPT} are kept); "
            "`enginesmith prefect register SPEC` registers it"
        )
    return matching_entries[-1]


def parse(data: bytes | None, model: str) -> list[Registration]:
    """Parse a model's document. Raises IntegrityError."""
    with explain_damage(registered_key(model), "delete it and register again"):
        entries = parse_as(data, MAX_BYTES, _Document).registered if data is not None else ()
        if other_models := [entry.bundle.model for entry in entries if entry.bundle.model != model]:
            raise Malformed(f"a bundle belongs to {other_models[0]}: the document was edited")
        return list(entries)


def outside(name: str) -> str | None:
    """The reason why a file name may not be unpacked into a folder; None if it may."""
    try:
        return None if inside(name) == name else f"must be written as {inside(name)!r}"
    except ValueError as error:
        return str(error)
