"""Pins: versions that garbage collection keeps whatever their age."""

from enginesmith.core.digest import canonical_json
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.names import is_name, version_order
from enginesmith.core.text import now
from enginesmith.registry.leases import hold_lease, secure_version, version_name
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.marks import unmark
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import model_prefix, pin_key


def list_pinned(store: Store, model: str) -> list[str]:
    """A model's pinned versions in the order of their names. Lists keys, and reads no pin."""
    prefix = model_prefix("pins", model)
    names = (name.removesuffix(".json") for name in store.children(prefix) if name.endswith(".json"))
    return sorted(filter(is_name, names), key=version_order)


def pin(store: Store, manifest: Manifest, *, by: str = "", why: str = "") -> bool:
    """Pin a version and return whether it was not pinned before. Raises IntegrityError if it was deleted meanwhile."""
    document = canonical_json({"at": now(), "by": by, "why": why})
    with hold_lease(store, f"pinning {manifest.model}@{manifest.version}") as guard:
        secure_version(guard, manifest)
        return store.create(pin_key(manifest.model, manifest.version), document)


def unpin(store: Store, model: str, version: str) -> None:
    """Remove a version's pin. Raises UnknownNameError when there is none."""
    if store.read(pin_key(model, version)) is None:
        raise UnknownNameError(
            f"{model}@{version} is not pinned; pinned: {', '.join(list_pinned(store, model)) or 'nothing'}"
        )
    unmark(store, [version_name(model, version)])  # see `channels._move`
    store.remove(pin_key(model, version))
