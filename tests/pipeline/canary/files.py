"""Files of observations of published engines."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np

from enginesmith.core.codec import encode
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.text import now
from enginesmith.recording.recorder import header_of
from enginesmith.registry.evidence.canaries import canary_target
from enginesmith.registry.manifest import Manifest
from pipeline.canary import verdicts
from pipeline.canary.engines import ChosenEngine
from pipeline.canary.verdicts import DEFAULTS, JudgeOptions, judge_files
from tests.validation.canary.simulated import pair_evidence
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import EngineIdentity
from validation.canary.report import CanaryReport


def identity(manifest: Manifest) -> EngineIdentity:
    return ChosenEngine(manifest, manifest.engines[0]).identity


def write_observations(
    folder: Path, candidate: Manifest, baseline: Manifest, count: int = 6000, seed: int = 0, **fault: Any
) -> tuple[Path, Path]:
    """Two files, as serving code writes them."""
    return _write(folder, (identity(candidate), identity(baseline)), count, seed, **fault)


def report_about(candidate: Manifest, baseline: Manifest, **seen: Any) -> CanaryReport:
    """The report on such observations, which are judged once, as if of these engines and of now."""
    sides = identity(candidate), identity(baseline)
    target = canary_target(parse_targets(sides[0].target or "")[0])
    result = _judge(tuple(sorted(seen.items())))
    return replace(result, candidate=sides[0], baseline=sides[1], target=target, created_at=now()).sign()


@cache
def _judge(seen: tuple[tuple[str, Any], ...]) -> CanaryReport:
    with TemporaryDirectory() as name, mock.patch.object(verdicts, "render", lambda _: ""):
        paths = _write(Path(name), (EngineIdentity(), EngineIdentity()), **{"count": 6000, "seed": 0, **dict(seen)})
        return judge_files(*paths, JudgeOptions(Thresholds(), DEFAULTS), Path(name)).report


def _write(
    folder: Path, sides: tuple[EngineIdentity, EngineIdentity], count: int, seed: int, **fault: Any
) -> tuple[Path, Path]:
    evidence = pair_evidence(np.random.default_rng(seed), count, "shared", **fault)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "candidate.jsonl", folder / "baseline.jsonl"
    for path, side, named_side in zip(paths, (evidence.candidate, evidence.baseline), sides, strict=True):
        lines = [header_of(encode(named_side))]
        for index in range(count):
            is_ok = bool(side.ok[index])
            line = {"time": index * 0.1, "latency": float(side.latency[index]), "ok": is_ok, "request": index}
            lines.append({**line, "output": "ab" * 32})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths
