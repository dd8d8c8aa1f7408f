"""Pins: versions that no collection deletes, whatever their age and whether or not a channel serves them."""

from dataclasses import dataclass
from datetime import datetime

from builders.digest import canonical_json
from builders.errors import IntegrityError, UnknownNameError
from pipeline.registry import parsing
from pipeline.registry.keys import pin_key, pins_prefix
from pipeline.registry.manifest import Manifest
from pipeline.registry.names import is_name, version_order
from pipeline.registry.parsing import Malformed
from pipeline.registry.retention import clock
from pipeline.registry.retention.clock import read_stamp, stamp
from pipeline.registry.retention.guard import secure_version, writing
from pipeline.registry.store import Store

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Pin:
    """A pinned version: since when, by whom, why."""

    version: str
    at: datetime
    by: str
    why: str


def pinned(store: Store, model: str) -> list[str]:
    """A model's pinned versions, oldest name first. Reads no pin."""
    prefix = pins_prefix(model)
    names = (name.removesuffix(".json") for name in store.children(prefix) if name.endswith(".json"))
    return sorted(filter(is_name, names), key=version_order)


def pin(store: Store, manifest: Manifest, *, by: str = "", why: str = "") -> bool:
    """Pin a version; whether it was not pinned before. Raises IntegrityError when it was deleted meanwhile."""
    document = canonical_json({"at": stamp(clock.now()), "by": by, "why": why})
    with writing(store, f"pinning {manifest.model}@{manifest.version}") as guard:
        secure_version(guard, manifest)
        return store.create(pin_key(manifest.model, manifest.version), document)


def unpin(store: Store, model: str, version: str) -> None:
    """Take a pin away. Raises UnknownNameError when there is none."""
    if store.read(pin_key(model, version)) is None:
        raise UnknownNameError(
            f"{model}@{version} is not pinned; pinned: {', '.join(pinned(store, model)) or 'nothing'}"
        )
    store.remove(pin_key(model, version))


def read_pin(store: Store, model: str, version: str) -> Pin | None:
    """A pin, or None. Raises IntegrityError."""
    data = store.read(pin_key(model, version))
    if data is None:
        return None
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        return Pin(
            version,
            parsing.field(document, "at", read_stamp),
            parsing.field(document, "by", parsing.text),
            parsing.field(document, "why", parsing.text),
        )
    except Malformed as error:
        raise IntegrityError(f"pin of {model}@{version}: {error}; delete it and pin again") from error
