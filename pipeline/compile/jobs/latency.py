"""Timing engines, each in processes of its own: nothing else was loaded, and nothing else runs in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from builders.backends.fitting import open_engine
from builders.backends.run_profiles import Profiling, RunProfile
from builders.execution.jobs import WorkerContext
from enginery.core.codec import encode
from enginery.core.digest import canonical_json
from enginery.core.moment import now
from enginery.core.types import Backend, Engine
from enginery.registry.store.base import Store, open_store
from pipeline.compile.jobs.blobs import fetch, fetch_engine, golden_set
from pipeline.values import EngineBlob, Json, ModelShapes

if TYPE_CHECKING:
    from validation.latency.measurement.buckets import Bucket
    from validation.latency.measurement.measure import Speed
    from validation.latency.roofline.graph_costs import GraphCosts
    from validation.latency.roofline.roofs import Roofs

# Runs under the profiler: as many as fit the bucket's time, within these.
FEWEST_PROFILED, MOST_PROFILED = 5, 60
# A size of each dim.
Sizes = Mapping[str, int]
Buckets = Literal["few", "all"] | tuple[Sizes, ...]


@dataclass(frozen=True)
class LatencyTerms:
    """How an engine is timed. seconds: for each bucket.  buckets: 'few', 'all', or the sizes of each.

    streams: sessions at once.
    """

    seconds: float
    buckets: Buckets
    streams: int = 1


@dataclass(frozen=True)
class TimedEngine:
    """latency: digest of the latency report, as a blob."""

    latency: str


@dataclass(frozen=True)
class MeasureEngine:
    """Measure latency, memory and time breakdown of one engine. golden: digest of the set that the inputs are from."""

    engine: EngineBlob
    golden: str
    shapes: ModelShapes
    terms: LatencyTerms

    def run(self, context: WorkerContext) -> TimedEngine:
        """The report, in the store."""
        from validation.latency.machine import machine
        from validation.latency.measurement.buckets import tuned_for
        from validation.latency.measurement.measure import FORMAT, Asked, measure_speed
        from validation.latency.roofline.graph_costs import graph_costs

        place, workdir, terms = open_store(context.store), context.workdir, self.terms
        wanted = self.engine.request
        backend = discovery.configure(wanted.backend, dict(wanted.options))
        made = fetch_engine(place, self.engine, workdir)
        buckets = _buckets(place, self.golden, self.shapes, terms.buckets, workdir)
        imports = backend.load_runtime if isinstance(backend, Profiling) else None
        wanted_runs = Asked(terms.seconds, terms.streams)
        speed = measure_speed(partial(open_engine, made), buckets, wanted_runs, workdir, imports)
        tuned = tuned_for(self.shapes.dims)
        at = next((i for i, bucket in enumerate(buckets) if bucket.sizes == tuned), len(buckets) - 1)
        model = fetch(place, wanted.model, workdir / "graph.onnx")
        graph = graph_costs(model, self.shapes.inputs, buckets[at].sizes)
        parts = _taken_apart(backend, made, graph, (buckets[at], speed, at), terms.seconds, workdir)
        report = {
            "format": FORMAT,
            "unit": wanted.unit,
            "engine": self.engine.digest,
            "golden": self.golden,
            "machine": machine(),
            "created_at": now(),
            "asked": encode(terms),
            "size_bytes": made.size_bytes,
            **speed.to_json(),
            "anatomy": parts,
        }
        return TimedEngine(place.put_bytes(canonical_json(report)))


@dataclass(frozen=True)
class RaceEngines:
    """Time two engines in turns at one bucket. sizes: of the bucket, by dim.  seed: of the order."""

    first: EngineBlob
    second: EngineBlob
    golden: str
    shapes: ModelShapes
    sizes: Sizes
    seconds: float
    seed: int

    def run(self, context: WorkerContext) -> Json:
        """The bucket, what else ran on the machine, and `validation.latency.measurement.paired.Judgement` as JSON."""
        from validation.latency.measurement.paired import judge, race
        from validation.latency.measurement.system_load import Watch

        place, opens = open_store(context.store), []
        for name, side in (("first", self.first), ("second", self.second)):
            folder = context.workdir / name
            folder.mkdir()
            opens.append(partial(open_engine, fetch_engine(place, side, folder)))
        (bucket,) = _buckets(place, self.golden, self.shapes, (self.sizes,), context.workdir)
        watch = Watch()
        pairs = race((opens[0], opens[1]), bucket.inputs, self.seconds, self.seed)
        load = watch.stop().to_json()
        told = {"bucket": bucket.name, "items": bucket.items, "seed": self.seed, "surroundings": load}
        return {**told, **judge(pairs, self.seed).to_json()}


def _buckets(place: Store, golden: str, shapes: ModelShapes, which: Buckets, workdir: Path) -> "list[Bucket]":
    """Inputs from the first golden group."""
    from validation.latency.measurement.buckets import make_buckets, sizes_of_buckets

    sizes = sizes_of_buckets(shapes.dims, which) if isinstance(which, str) else list(which)
    real = next(golden_set(place, golden, workdir).of_kind("golden")).inputs
    return make_buckets(sizes, shapes.inputs, real)


def _taken_apart(
    backend: Backend,
    engine: Engine,
    graph: "GraphCosts",
    measured: "tuple[Bucket, Speed, int]",
    seconds: float,
    workdir: Path,
) -> Json:
    from validation.latency.roofline.time_breakdown import anatomy

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
    from builders.backends.onnxruntime import OnnxRuntime, OrtSession
    from validation.latency.roofline.roofs import measure_roofs
    from validation.latency.roofline.time_breakdown import executed_costs

    if not isinstance(backend, OnnxRuntime):
        return None
    costs = executed_costs(profile) or graph.costs
    dtypes = {cost.dtype for cost in costs if cost.macs}
    threads = backend.intra_op_threads
    short = min(0.02, seconds / 10)
    return measure_roofs(lambda path: OrtSession(path, optimized=False, threads=threads), workdir, dtypes, short)
