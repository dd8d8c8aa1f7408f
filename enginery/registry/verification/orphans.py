"""Documents that lead nowhere or cannot be read, for `verify`: remains of versions, pins, policies, leases."""

from collections.abc import Iterator

from enginery.core.errors import EngineryError, IntegrityError
from enginery.registry.retention.marks import Inventory, inventory
from enginery.registry.store.base import Store
from enginery.registry.store.keys import LEASES, MODELS, lease_key
from enginery.registry.versions import policies
from enginery.registry.writers import clock, leases, tombstones

Found = tuple[str, str, str]


def loose_documents(store: Store) -> Iterator[Found]:
    """Kind of problem, what has it, and the detail. See `verify.FAULTS`."""
    known = inventory(store)
    there = set(known.versions)
    for (model, version), keys in known.folders.items():
        if (model, version) not in there:
            for key in keys:
                yield "unreferenced", key, f"{model}@{version} has no manifest; `enginery gc` deletes it"
    yield from _others(known)
    for key in (*known.others, *store.list("policies/")):
        yield from _policy(store, key)
    yield from _retention(store)


def _others(known: Inventory) -> Iterator[Found]:
    there = set(known.versions)
    models = {model for model, _ in there}
    for key in known.others:
        match key.removeprefix(MODELS).split("/"):
            case [model, "pins", name] if (model, name.removesuffix(".json")) not in there:
                yield "unreferenced", key, "a pin of a version that is not there"
            case [model, "channels", _] if model not in models:
                yield "dangling", key, f"{model} has no version"
            case [_, "versions", *_]:
                yield "unreferenced", key, "no model or version can have that name; delete it by hand"


def _policy(store: Store, key: str) -> Iterator[Found]:
    match key.split("/"):
        case ["policies", name]:
            model = None
        case ["models", model, "policies", name]:
            pass
        case _:
            return
    try:
        policies.read(store, model, name.removesuffix(".json"))
    except EngineryError as error:
        yield "edited", key, str(error)


def _retention(store: Store) -> Iterator[Found]:
    try:
        tombstones.read(store)
        over = [lease for lease in leases.leases(store) if not lease.held(clock.now())]
    except IntegrityError as error:
        yield "edited", LEASES, str(error)
        return
    for lease in over:
        yield "stray", lease_key(lease.id), f"lease of a writer that died: {lease.what}; `enginery gc` deletes it"
