"""Whether the intervals of latency reports hold: `python -m benchmarks.bench_intervals [--times N]`.

Each report is the job of a build, in a process of its own: N of each engine in turn, with pauses. Counted is how many
of an engine's intervals hold the median of its N medians, and how long a job takes.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto

from builders.execution.jobs import Job
from builders.execution.process import run_job
from enginesmith.core.reports.latency import BucketLatency, LatencyTerms, Quantile
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.registry.evidence.latencies import read_latency_report
from pipeline.compile.steps.keys import MeasureEngine
from tests.faults.bench import Bench, BuiltEngine
from tests.faults.families import FAMILIES, Family
from tests.pipeline.quantization.small_nets import build

BATCH = Dim("batch", 1, 4, 8)
SIDE = 512
PAUSE_S = 4.0


def wide(seed: int) -> ModelProto:
    """Four products of `SIDE` by `SIDE`."""
    rng = np.random.default_rng(seed)
    weights: dict[str, object] = {f"w{index}": rng.normal(size=(SIDE, SIDE)) / SIDE**0.5 for index in range(4)}
    steps = [f"h{index} = MatMul({f'h{index - 1}' if index else 'x'}, w{index})" for index in range(3)]
    text = " ".join([*steps, "logits = MatMul(h2, w3)"])
    return build(f"float[batch,{SIDE}] x", f"float[batch,{SIDE}] logits", text, weights)


def rows(seed: int, count: int) -> dict[str, np.ndarray]:
    """Samples for `wide`."""
    return {"x": np.random.default_rng(seed).normal(size=(count, SIDE)).astype(np.float32)}


WIDE = Family("wide", (TensorSpec("x", "float32", ("batch", SIDE)),), wide, rows)
NETS = {"mlp": FAMILIES["mlp"], "detector": FAMILIES["detector"], "wide": WIDE}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each bucket, as in a spec")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benches = {name: _bench(Path(folder) / name, family) for name, family in NETS.items()}
        results: dict[str, list[Measurement]] = {name: [] for name in NETS}
        for _ in range(chosen.times):
            for name, (bench, engine) in benches.items():
                terms = LatencyTerms(chosen.seconds, "few")
                results[name].append(_measure(bench, MeasureEngine(engine.blob, bench.golden, engine.shapes, terms)))
            time.sleep(PAUSE_S)
    print("| net | of | median, µs | intervals that hold it | width | busy | job, s |\n|---|---|---|---|---|---|---|")
    for name, reports in results.items():
        for label in ("runtime", "session"):
            print(_row(name, label, reports))


def _bench(folder: Path, family: Family) -> tuple[Bench, BuiltEngine]:
    bench = Bench(folder, family.model(0), family.samples(0, 24), family.inputs, (BATCH,))
    return bench, bench.engine()


@dataclass(frozen=True)
class Measurement:
    """The second bucket of one report, and how many seconds measuring all of it took."""

    bucket: BucketLatency
    took_s: float

    def quantile(self, what: str) -> Quantile | None:
        """The median of the runtime's own call, or of `Session.run`."""
        return self.bucket.runtime if what == "runtime" else self.bucket.middle


def _measure(bench: Bench, measure: MeasureEngine) -> Measurement:
    start_s = time.perf_counter()
    result = run_job(Job("latency", measure, bench.store.uri), bench.room())
    report = read_latency_report(bench.store, result.latency)
    return Measurement(report.buckets[1], time.perf_counter() - start_s)


def _row(name: str, what: str, measured: list[Measurement]) -> str:
    items = [item for entry in measured if (item := entry.quantile(what))]
    median = statistics.median(item.value for item in items)
    covering = sum(item.low <= median <= item.high for item in items)
    width = statistics.median((item.high - item.low) / item.value for item in items)
    busy = sum(bool(entry.bucket.surroundings.busy) for entry in measured)
    took = statistics.median(entry.took_s for entry in measured)
    cells = (name, what, f"{median * 1e6:.1f}", f"{covering} of {len(items)}", f"{width:.1%}", str(busy), f"{took:.2f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
