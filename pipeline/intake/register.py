"""Putting a spec and its files into a registry, from where any worker that reaches it can build them."""

from enginery.core.digest import canonical_json
from enginery.core.errors import ConflictError
from enginery.core.moment import now
from enginery.core.user import user
from enginery.registry.registered_specs import KEPT, Registration, parse
from enginery.registry.store.base import Store
from enginery.registry.store.documents import change
from enginery.registry.store.keys import registered_key
from enginery.registry.writers.guard import writing
from pipeline.intake.bundle import MOST_BYTES, bundle_of
from pipeline.spec.model import ModelSpec


def register(store: Store, spec: ModelSpec, most_bytes: int = MOST_BYTES) -> tuple[Registration, bool]:
    """Keep a spec and its files in a registry; and whether it was the newest there already.

    Raises InputError and ModelError as `bundle_of`, ConflictError when files change or vanish meanwhile.
    """
    with writing(store, f"registering {spec.model}") as guard:
        bundle = bundle_of(spec, store.put_file, most_bytes)
        guard.secure(bundle.files.values())
        if lost := [name for name, digest in bundle.files.items() if not store.has(digest)]:
            raise ConflictError(f"{spec.path}: {lost[0]} was collected while it was registered; run again")
        return _append(store, Registration(bundle, now(), user()))


def _append(store: Store, new: Registration) -> tuple[Registration, bool]:
    """Make it the newest, unless that is the same; and whether it was."""
    model, tried = new.bundle.model, False

    def appended(data: bytes | None) -> bytes | None:
        nonlocal tried
        before = parse(data, model)
        if before and before[-1].bundle.digest == new.bundle.digest:
            return None
        tried = True
        others = [item for item in before if item.bundle.digest != new.bundle.digest]
        return canonical_json({"registered": [item.to_json() for item in [*others, new][-KEPT:]]})

    newest = parse(change(store, registered_key(model), appended), model)[-1]
    return newest, not (tried and newest == new)
