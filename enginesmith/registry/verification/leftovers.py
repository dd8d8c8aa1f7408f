"""Finds what nothing refers to or what was left behind: records, blobs, documents, leases, series."""

from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.registry import leases
from enginesmith.registry.builds.records import read_record
from enginesmith.registry.collection.inventory import inventory
from enginesmith.registry.collection.references import find_named_digests
from enginesmith.registry.latency_series import parse_series
from enginesmith.registry.marks import read_shards, read_state
from enginesmith.registry.store.layout import LEASES, MODELS, RECORDS, SERIES, lease_key
from enginesmith.registry.verification.findings import Findings
from enginesmith.registry.versions import policies
from enginesmith.registry.versions.snapshots import is_snapshot


def check_litter(found: Findings, stored: list[str]) -> None:
    """Add records that count for nothing, blobs that nothing refers to, and files of writers that died."""
    known = inventory(found.store)
    # By the rules of garbage collection: what it keeps is no orphan, though no manifest names it.
    remembered = find_named_digests(found.store, known)
    for key in found.store.list(RECORDS):
        record = read_record(found.store.read(key))
        if record is None or not all(map(found.store.has, record.blobs)):
            found.add("forgotten", key, "unreadable, or its blobs are gone; the step will run again")
        else:
            remembered.update(record.blobs)
    for digest in () if found.unread else stored:  # what a manifest that cannot be read refers to is not known
        if digest not in found.needed and digest not in remembered and not is_snapshot(found.store, digest):
            found.add("orphaned", digest, f"{found.store.size(digest)} bytes that nothing refers to")
    for path in found.store.strays():
        found.add("stray", path, "left behind by a writer that died; the next build cleans it")


def check_documents(found: Findings) -> None:
    """Documents that refer to nothing: remains of versions, pins and channels."""
    known = inventory(found.store)
    there = set(known.versions)
    models = {model for model, _ in there}
    for (model, version), keys in known.folders.items():
        if (model, version) not in there:
            for key in keys:
                found.add(
                    "unreferenced", key, f"{model}@{version} has no manifest; `enginesmith registry gc` deletes it"
                )
    for key in known.others:
        match key.removeprefix(MODELS).split("/"):
            case [model, "pins", name] if (model, name.removesuffix(".json")) not in there:
                found.add("unreferenced", key, "a pin of a version that is not there")
            case [model, "channels", _] if model not in models:
                found.add("dangling", key, f"{model} has no version")
            case [_, "versions", *_]:
                found.add("unreferenced", key, "no model or version can have that name; delete it by hand")
    _check_policies(found, known.others)


def _check_policies(found: Findings, others: tuple[str, ...]) -> None:
    """Policies that cannot be read. others: keys of documents of models, policies among them."""
    model: str | None
    for key in (*others, *found.store.list("policies/")):
        match key.split("/"):
            case ["policies", name]:
                model = None
            case ["models", model, "policies", name]:
                pass
            case _:
                continue
        try:
            policies.read(found.store, model, name.removesuffix(".json"))
        except EnginesmithError as error:
            found.add("edited", key, str(error))


def check_leases(found: Findings) -> None:
    """Leases and garbage marks that cannot be read, and leases of writers that died."""
    try:
        read_shards(found.store, read_state(found.store).shards)
        now = found.store.now()
        over = [lease for lease in leases.list_leases(found.store) if not lease.is_held(now)]
    except IntegrityError as error:
        found.add("edited", LEASES, str(error))
        return
    for lease in over:
        found.add(
            "stray",
            lease_key(lease.id),
            f"lease of a writer that died: {lease.what}; `enginesmith registry gc` deletes it",
        )


def check_series(found: Findings) -> None:
    """Series of latencies that cannot be read, or are not what their keys say."""
    for key in found.store.list(SERIES):
        try:
            parse_series(found.store.read(key) or b"", key)
        except IntegrityError as error:
            found.add("forgotten", key, str(error))
