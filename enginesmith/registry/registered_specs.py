"""Registered specs: bundles of a spec and its files, kept in the registry for the machines that build them.

::

    models/<model>/registered.json     the model's last bundles, newest last; their files are blobs

The last `KEPT` are remembered. Files of earlier ones are garbage for `enginesmith registry gc`, unless a version has
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from enginesmith.core import parsing
from enginesmith.core.digest import digest_of
from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.core.names import inside, is_name
from enginesmith.core.parsing import Malformed
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import MODELS, registered_key

KEPT = 3
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class SpecBundle:
    """A model's spec and its files. spec: the spec file's name.  files: path below the spec's folder -> digest."""

    model: str
    spec: str
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """The bundle's identity: equal files under equal names give the same digest, in whatever folder they are."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, object]:
        """The bundle as a registry stores it."""
        return {"model": self.model, "spec": self.spec, "files": dict(self.files)}

    @classmethod
    def from_json(cls, value: object, path: str = "bundle") -> "SpecBundle":
        """Read a bundle that `to_json` wrote. Raises Malformed, also for a path that leaves the bundle's folder."""
        data = parsing.mapping(value, path)
        files = parsing.field(data, "files", parsing.mapping_of(parsing.digest), path)
        for name in files:
            if reason := outside(name):
                raise Malformed(f"{path}.files: {name[:80]!r} {reason}")
        spec = parsing.field(data, "spec", parsing.text, path)
        if spec not in files:
            raise Malformed(f"{path}.spec is {spec[:80]!r}, which is none of its files")
        return cls(parsing.field(data, "model", parsing.name, path), spec, files)


@dataclass(frozen=True)
class Registration:
    """A bundle, when it was registered (ISO 8601, UTC) and by whom."""

    bundle: SpecBundle
    at: str
    by: str

    @property
    def address(self) -> str:
        """The address that flows use: 'registered:digits@8a41...'."""
        return f"registered:{self.bundle.model}@{self.bundle.digest}"

    def to_json(self) -> dict[str, object]:
        """The registration as it is stored."""
        return {"digest": self.bundle.digest, "bundle": self.bundle.to_json(), "at": self.at, "by": self.by}


def registrations(store: Store, model: str) -> list[Registration]:
    """A model's registrations, newest last. Raises IntegrityError if the document cannot be read."""
    return parse(store.read(registered_key(model)), model)


def addresses(store: Store) -> list[str]:
    """The address of the newest registration of each model that has one, sorted by name.

    One that cannot be read gets an address without a digest: it fails when it is used, and the others do not.
    """
    names = (name.removesuffix("/") for name in store.children(MODELS) if name.endswith("/"))
    found = []
    for model in sorted(name for name in names if is_name(name)):
        try:
            found += [item.address for item in registrations(store, model)[-1:]]
        except IntegrityError:
            found.append(f"registered:{model}")
    return found


def find(store: Store, model: str, digest: str | None = None) -> Registration:
    """A model's registration by its bundle's digest, or the newest. Raises UnknownNameError."""
    found = registrations(store, model)
    chosen = [item for item in found if digest in (None, item.bundle.digest)]
    if not chosen:
        what = f"{model}@{digest}" if digest else model
        known = ", ".join(item.bundle.digest[:12] for item in found) or "nothing"
        raise UnknownNameError(
            f"{what} is not registered in {store.uri}, which has {known} of {model} (the last {KEPT} are kept); "
            "`enginesmith prefect register SPEC` registers it"
        )
    return chosen[-1]


def parse(data: bytes | None, model: str) -> list[Registration]:
    """Read a model's document. Raises IntegrityError."""

    def read(value: object, path: str) -> Registration:
        fields = parsing.mapping(value, path)
        bundle = SpecBundle.from_json(fields.get("bundle"), f"{path}.bundle")
        if bundle.model != model or bundle.digest != parsing.field(fields, "digest", parsing.digest, path):
            raise Malformed(f"{path}: its bundle is of {bundle.model} and has digest {bundle.digest}; it was edited")
        at, by = (parsing.field(fields, name, parsing.text, path) for name in ("at", "by"))
        return Registration(bundle, at, by)

    try:
        document = parsing.parse_json(data, MAX_BYTES) if data is not None else {"registered": []}
        return [*parsing.field(document, "registered", parsing.many(read))]
    except Malformed as error:
        raise IntegrityError(f"{registered_key(model)}: {error}; delete it and register again") from error


def outside(name: str) -> str | None:
    """The reason why a file name may not be unpacked into a folder; None if it may."""
    try:
        return None if inside(name) == name else f"must be written as {inside(name)!r}"
    except ValueError as error:
        return str(error)
