"""Pins: versions that no collection deletes, whatever their age and whether or not a channel serves them."""

from enginery.core.digest import canonical_json
from enginery.core.errors import UnknownNameError
from enginery.core.names import is_name, version_order
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.keys import pin_key, pins_prefix
from enginery.registry.writers import clock
from enginery.registry.writers.clock import stamp
from enginery.registry.writers.guard import secure_version, writing


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
