"""How long planning a catalog takes when nothing is to be done: 1,000 models x 6 targets x 3 precisions, all on record.

Each model has a spec file, an ONNX file and a golden set of its own in a folder of its own; the registry is a folder
with every record that a real run would have left (their contents are one real model's with other digests, and the
compiler compiles nothing). What is timed is `enginesmith plan --all` in a fresh process, on a store whose
requests each take 20 ms; first without copies of the records, then with them.
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
from collections.abc import Callable, Iterator
from multiprocessing import Value
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from benchmarks import noop
from builders.execution.jobs import Job, Watch, ignore_event, result_type
from builders.execution.local import LocalExecutor
from enginesmith.core.codec import decode, encode
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.composition import Run
from pipeline.compile.run_context import RunContext
from pipeline.orchestration import catalog
from pipeline.orchestration.catalog import gather_specs
from pipeline.orchestration.run import RunOptions
from pipeline.spec.model import load_spec
from pipeline.values import Recorded

TARGETS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]
PRECISIONS = ["fp32", "fp16", "bf16"]
PAUSE_S = 0.02
PAGE = 1000
REQUESTS = {"read", "has", "size", "stored_size", "create", "replace", "list", "children", "read_blob", "fetch"}


class Canned:
    """An executor that gives every model what the first one's jobs gave, with blobs of its own."""

    def __init__(self, store: Store) -> None:
        self.store, self._real, self._known = store, LocalExecutor(), dict[str, str]()
        self.model = 0

    def run(self, job: Job[Any], watch: Watch = ignore_event) -> Any:
        fields = encode(job.request)
        label = f"{job.name} {fields.get('variant') or fields.get('precision')}"
        if label not in self._known:
            self._known[label] = json.dumps(encode(self._real.run(job, watch)))
        stored = self._known[label]
        stored_rows = json.loads(self._with_own_blobs(stored) if self.model else stored)  # the first model's are real
        return decode(stored_rows, result_type(job.request))

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
    canned_store = Canned(store)
    context = RunContext(store, canned_store, canned_store)
    for index in range(models):
        canned_store.model = index
        spec = load_spec(write_model(folder / f"model-{index}", index))
        run = Run(spec, context)
        for unit in (unit for batch in run.prepare() for unit in batch.plan.units):
            engine = store.put_bytes(unit.request.key.encode())
            record = Recorded(unit.request.key, engine, 64, ".noop", 1.0, ())
            context.remember("build", {"build": unit.request.key}, encode(record), [engine])


class SlowStore:
    """The store of a folder that is asked through a network: every request takes `PAUSE_S`, a page of a listing one."""

    def __init__(self, store: Store) -> None:
        self._store, self.requests = store, Value("q", 0)  # shared by forked processes

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        return self._slow(attribute) if name in REQUESTS else attribute

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        stored_sizes = list(self._store.sizes(prefix))
        self._wait(max(1, -(-len(stored_sizes) // PAGE)))
        return iter(stored_sizes)

    def _slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any, **named: Any) -> Any:
            self._wait(1)
            return call(*given, **named)

        return slow

    def _wait(self, requests: int) -> None:
        with self.requests.get_lock():
            self.requests.value += requests
        time.sleep(PAUSE_S * requests)


def plan_all(folder: Path) -> dict[str, Any]:
    """Plan every spec; figures of this process."""
    start_s = time.perf_counter()
    store = SlowStore(open_store(str(folder / "registry")))
    options = RunOptions(registry=str(folder / "registry"))
    with mock.patch.object(catalog, "store_named", lambda _: store), gather_specs(str(folder), None) as addresses:
        rows = catalog.plan_catalog(addresses, options)
    used_usage = [resource.getrusage(self) for self in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "said": catalog.summarize(rows),
        "requests": store.requests.value,
        "seconds": round(time.perf_counter() - start_s, 2),
        "cpu_seconds": round(sum(usage.ru_utime + usage.ru_stime for usage in used_usage), 2),
        "peak_mib": [round(usage.ru_maxrss / 1024) for usage in used_usage],
    }


def main() -> None:
    """Fill a registry, plan in a fresh process, print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="filled already: only plan")
    options = parser.parse_args()
    noop.install()
    if options.folder:
        print(json.dumps(plan_all(options.folder)))
        return
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), options.models)
        command = [sys.executable, "-m", "benchmarks.bench_planning", "--folder", folder]
        for copies in ("none yet", "there"):
            ended_result = subprocess.run(command, check=True, capture_output=True, text=True)
            result = json.loads(ended_result.stdout)
            print(json.dumps({"models": options.models, "load_before": load, "copies": copies, **result}))


if __name__ == "__main__":
    main()
