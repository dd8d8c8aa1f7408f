"""Registered specs: bundles that a registry keeps, so that any worker that reaches the registry can build them.

::

    models/<model>/registered.json     the model's last bundles, newest last; their files are blobs

The last `KEPT` are remembered. Files of earlier ones are garbage, which `enginery gc` collects unless a version has them.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from builders.digest import canonical_json
from builders.errors import ConflictError, IntegrityError, UndecidedError, UnknownNameError
from pipeline.intake.bundle import MOST_BYTES, Bundle, bundle_of
from pipeline.registry import parsing
from pipeline.registry.keys import MODELS, registered_key
from pipeline.registry.names import is_name
from pipeline.registry.parsing import Malformed
from pipeline.registry.retention.guard import writing
from pipeline.registry.store import Store
from pipeline.spec.model import ModelSpec
from pipeline.user import user

KEPT = 3
MAX_BYTES = 16 << 20
_ATTEMPTS = 20


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


def register(store: Store, spec: ModelSpec, most_bytes: int = MOST_BYTES) -> tuple[Registration, bool]:
    """Keep a spec and its files in a registry; and whether it was the newest there already.

    Raises InputError and ModelError as `bundle_of`, ConflictError when files change or vanish meanwhile.
    """
    with writing(store, f"registering {spec.model}") as guard:
        bundle = bundle_of(spec, store.put_file, most_bytes)
        guard.secure(bundle.files.values())
        if lost := [name for name, digest in bundle.files.items() if not store.has(digest)]:
            raise ConflictError(f"{spec.path}: {lost[0]} was collected while it was registered; run again")
        return _append(store, Registration(bundle, datetime.now(UTC).isoformat(timespec="seconds"), user()))


def registrations(store: Store, model: str) -> list[Registration]:
    """What is registered of a model, newest last. Raises IntegrityError if that cannot be read."""
    return _parse(store.read(registered_key(model)), model)


def newest(store: Store) -> list[Registration]:
    """The newest registration of each model that has one, sorted by name."""
    names = (name.removesuffix("/") for name in store.children(MODELS) if name.endswith("/"))
    found = (registrations(store, name) for name in sorted(names) if is_name(name))
    return [items[-1] for items in found if items]


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


def _append(store: Store, new: Registration) -> tuple[Registration, bool]:
    """Make it the newest, by compare-and-swap."""
    model = new.bundle.model
    for _ in range(_ATTEMPTS):
        data = store.read(registered_key(model))
        before = _parse(data, model)
        if before and before[-1].bundle.digest == new.bundle.digest:
            return before[-1], True
        others = [item for item in before if item.bundle.digest != new.bundle.digest]
        after = [item.to_json() for item in [*others, new][-KEPT:]]
        try:
            if store.replace(registered_key(model), canonical_json({"registered": after}), data):
                return new, False
        except UndecidedError:
            continue  # the next look tells
    raise ConflictError(f"{model} is being registered by many at once; run again")


def _parse(data: bytes | None, model: str) -> list[Registration]:
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
