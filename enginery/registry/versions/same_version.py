"""The version that a publication would repeat: the same engines with the same proofs, made from other inputs.

A comment in the entry point, a file with another name, a calibration sample that changes no scale: what went in
differs, and whoever pulls gets the same. Such a run is the version that is there already.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.registry.evidence.attestations import MAX_BYTES
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store
from enginery.registry.versions.lookup import load, versions
from enginery.registry.writers.guard import secure_version, writing

if TYPE_CHECKING:
    from enginery.core.proof.report import Report

# Parts of a spec that say how engines come about and show in them. The others say how they are proven, here and later.
_MAKING = ("source", "precisions", "targets", "backends", "calibration", "quantization")
# What a report says of the moment and the machine, and not of the engine.
_CIRCUMSTANCES = ("created_at", "host")


def find_same(
    store: Store, manifest: Manifest, reports: Sequence["Report"], wanted_version: str | None = None
) -> Manifest | None:
    """The newest version, or the wanted one where it exists, if it has the engines and proofs of `manifest`; else None.

    manifest: as it would be published, its engines included.  reports: of its usable engines.
    """
    name = wanted_version or next(reversed(versions(store, manifest.model)), None)
    theirs = _read(store, manifest.model, name) if name else None
    if theirs is None or _said(theirs) != _said(manifest) or not all(map(store.has, theirs.blobs())):
        return None
    if not _equal_proofs(store, theirs, reports):
        return None
    with writing(store, f"counting on {theirs.model}@{theirs.version}") as guard:
        secure_version(guard, theirs)
    return theirs


def _read(store: Store, model: str, version: str) -> Manifest | None:
    """None of a version that is not there or damaged: publishing goes on beside it, and `verify` reports it."""
    try:
        return load(store, model, version)
    except (IntegrityError, UnknownNameError):
        return None


def _said(manifest: Manifest) -> bytes:
    """What a manifest says of its engines and of how they are proven, but for the reports' digests."""
    entries = sorted((entry.unit, asdict(replace(entry, report=None))) for entry in manifest.engines)
    spec = {name: part for name, part in manifest.spec.items() if name not in _MAKING}
    validation = {name: part for name, part in dict(spec.pop("validation", {})).items() if name != "latency"}
    golden = dict(spec.pop("golden", None) or {}).get("metric")
    return canonical_json([entries, spec, validation, golden, manifest.sources.get("golden")])


def _equal_proofs(store: Store, theirs: Manifest, reports: Sequence["Report"]) -> bool:
    ours = {report.unit: report.to_json() for report in reports}
    return all(_plain(ours[entry.unit]) == _proof(store, entry) for entry in theirs.engines if entry.usable)


def _proof(store: Store, entry: EngineEntry) -> bytes | None:
    """The proof of a published engine; None where its report is damaged."""
    try:
        return _plain(parsing.parse_json(store.read_blob(str(entry.report)), MAX_BYTES))
    except IntegrityError:
        return None


def _plain(report: dict[str, Any]) -> bytes:
    return canonical_json({name: part for name, part in report.items() if name not in _CIRCUMSTANCES})
