"""How long planning a catalog takes when nothing is to be done: 1,000 models x 6 targets x 3 precisions, all on record.

Each model has a spec file, an ONNX file and a golden set of its own in a folder of its own; the registry is a folder
with every record that a real run would have left (their contents are one real model's with other digests, and the
compiler compiles nothing). What is timed is a fresh process that loads each spec and prepares its plan.
Usage: python -m benchmarks.bench_planning [--models 1000]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import noop
from builders.execution.jobs import Job, Watch, ignore_event, result_type
from builders.execution.local import LocalExecutor
from enginery.core.codec import decode, encode
from enginery.registry.store.base import Store, open_store
from pipeline.compile.composition import InProcess, prepare
from pipeline.compile.plan import Selection
from pipeline.compile.run_context import RunContext
from pipeline.spec.model import load_spec
from pipeline.values import EngineRecord

TARGETS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]
PRECISIONS = ["fp32", "fp16", "bf16"]


class Canned:
    """An executor that gives every model what the first one's jobs gave, with blobs of its own."""

    def __init__(self, store: Store) -> None:
        self.store, self._real, self._known = store, LocalExecutor(), dict[str, str]()
        self.model = 0

    def run(self, job: Job[Any], watch: Watch = ignore_event) -> Any:
        fields = encode(job.request)
        what = f"{job.name} {fields.get('variant') or fields.get('precision')}"
        if what not in self._known:
            self._known[what] = json.dumps(encode(self._real.run(job, watch)))
        known = self._known[what]
        told = json.loads(self._with_own_blobs(known) if self.model else known)  # the first model's are real
        return decode(told, result_type(job.request))

    def cancel(self) -> None: ...

    def _with_own_blobs(self, text: str) -> str:
        words = set(text.split('"'))
        for digest in sorted(word for word in words if len(word) == 64 and set(word) <= set("0123456789abcdef")):
            if self.store.has(digest):
                text = text.replace(digest, self.store.put_bytes(f"{self.model} {digest}".encode()))
        return text


def write_model(folder: Path, index: int) -> Path:
    """A spec with files that no other model has."""
    import onnx
    from onnx import numpy_helper

    folder.mkdir()
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[batch, 8] x) => (float[batch, 4] y) { y = MatMul(x, w) }'
    )
    weights = np.random.default_rng(index).normal(size=(8, 4)).astype(np.float32)
    graph.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(graph, folder / "model.onnx")
    np.savez(folder / "golden.npz", x=np.random.default_rng(index).normal(size=(8, 8)).astype(np.float32))
    spec = {
        "model": f"model-{index}",
        "source": {"onnx": "model.onnx"},
        "inputs": {"x": {"dtype": "float32", "shape": ["batch", 8]}},
        "dims": {"batch": {"min": 1, "opt": 4, "max": 8}},
        "precisions": PRECISIONS,
        "targets": TARGETS,
        "golden": {"data": "golden.npz"},
        "backends": {"noop": {}},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def fill(folder: Path, models: int) -> None:
    """Specs and records of so many models."""
    store = open_store(str(folder / "registry"), create=True)
    canned = Canned(store)
    context = RunContext(store, canned, canned)
    for index in range(models):
        canned.model = index
        spec = load_spec(write_model(folder / f"model-{index}", index))
        for unit in prepare(spec, Selection(), context, InProcess()).plan.units:
            engine = store.put_bytes(unit.request.key.encode())
            record = EngineRecord(unit.request, engine, 64, ".noop", 1.0, ())
            context.remember("build", {"build": unit.request.key}, encode(record), [engine])


def plan_all(folder: Path) -> dict[str, Any]:
    """Plan every spec; figures of this process."""
    begun = time.perf_counter()
    store = open_store(str(folder / "registry"))
    context = RunContext(store, LocalExecutor(), LocalExecutor())
    actions: dict[str, int] = {}
    for path in sorted(folder.glob("model-*/spec.yaml")):
        for unit in prepare(load_spec(path), Selection(), context, InProcess()).plan.units:
            actions[unit.action] = actions.get(unit.action, 0) + 1
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": round(time.perf_counter() - begun, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(used.ru_maxrss / 1024),
        "units": actions,
    }


def main() -> None:
    """Fill a registry, plan in a fresh process, print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="filled already: only plan")
    given = parser.parse_args()
    noop.install()
    if given.folder:
        print(json.dumps(plan_all(given.folder)))
        return
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), given.models)
        command = [sys.executable, "-m", "benchmarks.bench_planning", "--folder", folder]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
    print(json.dumps({"models": given.models, "load_before": load, **json.loads(ended.stdout)}))


if __name__ == "__main__":
    main()
