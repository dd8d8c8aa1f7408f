"""Keys of steps, and the step that measures latency."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builders.as_built import call_as_built
from builders.backends import discovery
from builders.backends.discovery import open_engine
from builders.backends.optional_methods import PartOpening, Profiling
from builders.execution.jobs import Job, Needs, ProcessLimits, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, canonical_json
from enginesmith.core.hardware.cpu_kinds import why_no_proof
from enginesmith.core.reports.latency import BucketChoice, LatencyReport, LatencyTerms, PairedBenchmark
from enginesmith.core.text import now
from enginesmith.core.types import Engine, Precision
from enginesmith.registry.evidence.latencies import read_latency_report
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.closure.code import Root, backend_root, find_code
from pipeline.compile.run_context import Work, fail_step, versions
from pipeline.compile.steps.blobs import fetch_engine, fetch_graph, golden_set
from pipeline.outcome import JudgedUnit
from pipeline.values import EngineBlob, Exported, Json, ModelShapes
from validation.latency.machine import SystemLoadMonitor, machine
from validation.metrics.tasks.terms import TaskMetric
from validation.plotting import seconds_text

if TYPE_CHECKING:
    from enginesmith.core.reports.breakdown import TimeBreakdown
    from enginesmith.core.reports.latency import BucketLatency
    from pipeline.spec.model import ModelSpec
    from pipeline.spec.validation import Latency
    from validation.latency.measurement.loop import BucketInputs
    from validation.latency.roofline.costs import GraphCosts

# Nearly all of this machine's memory: a runaway step must not take the machine with it.
HOST_MEMORY_MIB = int(0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20
# What makes the first of the two records of an export: another golden set needs no new export.
WRITE_MODEL = ("pipeline.sources.export:write_model", "pipeline.compile.steps.exports:store_model")
# Packages that no code of ours imports: PyTorch's exporter is written in it.
_BEHIND = {"torch": ("onnxscript",)}
_DISTRIBUTIONS = {"google": "protobuf", "onnx_ir": "onnx-ir"}


def code_key(*roots: Root) -> Json:
    """The code part of a step's key: a digest of the code that its request can reach, and the versions of the packages
    that this code imports. The step runs again when either changes; an engine does not, and its build key leaves them
    out.

    roots: the request's class, and what it finds by name at run time (`closure.code.backend_root`).
    """
    closure = find_code(*roots)
    return {"versions": package_versions(*closure.packages), "code": closure.digest}


def package_versions(*packages: str) -> dict[str, str]:
    """Installed versions by distribution, for import names of packages, and for their underlying libraries."""
    backing_packages = [name for package in packages for name in _BEHIND.get(package, ())]
    return versions(*(_DISTRIBUTIONS.get(name, name) for name in (*packages, *backing_packages)))


def step_limits(
    spec: "ModelSpec", step: Literal["export", "calibration", "quantization", "proof", "attribution"]
) -> ProcessLimits:
    """Process limits of a step that works on the model: the spec's time, most of the machine's memory."""
    remedies = f"raise timeouts.{step}_s in the spec", "run it on a machine with more memory"
    return ProcessLimits(getattr(spec.timeouts, f"{step}_s"), HOST_MEMORY_MIB, *remedies)


def engine_limits(spec: "ModelSpec", step: Literal["build", "proof", "latency"]) -> ProcessLimits:
    """Process limits of a step that builds or runs an engine: the spec's time, and build.memory_mib."""
    if step == "build":
        key, timeout_s = "build.timeout_s", spec.build.timeout_s
    else:
        key, timeout_s = f"timeouts.{step}_s", getattr(spec.timeouts, f"{step}_s")
    remedies = f"raise {key} in the spec", "raise build.memory_mib in the spec"
    return ProcessLimits(timeout_s, spec.build.memory_mib, *remedies)


def metrics_of(spec: "ModelSpec", precision: Precision | None = None) -> tuple[TaskMetric, ...]:
    """The spec's task metrics. precision: of the judged graph or engine; None for an export: no metric decides."""
    golden = spec.golden
    return tuple(metric.resolve(precision, golden.labels is not None) for metric in golden.metrics) if golden else ()


def model_shapes(spec: "ModelSpec") -> ModelShapes:
    """Inputs and dims of the model."""
    return ModelShapes(tuple(spec.tensors()), tuple(spec.named_dims()))


def shapes_of(spec: "ModelSpec") -> Json:
    """Inputs, names of outputs, and dims of the model, as JSON."""
    return {**encode(model_shapes(spec)), "outputs": list(spec.outputs) if spec.outputs else None}


# The step that times an engine where it runs: after everything else, one engine at a time, in processes of its own in
# which nothing else was loaded.

# Runs under the profiler: as many as fit the bucket's time, within these.
FEWEST_PROFILED, MOST_PROFILED = 5, 60


@dataclass(frozen=True)
class TimedEngine:
    """The measured latency of an engine. latency: digest of the latency report, as a blob."""

    latency: str


@dataclass(frozen=True)
class MeasureEngine:
    """Measure latency, memory and time breakdown of one engine. golden: digest of the set that the inputs are from."""

    engine: EngineBlob
    golden: str
    shapes: ModelShapes
    terms: LatencyTerms

    def run(self, context: WorkerContext) -> TimedEngine:
        """The report's digest; the report is in the store. Raises EnginesmithError for an engine that cannot be run."""
        from validation.latency.measurement.loop import tuned_for
        from validation.latency.measurement.measure import measure_engine
        from validation.latency.roofline.costs import graph_costs

        store, workdir, terms = open_store(context.store), context.workdir, self.terms
        request = self.engine.request
        backend = discovery.configure(request.backend, dict(request.options))
        engine = fetch_engine(store, self.engine, workdir)
        buckets = bucket_inputs(store, self.golden, self.shapes, terms.buckets, workdir)
        session_opener, imports = partial(open_engine, engine), partial(discovery.load_runtime, backend)
        latency = measure_engine(session_opener, buckets, terms.seconds, imports, terms.streams)
        tuned_sizes = tuned_for(self.shapes.dims)
        tuned_index = next(
            (index for index, bucket in enumerate(buckets) if bucket.sizes == tuned_sizes), len(buckets) - 1
        )
        model = fetch_graph(store, request.model, workdir / "graph.onnx")
        graph = graph_costs(model, self.shapes.inputs, buckets[tuned_index].sizes)
        breakdown = self._break_down(engine, graph, buckets[tuned_index], latency.buckets[tuned_index], workdir)
        report = LatencyReport(
            unit=request.unit,
            engine=self.engine.digest,
            golden=self.golden,
            machine=machine(),
            created_at=now(),
            asked=terms,
            size_bytes=engine.size_bytes,
            anatomy=breakdown,
            **vars(latency),
        )
        return TimedEngine(store.put_bytes(canonical_json(encode(report))))

    def _break_down(
        self, engine: Engine, graph: "GraphCosts", bucket: "BucketInputs", latency: "BucketLatency", workdir: Path
    ) -> "TimeBreakdown":
        """The time breakdown of one bucket's runs, as far as the backend profiles its engines.

        The machine's limits are measured by the engine's own runtime and threads, where that runs ONNX graphs.
        """
        from validation.latency.roofline.breakdown import break_down, executed_costs
        from validation.latency.roofline.costs import measure_roofs

        profile, roofs, seconds = None, None, self.terms.seconds
        backend = discovery.configure(engine.request.backend, dict(engine.request.options))
        if isinstance(backend, Profiling):
            run_count = min(max(round(seconds / 2 / latency.runtime_s), FEWEST_PROFILED), MOST_PROFILED)
            profile = backend.profile(*call_as_built(engine, bucket.inputs), run_count, workdir)
        if isinstance(backend, PartOpening):
            dtypes = {cost.dtype for cost in executed_costs(profile) or graph.costs if cost.macs}
            part_opener = partial(backend.open_part, as_written=True)
            roofs = measure_roofs(part_opener, workdir, dtypes, min(0.02, seconds / 10))
        return break_down(bucket.name, latency.runtime_s, graph, profile, roofs)


@dataclass(frozen=True)
class BenchmarkPair:
    """Time two engines in turns at one bucket. sizes: of the bucket, by dim.  seed: of the order.  golden: digest of
    the set that the inputs are from.  seconds: for both together."""

    first: EngineBlob
    second: EngineBlob
    golden: str
    shapes: ModelShapes
    sizes: Mapping[str, int]
    seconds: float
    seed: int

    def run(self, context: WorkerContext) -> PairedBenchmark:
        """Whether the first is faster, and what else ran on the machine. Raises what opening and running raise."""
        from validation.latency.measurement.paired import compare_times, run_interleaved

        store, session_openers = open_store(context.store), []
        for name, engine in (("first", self.first), ("second", self.second)):
            folder = context.workdir / name
            folder.mkdir()
            session_openers.append(partial(open_engine, fetch_engine(store, engine, folder)))
        (bucket,) = bucket_inputs(store, self.golden, self.shapes, (self.sizes,), context.workdir)
        monitor = SystemLoadMonitor()
        pairs = run_interleaved((session_openers[0], session_openers[1]), bucket.inputs, self.seconds, self.seed)
        load, times = monitor.stop(), compare_times(pairs, self.seed)
        return PairedBenchmark(bucket=bucket.name, items=bucket.items, seed=self.seed, surroundings=load, **vars(times))


def bucket_inputs(
    store: Store, golden: str, shapes: ModelShapes, which: BucketChoice, workdir: Path
) -> "list[BucketInputs]":
    """The inputs of each bucket asked for, made from the first golden group."""
    from validation.latency.measurement.loop import make_buckets, sizes_of_buckets

    sizes = sizes_of_buckets(shapes.dims, which) if isinstance(which, str) else list(which)
    real_inputs = golden_set(store, golden, workdir).real_inputs
    return make_buckets(sizes, shapes.inputs, real_inputs)


def measure(unit: JudgedUnit, export: Exported, work: Work) -> JudgedUnit:
    """The unit with its latency report, where the spec asks for one and the engine runs here and did not fail.

    Raises as `time_engine`.
    """
    latency_terms = work.spec.validation.latency
    if latency_terms is None or unit.built.digest is None or unit.entry.status == "failed":
        return unit
    request = unit.built.unit.request
    backend = discovery.configure(request.backend, dict(request.options))
    if backend.runs(request.target) or why_no_proof(request):
        return unit
    return replace(unit, latency=time_engine(unit.built.blob, latency_terms, export.golden, work))


def time_engine(engine: EngineBlob, latency: "Latency", golden: str, work: Work, afresh: bool = False) -> str | None:
    """Digest of the latency report of an engine on this kind of machine, from the record or measured now.

    None if the engine could not be timed; this does not affect its proof, and no other step stops.
    afresh: measure even if there is a record.  golden: digest of the set that the inputs are from. Raises errors that
    are not about the engine (`stops_run`).
    """
    context = work.context
    name = f"latency {engine.request.unit}"
    measure = MeasureEngine(engine, golden, model_shapes(work.spec), LatencyTerms(latency.seconds, latency.buckets))
    key = {
        **encode(measure),
        "machine": encode(machine()),
        **code_key(MeasureEngine, backend_root(engine.request.backend)),
        **({"at": now()} if afresh else {}),
    }
    job = Job(name, measure, context.store.uri, engine_limits(work.spec, "latency"), Needs(alone=True))
    try:
        return context.once("latency", name, key, job, lambda timed: [timed.latency]).latency
    except EnginesmithError as error:
        fail_step(name, error, context)
        return None


def measure_now(name: str, engine: EngineBlob, golden: str, terms: LatencyTerms, work: Work) -> LatencyReport:
    """The latency report of an engine on this machine, always measured anew and not recorded. name: of the step.
    golden: as in `MeasureEngine`. Raises the errors of opening and running."""
    measure, context = MeasureEngine(engine, golden, model_shapes(work.spec), terms), work.context
    job = Job(name, measure, context.store.uri, engine_limits(work.spec, "latency"), Needs(alone=True))
    return read_latency_report(context.store, context.run_to_end(context.local, name, job).latency)


def time_pair(
    name: str, engines: tuple[EngineBlob, EngineBlob], golden: str, sizes: Mapping[str, int], seconds: float, work: Work
) -> PairedBenchmark:
    """Times of two engines that run in turns on this machine, in one bucket. name: of the step.  golden, sizes,
    seconds: as in `BenchmarkPair`. Raises the errors of opening and running."""
    pair = BenchmarkPair(*engines, golden, model_shapes(work.spec), sizes, seconds, seed=0)
    job = Job(name, pair, work.context.store.uri, engine_limits(work.spec, "latency"), Needs(alone=True))
    context = work.context
    return context.run_to_end(context.local, name, job, lambda pair: " and ".join(map(seconds_text, pair.medians_s)))
