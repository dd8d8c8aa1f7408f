"""Reports of simulated canaries, as the pipeline makes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.validation.canary.simulated import pair_evidence
from validation.canary.judging.judge import Looks, judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import EngineIdentity, ObservationTable, add_to
from validation.canary.report import CanaryReport, Circumstances, TrafficReplayed, make_report

IDENTITY = EngineIdentity("tiny", target="cpu", precision="int8", backend="onnxruntime")


def observations(path: Path, count: int, seed: int = 0, **fault: Any) -> tuple[ObservationTable, ObservationTable]:
    """Two sides in memory; the candidate has the fault."""
    evidence = pair_evidence(np.random.default_rng(seed), count, "shared", **fault)
    different_iterator = iter(evidence.differs if evidence.differs is not None else ())
    names = ("candidate", "baseline")
    sides = [
        ObservationTable(
            path / f"{name}.jsonl", replace(IDENTITY, version=version, manifest=digit * 64, engine=digit * 64)
        )
        for name, version, digit in zip(names, "21", "ab", strict=True)
    ]
    for index in range(count):
        both_mask = evidence.candidate.ok[index] and evidence.baseline.ok[index]
        distance = {"sqnr_db": 3.0 if next(different_iterator) else 40.0, "flipped": False} if both_mask else {}
        for side, seen_side, extra in zip((evidence.candidate, evidence.baseline), sides, (distance, {}), strict=True):
            is_ok = bool(side.ok[index])
            line = {"time": index * 0.1, "latency": float(side.latency[index]) / 100, "ok": is_ok, "request": index}
            add_to(seen_side, line | extra | ({} if is_ok else {"error": "out of memory"}))
    for side, digit in zip(sides, "cd", strict=True):
        side.digest = digit * 64
    return sides[0], sides[1]


def report(path: Path, count: int = 12_000, seed: int = 0, looks: Looks | None = None, **fault: Any) -> CanaryReport:
    candidate, baseline = observations(path, count, seed, **fault)
    evidence, notes = evidence_of(candidate, baseline, 15.0)
    limits, looks = Thresholds(), looks or Looks()
    judgement = judge(evidence, limits, looks, replicates=200)
    facts = Circumstances(
        created_at="2026-01-31T08:43:00+00:00",
        host={"name": "here", "cpus": "2"},
        versions={"enginesmith": "0.1.0"},
        thresholds_from="the documented defaults",
        traffic=TrafficReplayed(digest="e" * 64, scale=1.0),
        notes=tuple(notes),
    )
    return make_report(judgement, limits, looks, candidate, baseline, evidence, facts)
