"""From a reference to the engines of its version for a machine: which are trusted, proven, compatible, there."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from enginesmith.client.locate import VersionLocator
from enginesmith.client.resolve import FALLBACK, EngineRanking, Policy, rank_engines
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.registry.ensembles import pinned_engines
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.latencies import measured_speeds
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.trust.requirement import UntrustedError
from enginesmith.registry.versions.lookup import Located, find_lost_engines


def locate_and_rank(
    store: Store,
    reference: Reference,
    machine: Machine,
    policy: Policy,
    locator: VersionLocator | None = None,
    *,
    sure: bool = True,
) -> tuple[Located, EngineRanking]:
    """Resolve a reference and rank its engines for a machine; engines whose blobs are lost are rejected.

    locator: None is one without a cache.  sure: whether to look for the blobs, one request each, though a download of
    the best engine would show that it is lost; always done in a folder, where a look costs nothing.
    Reads no engine. Raises UnknownNameError, IntegrityError, and UntrustedError without the signatures that the trust
    policy requires.
    """
    located = (locator or VersionLocator(store, checked=True)).locate(reference)
    return rank_located(store, located, machine, policy, sure=sure)


def rank_located(
    store: Store, located: Located, machine: Machine, policy: Policy, *, sure: bool = True
) -> tuple[Located, EngineRanking]:
    """`locate_and_rank` of a version that is located already."""
    located, entries = judge_located(store, located, policy)
    documents = located.documents or store
    policy = replace(policy, proven_only=policy.proven_only or located.proven_only)
    what = f"{located.manifest.model}@{located.manifest.version}"
    timed = partial(measured_speeds, documents, located.manifest, machine)
    found = rank_engines(entries, machine, policy, what, timed)
    if not (sure or store.near or located.manifest.graphs):
        return located, found
    lost = find_lost_engines(store, [candidate.entry for candidate in found.candidates])
    reasons = {digest: str(loss) for digest, loss in lost.items()}
    if located.manifest.graphs:
        sound = [item.entry for item in found.candidates if item.entry.digest not in lost]
        reasons |= _find_lost_graphs(store, located.manifest, sound)
    return located, found.without(reasons)


def _find_lost_graphs(store: Store, manifest: Manifest, entries: Sequence[EngineEntry]) -> dict[str, str]:
    """Engines of an ensemble of which an engine of a graph is lost: digest -> which, and why."""
    found: dict[str, str] = {}
    for entry in entries:
        engines = {str(item.digest): (graph.name, item) for graph, _, item in pinned_engines(store, manifest, entry)}
        for digest, loss in find_lost_engines(store, [item for _, item in engines.values()]).items():
            found[str(entry.digest)] = f"graph {engines[digest][0]!r}: {loss}"
    return found


def locate_engines(store: Store, reference: Reference, policy: Policy) -> tuple[Located, tuple[EngineEntry, ...]]:
    """Resolve a reference to its version and engines with their current status; raises as `locate_and_rank`."""
    return judge_located(store, VersionLocator(store, checked=True).locate(reference), policy)


def judge_located(store: Store, located: Located, policy: Policy) -> tuple[Located, tuple[EngineEntry, ...]]:
    """A located version with its signers, and its engines with their current status.

    Where a snapshot has not the signatures that the trust policy requires, the registry is asked for newer ones.
    """
    try:
        return _judge(store, located, policy)
    except UntrustedError:
        if located.documents is None:
            raise
        return _judge(store, replace(located, documents=None), policy)


def _judge(store: Store, located: Located, policy: Policy) -> tuple[Located, tuple[EngineEntry, ...]]:
    documents = located.documents or store
    vouched = require(documents, located.manifest, policy.trust)
    judged = located.manifest
    if policy.kind == "cache":
        judged = replace(judged, engines=judged.caches)
    entries: tuple[EngineEntry, ...] = judge_entries(documents, judged, vouched.counts)
    if policy.fallback == "onnx":
        entries = (*entries, *_fallback(store, located.manifest))
    return replace(located, signed_by=vouched.signers), entries


def _fallback(store: Store, manifest: Manifest) -> tuple[EngineEntry, ...]:
    """The version's ONNX model as if it were an engine."""
    digest = manifest.sources.get("onnx")
    if digest is None:
        return ()
    described = next((entry for entry in manifest.engines if entry.inputs), None)
    return (
        EngineEntry(
            target=FALLBACK,
            precision="fp32",
            backend="onnxruntime",
            status="unproven",
            reason="the model as it was exported; no engine, and not tried on this machine",
            digest=digest,
            size_bytes=store.stored_size(digest),
            suffix=".onnx",
            inputs=described.inputs if described else (),
            outputs=described.outputs if described else (),
        ),
    )
