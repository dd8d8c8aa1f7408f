"""Predicted greatest rate of a machine beside that of an open loop: `python -m benchmarks.bench_capacity [MODEL ...]`.

Each model (digits, encoder, minilm) is built for this machine's CPU in fp32 and timed at several batches, as
`enginery profile` does. What `enginery.Batcher` adds to a batch and to a request is timed with a session that answers
at once. From these the greatest rate within a limit of p99 is predicted; it is then measured, with the engine behind
the batcher and arrivals whose times are fixed before, by bisection over the rate. Bar: within 10 %. On a machine with
other load both sides change between the two, and the ratio says nothing.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import enginery
from builders.backends.compatibility import open_engine
from builders.execution.local import LocalExecutor
from enginery.core.names import parse_reference
from enginery.core.types import Session, Tensors
from enginery.registry.manifest import request_of
from enginery.registry.store.base import Store, open_store
from enginery.serving.batcher import Batcher
from pipeline.canary.engines import ChosenEngine, choose
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch_engine, golden_set
from pipeline.operations.latency import ProfileOptions, profile_published
from pipeline.operations.revalidate import spec_of
from pipeline.progress import progress_display
from pipeline.values import EngineBlob
from validation.capacity.batch_times import batch_times
from validation.capacity.greatest_rate import (
    SIMULATIONS,
    GreatestRate,
    LatencyLimit,
    find_greatest_rate,
    poisson_workload,
)
from validation.latency.measurement.buckets import make_buckets
from validation.load.arrivals import BurstTerms, plan_poisson
from validation.load.open_loop import send_open_loop
from validation.traffic.batching import BatchPolicy

EXAMPLES = Path(__file__).parents[1] / "examples"
POLICY, BATCHES = BatchPolicy(8, 0.001), (1, 2, 4, 8)
# Limit of p99, as times of the slowest hundredth of the largest batch's runs; at least this long.
LIMIT_RUNS, LEAST_LIMIT_S = 6.0, 0.005
SECONDS, STEPS = 6.0, 7


@dataclass(frozen=True)
class Overhead:
    """What the batcher adds, in seconds: to each batch, and for each request of it."""

    batch_s: float
    request_s: float


class Instant(Session):
    """A session that answers at once: what is left is the batcher."""

    def __init__(self, session: Session, answer: Tensors) -> None:
        self.inputs, self.outputs, self._answer = session.inputs, session.outputs, answer

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        count = len(inputs[self.inputs[0].name])
        return {name: np.broadcast_to(array[:1], (count, *array.shape[1:])) for name, array in self._answer.items()}


def main() -> None:
    """Build, time, predict, measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["digits", "encoder", "minilm"])
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    print("| model | batcher, µs a batch / a request | limit, ms | predicted, a second | measured | ratio |")
    print("|---|---|---|---|---|---|", flush=True)
    for model in parser.parse_args().models:
        if not (EXAMPLES / model / "weights.safetensors").exists():
            print(f"{model}: no weights; examples/{model}/README.md says where they are from", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(row(model, Path(folder)), flush=True)
    print(f"load average after: {os.getloadavg()[0]:.1f}", file=sys.stderr)


def row(model: str, folder: Path) -> str:
    """The figures of one model."""
    registry = folder / "registry"
    enginery.build(EXAMPLES / model / f"{model}.yaml", registry=str(registry), targets=["cpu"], precisions=["fp32"])
    store = open_store(str(registry))
    chosen = choose(store, parse_reference(model), enginery.Machine.from_name("cpu").target, "fp32")
    with ExitStack() as stack:
        request, sizes = one_request(store, chosen, folder)
        blob = EngineBlob(request_of(chosen.entry), str(chosen.entry.digest), str(chosen.entry.suffix))
        timed = profile(store, chosen, sizes)
        session = stack.enter_context(open_engine(fetch_engine(store, blob, folder)))
        overhead = time_batcher(session, request)
        times = batch_times(timed, "batch", {k: v for k, v in sizes.items() if k != "batch"}, POLICY.most)
        limit = LatencyLimit(max(LEAST_LIMIT_S, LIMIT_RUNS * float(times.curves[-1, 99])))
        works = [poisson_workload(seed) for seed in range(SIMULATIONS)]
        served = times.with_overhead(overhead.batch_s, overhead.request_s)
        predicted = find_greatest_rate(works, [served], limit, [POLICY])
        if predicted is None:
            return f"| {model} | | {1e3 * limit.seconds:.1f} | no rate | | |"
        measured = measure(session, request, limit, predicted)
    rate, low, high = predicted.rate.value, predicted.rate.low, predicted.rate.high
    adds = f"{1e6 * overhead.batch_s:.0f} / {1e6 * overhead.request_s:.0f}"
    told = f"{rate:.0f} ({low:.0f} to {high:.0f})"
    return f"| {model} | {adds} | {1e3 * limit.seconds:.1f} | {told} | {measured:.0f} | {rate / measured:.2f} |"


def one_request(store: Store, chosen: ChosenEngine, folder: Path) -> tuple[Tensors, Mapping[str, int]]:
    """Inputs of one sample, and the sizes of its dims."""
    dims = spec_of(chosen.manifest).named_dims()
    sizes = {dim.name: 1 if dim.name == "batch" else dim.opt for dim in dims}
    real = golden_set(store, chosen.manifest.golden, folder).real_inputs
    return make_buckets([sizes], chosen.entry.inputs, real)[0].inputs, sizes


def profile(store: Store, chosen: ChosenEngine, sizes: Mapping[str, int]) -> tuple:
    """The engine's times at BATCHES."""
    buckets = tuple(",".join(f"{k}={v}" for k, v in {**sizes, "batch": batch}.items()) for batch in BATCHES)
    executor = LocalExecutor()
    with progress_display(True) as progress:
        context = RunContext(store, executor, executor, progress)
        return profile_published(chosen, ProfileOptions(2.0, buckets), context).buckets


def time_batcher(session: Session, request: Tensors, requests: int = 4000) -> Overhead:
    """What the batcher adds, from full queues of single requests and of whole batches. Least of three rounds."""
    instant = Instant(session, session.run(request))
    alone, joined = (
        min(seconds_per_request(instant, request, most, requests) for _ in range(3)) for most in (1, POLICY.most)
    )
    batch_s = max((alone - joined) / (1 - 1 / POLICY.most), 0.0)
    return Overhead(batch_s, max(alone - batch_s, 0.0))


def seconds_per_request(session: Session, request: Tensors, most: int, requests: int) -> float:
    with Batcher(session, most=most, wait_s=0.05) as batcher:
        begun = time.perf_counter()
        for future in [batcher.submit(request) for _ in range(requests)]:
            future.result()
        return (time.perf_counter() - begun) / requests


def measure(session: Session, request: Tensors, limit: LatencyLimit, predicted: GreatestRate) -> float:
    """The greatest rate that keeps the limit, by bisection from half to twice the predicted one."""
    low, high = 0.5 * predicted.rate.value, 2.0 * predicted.rate.value
    for seed in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(session, request, limit, middle, seed) else (low, middle)
    return (low * high) ** 0.5


def keeps(session: Session, request: Tensors, limit: LatencyLimit, rate: float, seed: int) -> bool:
    """Whether the limit is kept at a rate."""
    plan = plan_poisson(rate, SECONDS, BurstTerms(), seed)
    done, all_done = np.full(len(plan), np.inf), threading.Event()
    left = [len(plan)]

    def answered(number: int) -> None:
        done[number] = time.perf_counter()
        left[0] -= 1
        if not left[0]:
            all_done.set()

    with Batcher(session, most=POLICY.most, wait_s=POLICY.wait_s) as batcher:
        sent = send_open_loop(
            lambda number: batcher.submit(request).add_done_callback(lambda _: answered(number)), plan.at
        )
        all_done.wait(2 * SECONDS)
    return float(np.quantile(done - sent.begun - plan.at, limit.p)) <= limit.seconds


if __name__ == "__main__":
    main()
