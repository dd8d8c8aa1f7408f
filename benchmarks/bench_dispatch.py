"""What Enginesmith adds to Ray: the time per unit of plan, dispatch and record on builds that compile nothing.

On one local Ray, in one run, for each number of units:

- `enginesmith`: plan the units, build them by `steps.build` on a `RayExecutor`, every engine stored and on record;
- `dispatch`: jobs that do nothing, on the same executor: what is ours of the above, without plan, store and records;
- `bare build`: the same builds (the same function on the worker, engines stored and on record) as bare Ray tasks;
- `bare empty`: Ray tasks that do nothing at all.

Enginesmith runs each job in a process of its own (`isolated`, which the bare tasks are not), or in the worker itself as
those are (`in worker`). Then how much the driver's memory grows with engines of 1 MiB and of 200 MiB.
Usage: python -m benchmarks.bench_dispatch [--isolated 100] [--in-worker 100,1000,10000]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import noop
from builders.execution.jobs import Job, Watch, WorkerContext, ignore_event
from builders.execution.ray import RayExecutor
from enginesmith.core.types import BuildRequest, TensorSpec
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.composition import InProcess
from pipeline.compile.plan import plan_builds
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.engines import BuildEngine, build
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Graph, GraphVariant, OnnxModel, Proof, Unit

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
TENSOR = (TensorSpec("x", "float32", (1, 8)),)


def spec_of(size_mib: int) -> ModelSpec:
    """Ten units."""
    return ModelSpec.model_validate(
        {
            "model": "nothing",
            "source": {"onnx": "nothing.onnx"},
            "inputs": {"x": {"dtype": "float32", "shape": [1, 8]}},
            "targets": TARGETS,
            "backends": {"noop": {"size_mib": size_mib}},
        }
    )


class Rerouted:
    """An executor whose builds know the compiler that compiles nothing."""

    def __init__(self, inner: RayExecutor) -> None:
        self._inner = inner

    def run(self, job: Job[Any], watch: Watch = ignore_event) -> Any:
        return self._inner.run(replace(job, request=noop.BuildNothing(job.request)), watch)

    def cancel(self) -> None:
        self._inner.cancel()


def planned(count: int, store: Store, context: RunContext, size_mib: int = 0) -> list[Unit]:
    """Units of as many models as it takes, each model with a graph of its own."""
    spec, blob = spec_of(size_mib), store.put_bytes(b"nothing")
    export_value = Exported(OnnxModel(blob, TENSOR, TENSOR, 20, carries_qdq=False), blob, Proof())
    units: list[Unit] = []
    for index in range(-(-count // len(TARGETS))):
        graph = Graph(GraphVariant("fp32"), blob, TENSOR, TENSOR, scales=f"{index:064x}")
        units += plan_builds(export_value, [graph], Work(spec, context)).units
    return units[:count]


def ours(count: int, isolated: bool, folder: Path) -> float:
    """Seconds of the whole path."""
    store = open_store(str(folder / "registry"), create=True)
    with RayExecutor(modules=() if isolated else None) as executor:
        context = RunContext(store, executor, Rerouted(executor))
        start_s = time.perf_counter()
        units = planned(count, store, context)
        built_units = InProcess().map(build, units, Work(spec_of(0), context))
        seconds = time.perf_counter() - start_s
    if not all(item.digest for item in built_units):
        raise SystemExit(f"a build failed: {next(item.failure for item in built_units if item.failure)}")
    return seconds


def dispatch(count: int, isolated: bool, _folder: Path) -> float:
    """Seconds of jobs that do nothing."""
    job = Job("nothing", noop.Nothing())
    with RayExecutor(modules=() if isolated else None) as executor:
        start_s = time.perf_counter()
        InProcess().map(lambda _: executor.run(job), range(count))
        return time.perf_counter() - start_s


def bare_build(count: int, _isolated: bool, folder: Path) -> float:
    """Seconds of the same builds as bare Ray tasks; the units are planned beforehand."""
    import ray

    store = open_store(str(folder / "registry"), create=True)
    requests = [unit.request for unit in planned(count, store, RunContext(store, None, None))]

    def one(request: BuildRequest) -> Any:
        with tempfile.TemporaryDirectory() as workdir:
            return noop.BuildNothing(BuildEngine(request)).run(WorkerContext(Path(workdir), store.uri))

    return _timed(ray.remote(num_cpus=1, max_retries=0)(one), requests)


def bare_empty(count: int, _isolated: bool, _folder: Path) -> float:
    """Seconds of as many tasks that do nothing."""
    import ray

    task = ray.remote(num_cpus=1, max_retries=0)(lambda _: None)
    return _timed(task, range(count))


def _timed(task: Any, items: Sequence[Any]) -> float:
    import ray

    start_s = time.perf_counter()
    ray.get([task.remote(item) for item in items])
    return time.perf_counter() - start_s


SIDES: dict[str, Callable[[int, bool, Path], float]] = {
    "enginesmith": ours,
    "dispatch": dispatch,
    "bare build": bare_build,
    "bare empty": bare_empty,
}


def round_of(count: int, isolated: bool) -> dict[str, Any]:
    """Each side once, in turn, in folders of their own: milliseconds per unit, CPU time of the driver, and ratios."""
    per_unit, cpu = {}, {}
    for name, side in SIDES.items():
        start_s = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            per_unit[name] = round(1e3 * side(count, isolated, Path(folder)) / count, 3)
        cpu[name] = round(1e3 * (time.process_time() - start_s) / count, 3)
    ratios = {
        "enginesmith over bare build": round(per_unit["enginesmith"] / per_unit["bare build"], 2),
        "dispatch over bare empty": round(per_unit["dispatch"] / per_unit["bare empty"], 2),
    }
    jobs = "isolated" if isolated else "in worker"
    return {"units": count, "jobs": jobs, "ms_per_unit": per_unit, "driver_cpu_ms": cpu, **ratios}


def driver_mib(size_mib: int, count: int = 8) -> float:
    """How much the driver grows over builds of engines of this size."""
    with tempfile.TemporaryDirectory() as folder, RayExecutor() as executor:
        store = open_store(str(Path(folder) / "registry"), create=True)
        context = RunContext(store, executor, Rerouted(executor))
        InProcess().map(build, planned(2, store, context), Work(spec_of(0), context))
        rss_before = psutil.Process().memory_info().rss
        InProcess().map(build, planned(count, store, context, size_mib), Work(spec_of(size_mib), context))
        return round((psutil.Process().memory_info().rss - rss_before) / 2**20, 1)


def main() -> None:
    """Run every size and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isolated", default="100", help="numbers of units")
    parser.add_argument("--in-worker", default="100,1000,10000", help="numbers of units")
    parser.add_argument("--mib", default="1,200", help="sizes of engines")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)  # for the workers
    noop.install()
    print(json.dumps({"load_before": round(os.getloadavg()[0], 1), "cpus": os.cpu_count()}), flush=True)
    with RayExecutor() as warm_executor:  # one Ray for all sides
        warm_executor.run(Job("warm", noop.Nothing()))
        _timed(_warm(), range(64))
        for counts, is_isolated in ((options.in_worker, False), (options.isolated, True)):
            for count in map(int, filter(None, counts.split(","))):
                print(json.dumps(round_of(count, is_isolated)), flush=True)
        print(
            json.dumps({f"driver_grows_mib_{size}": driver_mib(size) for size in map(int, options.mib.split(","))}),
            flush=True,
        )


def _warm() -> Any:
    import ray

    return ray.remote(lambda _: None)


if __name__ == "__main__":
    main()
