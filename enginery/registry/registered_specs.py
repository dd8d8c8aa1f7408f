"""Registered specs: bundles of a spec and its files that a registry keeps for whoever builds them.

::

    models/<model>/registered.json     the model's last bundles, newest last; their files are blobs

The last `KEPT` are remembered. Files of earlier ones are garbage for `enginery gc`, unless a version has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from enginery.core import parsing
from enginery.core.digest import digest_of
from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import inside, is_name
from enginery.core.parsing import Malformed
from enginery.registry.store.base import Store
from enginery.registry.store.keys import MODELS, registered_key

KEPT = 3
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Bundle:
    """A model's spec and its files. spec: the spec file's name.  files: path below the spec's folder -> digest."""

    model: str
    spec: str
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """What names it: equal files under equal names are the same bundle, wherever they lie."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """As a registry keeps it."""
        return {"model": self.model, "spec": self.spec, "files": dict(self.files)}

    @classmethod
    def from_json(cls, value: Any, path: str = "bundle") -> "Bundle":
        """Read back. Raises Malformed; also for a path that would lead out of the folder it is unpacked into."""
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

    bundle: Bundle
    at: str
    by: str

    @property
    def address(self) -> str:
        """How flows call it: 'registered:digits@8a41...'."""
        return f"registered:{self.bundle.model}@{self.bundle.digest}"

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {"digest": self.bundle.digest, "bundle": self.bundle.to_json(), "at": self.at, "by": self.by}


def registrations(store: Store, model: str) -> list[Registration]:
    """What is registered of a model, newest last. Raises IntegrityError if that cannot be read."""
    return parse(store.read(registered_key(model)), model)


def addresses(store: Store) -> list[str]:
    """The address of the newest registration of each model that has one, sorted by name.

    One that cannot be read has an address without a digest, so that it fails where it is used, and stops no other.
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
            "`enginery register SPEC` registers it"
        )
    return chosen[-1]


def parse(data: bytes | None, model: str) -> list[Registration]:
    """Read a model's document. Raises IntegrityError."""
    if data is None:
        return []
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        return parsing.field(document, "registered", lambda value, path: [*parsing.many(_item(model))(value, path)])
    except Malformed as error:
        raise IntegrityError(f"{registered_key(model)}: {error}; delete it and register again") from error


def _item(model: str) -> Any:
    def read(value: Any, path: str) -> Registration:
        data = parsing.mapping(value, path)
        bundle = Bundle.from_json(data.get("bundle"), f"{path}.bundle")
        if bundle.model != model or bundle.digest != parsing.field(data, "digest", parsing.digest, path):
            raise Malformed(f"{path}: its bundle is of {bundle.model} and has digest {bundle.digest}; it was edited")
        at, by = (parsing.field(data, name, parsing.text, path) for name in ("at", "by"))
        return Registration(bundle, at, by)

    return read


def outside(name: str) -> str | None:
    """Why a name cannot be unpacked below a folder; None if it can."""
    try:
        inside(name)
    except ValueError as error:
        return str(error)
    return None
