"""Files of observations of published engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.core.codec import encode
from enginesmith.recording.recorder import header_of
from enginesmith.registry.manifest import Manifest
from pipeline.canary.engines import ChosenEngine
from tests.validation.canary.simulated import pair_evidence
from validation.canary.observations import EngineIdentity


def identity(manifest: Manifest) -> EngineIdentity:
    return ChosenEngine(manifest, manifest.engines[0]).identity


def write_observations(
    folder: Path, candidate: Manifest, baseline: Manifest, count: int = 6000, seed: int = 0, **fault: Any
) -> tuple[Path, Path]:
    """Two files, as serving code writes them."""
    evidence = pair_evidence(np.random.default_rng(seed), count, "shared", **fault)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "candidate.jsonl", folder / "baseline.jsonl"
    for path, side, manifest in zip(paths, (evidence.candidate, evidence.baseline), (candidate, baseline), strict=True):
        lines = [header_of(encode(identity(manifest)))]
        for index in range(count):
            ok = bool(side.ok[index])
            line = {"time": index * 0.1, "latency": float(side.latency[index]), "ok": ok, "request": index}
            lines.append({**line, "output": "ab" * 32})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths
