"""Predicted greatest rate of a machine beside that of an open loop: `python -m benchmarks.bench_capacity [MODEL ...]`.

Each model (digits, encoder, minilm) is built for this machine's CPU in fp32 and timed at several batches, as
`enginesmith profile` does; its engine runs in one thread, as the generator needs a core of its own. From these times
the greatest rate within a limit of p99 is predicted, and then measured by bisection over the rate, with arrivals whose
times are fixed before, against the engine, which one thread feeds by the policy of the batcher (bar: within 10 %).

A machine whose speed changes between the two (here by up to 1.5, with the load of its host) is at fault for a part of
the ratio: `of then` is the ratio of a second prediction, whose times are scaled by how long full batches took while the
rate was measured.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import enginesmith
from builders.backends.discovery import open_engine
from builders.execution.local import LocalExecutor
from enginesmith.arrays import Array
from enginesmith.core.names import parse_reference
from enginesmith.core.reports.latency import BucketLatency
from enginesmith.core.types import Session, Tensors
from enginesmith.registry.manifest import request_of
from enginesmith.registry.store.base import Store, open_store
from pipeline.canary.engines import ChosenEngine, choose
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch_engine, golden_set
from pipeline.operations.check_reproducible import ProfileOptions, profile_published
from pipeline.operations.validate import spec_of
from pipeline.progress import progress_display
from pipeline.values import EngineBlob
from validation.capacity.greatest_rate import (
    SIMULATIONS,
    BatchTimes,
    Estimate,
    LatencyLimit,
    batch_times,
    find_greatest_rate,
    poisson_workload,
)
from validation.latency.measurement.loop import make_buckets
from validation.traffic.batching_simulation import BatchPolicy

EXAMPLES = Path(__file__).parents[1] / "examples"
POLICY, BATCHES = BatchPolicy(8, 0.001), (1, 2, 4, 8)
# Limit of p99, as times of the slowest hundredth of the largest batch's runs; at least this long.
LIMIT_RUNS, LEAST_LIMIT_S = 4.0, 0.005
# Length of a measurement, as times of the limit: in a short one a queue could grow all the time and still keep it.
LIMITS = 40.0
STEPS, SEQUENCE = 6, 32
# Says whether a limit is kept by requests at these times.
Keeps = Callable[[Array], bool]


def main() -> None:
    """Build, time, predict, measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["digits", "encoder", "minilm"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a measurement, at least")
    options = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    print("| model | limit, ms | predicted, a second | measured | ratio | of then |")
    print("|---|---|---|---|---|---|", flush=True)
    for model in options.models:
        if not (EXAMPLES / model / "weights.safetensors").exists():
            print(f"{model}: no weights; examples/{model}/README.md says where they are from", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(row(model, Path(folder), options.seconds), flush=True)
    print(f"load average after: {os.getloadavg()[0]:.1f}", file=sys.stderr)


def row(model: str, folder: Path, seconds: float) -> str:
    """The figures of one model."""
    registry = folder / "registry"
    enginesmith.build(one_thread(model, folder), registry=str(registry), targets=["cpu"], precisions=["fp32"])
    store = open_store(str(registry))
    chosen = choose(store, parse_reference(model), enginesmith.Machine.from_name("cpu").target, "fp32")
    request, sizes = one_request(store, chosen, folder)
    blob = EngineBlob(request_of(chosen.entry), str(chosen.entry.digest), str(chosen.entry.suffix))
    engine = fetch_engine(store, blob, folder)
    other_sizes = {name: size for name, size in sizes.items() if name != "batch"}
    times = batch_times(profile(store, chosen, sizes), "batch", other_sizes, POLICY.most)
    limit = LatencyLimit(max(LEAST_LIMIT_S, LIMIT_RUNS * float(times.curves[-1, 99])))
    if math.isnan(predict(times, limit).value):
        return f"| {model} | {1e3 * limit.seconds:.1f} | no rate keeps the limit: this machine is too busy | | | |"
    with open_engine(engine) as session:
        batches = [repeated(request, count) for count in range(1, POLICY.most + 1)]
        durations_s: list[float] = []
        rate, measured = compare(
            times, limit, seconds, lambda arrivals: keeps_alone(session, batches, limit, arrivals, durations_s)
        )
    slower_value = float(np.median(durations_s)) / float(np.median(times.curves[-1]))
    prediction = predict(BatchTimes(times.curves * slower_value, times.half), limit)
    return f"| {model} | {1e3 * limit.seconds:.1f} | {cells(rate, measured)} | {prediction.value / measured:.2f} |"


def predict(times: BatchTimes, limit: LatencyLimit) -> Estimate:
    """The greatest rate by simulation."""
    rate = find_greatest_rate([poisson_workload(seed) for seed in range(SIMULATIONS)], [times], limit, [POLICY])
    return rate.rate if rate else Estimate(math.nan, math.nan, math.nan)


def compare(times: BatchTimes, limit: LatencyLimit, least_s: float, keeps: Keeps) -> tuple[Estimate, float]:
    """The predicted greatest rate, and the measured one."""
    rate = predict(times, limit)
    low, high = 0.5 * rate.value, 1.5 * rate.value
    seconds = max(least_s, LIMITS * limit.seconds)
    for seed in range(STEPS):
        middle_low = (low * high) ** 0.5
        is_kept = keeps(poisson_arrivals(middle_low, seconds, seed))
        low, high = (middle_low, high) if is_kept else (low, middle_low)
    return rate, (low * high) ** 0.5


def poisson_arrivals(rate: float, seconds: float, seed: int) -> Array:
    """Times of arrival in seconds, all fixed before the first, float64 [requests], rising."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.random(rng.poisson(rate * seconds))) * seconds


def cells(rate: Estimate, measured: float) -> str:
    """Cells of the table: a prediction, what was measured, their ratio."""
    return f"{rate.value:.0f} ({rate.low:.0f} to {rate.high:.0f}) | {measured:.0f} | {rate.value / measured:.2f}"


def one_thread(model: str, folder: Path) -> Path:
    """A spec whose engines run in one thread: on two cores the other one is the generator's."""
    copy = shutil.copytree(EXAMPLES / model, folder / model)
    spec = copy / f"{model}.yaml"
    spec.write_text(spec.read_text() + "\nbackends: {onnxruntime: {intra_op_threads: 1}}\n")
    return spec


def one_request(store: Store, chosen: ChosenEngine, folder: Path) -> tuple[Tensors, Mapping[str, int]]:
    """Inputs of one sample, and the sizes of its dims."""
    dims = spec_of(chosen.manifest).named_dims()
    sizes = {dim.name: 1 if dim.name == "batch" else SEQUENCE for dim in dims}
    real_inputs = golden_set(store, chosen.manifest.golden, folder).real_inputs
    return make_buckets([sizes], chosen.entry.inputs, real_inputs)[0].inputs, sizes


def profile(store: Store, chosen: ChosenEngine, sizes: Mapping[str, int]) -> tuple[BucketLatency, ...]:
    """The engine's times at BATCHES."""
    buckets = tuple(",".join(f"{k}={v}" for k, v in {**sizes, "batch": batch}.items()) for batch in BATCHES)
    executor = LocalExecutor()
    with progress_display(True) as progress:
        context = RunContext(store, executor, executor, progress)
        return profile_published(chosen, ProfileOptions(2.0, buckets), context).buckets


def repeated(request: Tensors, count: int) -> Tensors:
    """A batch of `count` such requests."""
    return {name: np.repeat(array, count, 0) for name, array in request.items()}


def keeps_alone(
    session: Session, batches: Sequence[Tensors], limit: LatencyLimit, arrivals: Array, took: list[float]
) -> bool:
    """Whether the limit is kept by an engine that one thread feeds, by the policy of the batcher. took: gets the
    seconds of each full batch."""
    times_s, latencies, first_end = arrivals.tolist(), np.zeros(len(arrivals)), 0
    start_s = time.perf_counter()
    while first_end < len(times_s):
        full_arrival = times_s[first_end + POLICY.most - 1] if first_end + POLICY.most <= len(times_s) else math.inf
        ready_arrival = min(times_s[first_end] + POLICY.wait_s, full_arrival)
        while (elapsed_s := time.perf_counter() - start_s) < ready_arrival:
            pass
        end = min(first_end + POLICY.most, bisect_right(times_s, elapsed_s, first_end))
        session.run(batches[end - first_end - 1])
        done = time.perf_counter() - start_s
        if end - first_end == POLICY.most:
            took.append(done - elapsed_s)
        latencies[first_end:end] = done - arrivals[first_end:end]
        first_end = end
    return float(np.quantile(latencies, limit.p)) <= limit.seconds


if __name__ == "__main__":
    main()
