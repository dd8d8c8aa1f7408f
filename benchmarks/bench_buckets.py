"""Are the chosen buckets the best, what do they save, and does a replay cost what was predicted?

    python -m benchmarks.bench_buckets [--by-cpu] [--requests 2000]

Three seeded traces (`traffic_traces`) against a text encoder (`text_encoder`, ONNX Runtime, one thread):

1. On instances with so few candidates that all partitions can be tried, cost over that of the best: 1.01 at most.
   With a batcher the cost of both is that of the simulation.
2. Cost over that of powers of two: 0.70 at most. One profile and a spec's [64, 128, 256] for comparison.
3. The chosen buckets are written into the spec, its engine is built, and the trace is replayed against it with a
   dynamic batcher (`bucket_replay`): engine time of a request over the predicted one, 0.9 to 1.1.

--by-cpu: CPU time of the one thread, beside that of a fixed run, for a machine that others use.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.bucket_replay import CpuStopwatch, WallStopwatch, pad, replay
from benchmarks.text_encoder import write_encoder
from benchmarks.traffic_traces import TRACES
from builders.backends.discovery import open_engine
from enginesmith.core.reports.latency import BucketLatency, Quantile, SystemLoad
from enginesmith.core.types import Session
from pipeline.compile.steps.blobs import fetch_engine
from pipeline.orchestration.run import RunOptions, open_run
from pipeline.progress import Progress
from pipeline.spec.model import ModelSpec
from pipeline.traffic.buckets import EngineTimer, write_buckets
from pipeline.traffic.choice import MOST_PROFILES, BucketChoice, choose_buckets, search_buckets
from pipeline.traffic.costs import serve_trace
from pipeline.traffic.place import BucketOptions, BucketTask, TrafficAtPlace, plan_task
from pipeline.traffic.request_grid import RunTimes
from validation.latency.measurement.quantiles import curve
from validation.traffic.batching_simulation import BatchPolicy
from validation.traffic.service_times import ServiceTimes
from validation.traffic.trace import Trace

TOP, BATCH, WAIT_S = 256, 8, 0.002
# Share of the time that the engine would be busy without batches and padding.
LOAD = 0.5
# Engine seconds a day of a profile: what `enginesmith traffic buckets` computed for this encoder (compiling and 36
# MiB).
PRICE_S = 128.0
MOST = MOST_PROFILES
COLUMNS = ("trace", "over brute force", "with a batcher", "buckets", "over powers of two", "over one profile",
           "over [64, 128, 256]", "predicted", "replayed", "ratio", "repeated", "powers of two: predicted",
           "replayed")  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-cpu", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing for each size")
    parser.add_argument("--traces", nargs="*", choices=[*TRACES], default=[*TRACES])
    chosen = parser.parse_args()
    clock = "CPU time" if chosen.by_cpu else "wall-clock time"
    print(f"{clock}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the beginning")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        spec = write_encoder(Path(folder), top=TOP, batch=BATCH)
        for name in chosen.traces:
            print(_row(name, spec, chosen.requests, chosen.seconds, chosen.by_cpu), flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def _row(name: str, path: Path, requests: int, seconds: float, by_cpu: bool) -> str:
    with _opened(path) as (spec, timer, session):
        fixed_s = float(np.median([CpuStopwatch(session, 1.0).run_fixed() for _ in range(20)])) if by_cpu else None
        measure = _CpuClock(CpuStopwatch(session, fixed_s), seconds) if fixed_s else _WallClock(timer, seconds)
        task = _task(name, spec, requests, 1.0)
        times = measure(task.first_sizes())
        task = _task(name, spec, requests, LOAD / _mean_s(task, times))
        exact_values = [_over_brute_force(task, times, is_batched) for is_batched in (False, True)]
        choice = choose_buckets(task, times, measure, MOST, PRICE_S)
    (edges,) = choice.edges.values()
    powers = next(plan for plan in choice.plans if plan.name == "powers of two")
    fresh_path = path.with_name("chosen.yaml")
    fresh_path.write_text(path.read_text())
    write_buckets(fresh_path, choice.edges)
    replayed_values = [_replay(fresh_path, task, edges, fixed_s) for _ in range(2)]
    other_value = _replay(path, task, powers.edges["sequence"], fixed_s)
    predicted = choice.plans[0].seconds.value
    cells = [name, *(f"{ratio:.4f}" for ratio in exact_values), f"{len(edges)}: {' '.join(map(str, edges))}"]
    cells += [*_ratios(choice), _ms(predicted), _ms(replayed_values[0]), f"{replayed_values[0] / predicted:.3f}"]
    cells += [f"{replayed_values[1] / predicted:.3f}", _ms(powers.seconds.value), _ms(other_value)]
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _ratios(choice: BucketChoice) -> Iterator[str]:
    """Cost over those of powers of two, one profile and the present buckets, with their intervals."""
    plans = {plan.name: plan for plan in choice.plans}
    for name in ("powers of two", "one profile", "present"):
        saved = plans[name].saved
        yield f"{1 - saved.value:.3f} ({1 - saved.high:.3f} to {1 - saved.low:.3f})" if saved else ""


@contextmanager
def _opened(path: Path) -> Iterator[tuple[ModelSpec, EngineTimer, Session]]:
    """A spec, its fp32 engine, and a session of that."""
    options = RunOptions(registry=str(path.parent / "registry"))
    with open_run(str(path), options, Progress(), keep_state=False) as run, tempfile.TemporaryDirectory() as folder:
        timer = EngineTimer.of_graph(run)
        with open_engine(fetch_engine(run.context.store, timer.engine, Path(folder))) as session:
            yield run.spec, timer, session


def _task(name: str, spec: ModelSpec, requests: int, per_second: float) -> BucketTask:
    trace = TRACES[name](requests, per_second, TOP)
    traffic = TrafficAtPlace(trace, ())
    options = BucketOptions(max_profiles=MOST, batch=BATCH, wait_s=WAIT_S)
    dims = [replace(dim, edges=(64, 128, TOP)) if dim.name == "sequence" else dim for dim in spec.named_dims()]
    return plan_task(spec.tensors(), dims, traffic, trace, options)


def _times(task: BucketTask, known: Sequence[BucketLatency]) -> RunTimes:
    return RunTimes(ServiceTimes.of_buckets(known, ["batch", "sequence"]), task.batch)


def _mean_s(task: BucketTask, known: Sequence[BucketLatency]) -> float:
    """Seconds of a request that runs alone, without padding."""
    table = _times(task, known).table(task.grid.edges, 1)[:, 0]
    return float(table[task.grid.places[:, 0]].mean())


def _over_brute_force(task: BucketTask, known: Sequence[BucketLatency], batched: bool) -> float:
    """Cost over the least of all partitions of a small instance: nine candidates, 500 requests."""
    grid, times = task.grid, _times(task, known)
    edges = np.unique(np.quantile(grid.edges[0], np.linspace(0, 1, 10)[1:], method="higher"))
    few_array = np.linspace(0, len(grid) - 1, 500).astype(int)
    small_grid = replace(
        grid,
        edges=(edges,),
        places=np.searchsorted(edges, grid.sizes[few_array]),
        sizes=grid.sizes[few_array],
        samples=grid.samples[few_array],
        at=np.asarray(grid.at)[: len(few_array)],
    )
    policy = task.policy if batched else None
    instance = replace(task, grid=small_grid, policy=policy)
    price = PRICE_S * small_grid.seconds / 86400
    _, served_trace = search_buckets(instance, times, MOST, price)
    costs = []
    for count in range(len(edges)):
        for inner_combination in itertools.combinations(edges[:-1].tolist(), count):
            plan = serve_trace(small_grid, {"sequence": (*inner_combination, int(edges[-1]))}, times, policy)
            costs.append(float(plan.seconds.sum()) + price * plan.profiles)
    return (float(served_trace.seconds.sum()) + price * served_trace.profiles) / min(costs)


def _replay(path: Path, task: BucketTask, edges: Sequence[int], fixed_s: float | None) -> float:
    """Engine seconds of a request in a replay against the engine that is built of a spec."""
    policy = task.policy or BatchPolicy()
    trace = Trace(np.asarray(task.grid.at), {"sequence": task.grid.sizes[:, 0]})
    with _opened(path) as (_, _, session):
        for edge in edges:
            session.run(pad(np.full(policy.most, edge), edge))
        stopwatch = CpuStopwatch(session, fixed_s) if fixed_s else WallStopwatch(session)
        return replay(trace, edges, policy, stopwatch).seconds


class _WallClock:
    """Times an engine as the command does: in processes of its own."""

    def __init__(self, timer: EngineTimer, seconds: float) -> None:
        self._timer, self._seconds = timer, seconds

    def __call__(self, sizes: Sequence[Mapping[str, int]]) -> Sequence[BucketLatency]:
        return self._timer.measure(sizes, self._seconds).buckets


class _CpuClock:
    """Times a session by its CPU time, in five passes over all sizes."""

    def __init__(self, stopwatch: CpuStopwatch, seconds: float) -> None:
        self._stopwatch, self._seconds = stopwatch, seconds

    def __call__(self, sizes: Sequence[Mapping[str, int]]) -> Sequence[BucketLatency]:
        passes = [[self._series(size) for size in sizes] for _ in range(5)]
        return [self._latency(size, [passe[index] for passe in passes]) for index, size in enumerate(sizes)]

    def _series(self, sizes: Mapping[str, int]) -> list[float]:
        inputs = pad(np.full(sizes["batch"], sizes["sequence"]), sizes["sequence"])
        self._stopwatch.time(inputs)
        durations, deadline_s = list[float](), time.thread_time() + self._seconds / 5
        while time.thread_time() < deadline_s or len(durations) < 3:
            durations.append(self._stopwatch.time(inputs))
        return durations

    @staticmethod
    def _latency(sizes: Mapping[str, int], series: Sequence[Sequence[float]]) -> BucketLatency:
        runs = np.concatenate(series)
        medians = tuple(float(np.median(sample)) for sample in series)
        return BucketLatency(
            name=" ".join(f"{dim}={size}" for dim, size in sizes.items()),
            sizes=dict(sizes),
            items=sizes["batch"],
            first_s=0.0,
            runs=len(runs),
            discarded=0,
            steady=True,
            mean_s=float(runs.mean()),
            quantiles=(Quantile(0.5, float(np.median(medians)), None, None, 0.0, 0),),
            curve=curve(runs),
            memory_bytes=0,
            surroundings=SystemLoad(1.0, None, None, None, 0.0, None, 1),
            process_medians_s=medians,
        )


if __name__ == "__main__":
    main()
