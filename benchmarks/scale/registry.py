"""A registry of as many models as wanted in a counting store, each published by the real code, with evidence of a size
that the examples have: twelve engines a version, for each an attestation and a latency report."""

from dataclasses import replace

from enginesmith.core.codec import encode
from enginesmith.core.errors import canonical_json
from enginesmith.core.reports.proof import Check
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.evidence.latencies import attach_latency
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import channels
from tests.enginesmith.registries import engine, publish_engines, report
from tests.validation.latency.reports import latency_report

TARGETS = (
    "cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "l4", "h100",
)  # fmt: skip
CHECKS = 40


def publish_version(store: Store, model: str, number: int, *, evidence: bool = True) -> Manifest:
    """Publish a version with an engine for each generation of hardware and move its channel `stable`.

    evidence: whether each engine has an attestation and a latency report before the channel moves.
    """
    entries = [engine(store, target, "fp16", data=f"{model} {number} {target}".encode() * 20) for target in TARGETS]
    manifest = publish_engines(store, entries, number, channel=None, version=str(number), model=model).manifest
    if evidence:
        for entry in manifest.engines:
            validation_report = report(entry, "proven", host="node")
            checks = tuple(
                Check("engine", "sqnr_db", f"logits {index}", "golden", 60.0, 40.0, True) for index in range(CHECKS)
            )
            attest(store, manifest, replace(validation_report, checks=checks))
            timed_report = latency_report()
            timed_report = replace(timed_report, engine=str(entry.digest), unit=entry.unit)
            attach_latency(store, manifest, store.put_bytes(canonical_json(encode(timed_report))))
    channels.promote(store, manifest, "stable", proven_only=False)
    return manifest
