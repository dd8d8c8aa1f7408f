"""Timing engines, each in processes of its own: nothing else was loaded, and nothing else runs in them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from builders import backends
from builders.digest import canonical_json
from builders.fitting import open_engine
from builders.profiles import Profiling, RunProfile
from builders.types import Backend, BuildRequest, Engine
from pipeline.jobs.blobs import dims_from, fetch, fetched_engine, golden_set, tensors_from
from pipeline.moment import now
from pipeline.registry.store import Store, open_store
from pipeline.values import Json

if TYPE_CHECKING:
    from validation.latency.buckets import Bucket
    from validation.latency.graph_costs import GraphCosts
    from validation.latency.measure import Speed
    from validation.latency.roofs import Roofs

# Runs under the profiler: as many as fit the bucket's time, within these.
FEWEST_PROFILED, MOST_PROFILED = 5, 60


def measure_engine(
    store: str, request: Json, suffix: str, engine: str, golden: str, model: Json, asked: Json, workdir: Path
) -> Json:
    """Latency, memory and anatomy of one engine, put into the store: the digest of the latency report.

    model: inputs and dims of the spec.  asked: seconds (of each bucket), buckets ('few', 'all' or a list of sizes) and
    streams.
    """
    from validation.latency.buckets import tuned_for
    from validation.latency.graph_costs import graph_costs
    from validation.latency.machine import machine
    from validation.latency.measure import FORMAT, Asked, measure_speed

    place = open_store(store)
    wanted = BuildRequest.from_json(request)
    backend = backends.configure(wanted.backend, dict(wanted.options))
    made = fetched_engine(place, wanted, engine, suffix, workdir)
    buckets = _buckets(place, golden, model, asked, workdir)
    imports = backend.load_runtime if isinstance(backend, Profiling) else None
    wanted_runs = Asked(asked["seconds"], asked["streams"])
    speed = measure_speed(partial(open_engine, made), buckets, wanted_runs, workdir, imports)
    dims = dims_from(model["dims"])
    at = next((i for i, bucket in enumerate(buckets) if bucket.sizes == tuned_for(dims)), len(buckets) - 1)
    graph = graph_costs(
        fetch(place, wanted.model, workdir / "graph.onnx"), tensors_from(model["inputs"]), buckets[at].sizes
    )
    parts = _taken_apart(backend, made, graph, (buckets[at], speed, at), asked["seconds"], workdir)
    report = {
        "format": FORMAT,
        "unit": wanted.unit,
        "engine": engine,
        "golden": golden,
        "machine": machine(),
        "created_at": now(),
        "asked": asked,
        "size_bytes": made.size_bytes,
        **speed.to_json(),
        "anatomy": parts,
    }
    return {"latency": place.put_bytes(canonical_json(report))}


def race_engines(store: str, sides: Sequence[Json], golden: str, model: Json, asked: Json, workdir: Path) -> Json:
    """Two engines side by side at one bucket. sides: request, suffix and engine of each.

    asked: seconds, seed and sizes.
    """
    from validation.latency.against import judge, race
    from validation.latency.surroundings import Watch

    place = open_store(store)
    opens = []
    for index, side in enumerate(sides):
        wanted = BuildRequest.from_json(side["request"])
        folder = workdir / str(index)
        folder.mkdir()
        opens.append(partial(open_engine, fetched_engine(place, wanted, side["engine"], side["suffix"], folder)))
    (bucket,) = _buckets(place, golden, model, {"buckets": [asked["sizes"]]}, workdir)
    watch = Watch()
    pairs = race((opens[0], opens[1]), bucket.inputs, asked["seconds"], asked["seed"])
    told = {"bucket": bucket.name, "items": bucket.items, "seed": asked["seed"], "surroundings": watch.stop().to_json()}
    return {**told, **judge(pairs, asked["seed"]).to_json()}


def _buckets(place: Store, golden: str, model: Json, asked: Mapping[str, object], workdir: Path) -> "list[Bucket]":
    """Inputs from the first golden group."""
    from validation.latency.buckets import make_buckets, sizes_of_buckets

    specs, dims = tensors_from(model["inputs"]), dims_from(model["dims"])
    which = asked["buckets"]
    sizes = which if isinstance(which, list) else sizes_of_buckets(dims, which)  # type: ignore[arg-type]
    real = next(golden_set(place, golden, workdir).of_kind("golden")).inputs
    return make_buckets(sizes, specs, real)


def _taken_apart(
    backend: Backend,
    engine: Engine,
    graph: "GraphCosts",
    measured: "tuple[Bucket, Speed, int]",
    seconds: float,
    workdir: Path,
) -> Json:
    from validation.latency.anatomy import anatomy

    bucket, speed, at = measured
    median = speed.buckets[at].runtime_s
    profile = _profile(backend, engine, bucket, round(seconds / 2 / median), workdir)
    roofs = _roofs(backend, profile, graph, seconds, workdir)
    return anatomy(bucket.name, median, graph, profile, roofs).to_json()


def _profile(backend: Backend, engine: Engine, bucket: "Bucket", runs: int, workdir: Path) -> RunProfile | None:
    if not isinstance(backend, Profiling):
        return None
    return backend.profile(engine, bucket.inputs, min(max(runs, FEWEST_PROFILED), MOST_PROFILED), workdir)


def _roofs(
    backend: Backend, profile: RunProfile | None, graph: "GraphCosts", seconds: float, workdir: Path
) -> "Roofs | None":
    """The machine's limits by the engine's own runtime and threads; for ONNX Runtime's engines so far."""
    from builders.onnxruntime import OnnxRuntime, OrtSession
    from validation.latency.anatomy import executed_costs
    from validation.latency.roofs import measure_roofs

    if not isinstance(backend, OnnxRuntime):
        return None
    costs = executed_costs(profile) or graph.costs
    dtypes = {cost.dtype for cost in costs if cost.macs}
    threads = backend.intra_op_threads
    short = min(0.02, seconds / 10)
    return measure_roofs(lambda path: OrtSession(path, optimized=False, threads=threads), workdir, dtypes, short)
