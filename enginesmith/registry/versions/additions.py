"""Adds evidence to a published version (attestations, latency reports, signatures), and refreshes the channels that
serve it, whose snapshots hold it.

The lease of a writer that dies in between names the model; the collection that finds it over refreshes the channels.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.evidence.latencies import attach_latency
from enginesmith.registry.leases import Guard
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.index import hold_change
from enginesmith.registry.versions.refresh import refresh_version

if TYPE_CHECKING:
    from enginesmith.core.reports.proof import Report
    from enginesmith.registry.trust.signing import Keyless, Signed, SigningKey


def add_attestation(store: Store, manifest: Manifest, report: "Report") -> str | None:
    """`attest`, and refresh the channels that serve the version; None, and nothing, for a report without a decision,
    of which a part was not measured. Raises as `attest` and the store."""
    if report.verdict == "unproven":
        return None
    with _hold_change(store, manifest) as guard:
        digest = attest(store, manifest, report)
        refresh_version(guard, manifest)
    return digest


def add_latencies(store: Store, manifest: Manifest, reports: Iterable[str]) -> None:
    """`attach_latency` of each report, given as a blob's digest, and refresh the channels once."""
    found = list(reports)
    if not found:
        return
    with _hold_change(store, manifest) as guard:
        for report in found:
            attach_latency(store, manifest, report)
        refresh_version(guard, manifest)


def add_signatures(store: Store, manifest: Manifest, signer: "SigningKey | Keyless") -> tuple["Signed", ...]:
    """`sign`, and refresh the channels where a signature is new. Raises as `sign` and the store."""
    from enginesmith.registry.trust.signing import sign

    with _hold_change(store, manifest) as guard:
        signed = sign(store, manifest, signer)
        if any(item.new for item in signed):
            refresh_version(guard, manifest)
    return signed


def _hold_change(store: Store, manifest: Manifest) -> AbstractContextManager[Guard]:
    return hold_change(store, [manifest.model], f"adding evidence to {manifest.model}@{manifest.version}")
