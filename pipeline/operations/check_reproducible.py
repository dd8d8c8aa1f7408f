"""Rebuilds an engine and compares it; times an engine of a version."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from builders.as_built import build_engine
from builders.backends import discovery
from builders.backends.discovery import open_engine
from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.errors import InputError
from enginesmith.core.reports.latency import BucketChoice, LatencyReport, LatencyTerms, PairedBenchmark
from enginesmith.core.types import BuildRequest
from enginesmith.registry.manifest import request_of
from enginesmith.registry.store.base import open_store
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.blobs import fetch, fetch_graph, golden_set
from pipeline.compile.steps.keys import engine_limits, measure_now, time_pair
from pipeline.operations.validate import spec_of
from pipeline.outcome import engine_of
from pipeline.progress.events import Finished

if TYPE_CHECKING:
    from validation.contracts.repeats import Reproducibility

# Cases of each kind that a rebuild is run on: enough to see that it has other kernels.
MOST_CASES = 8


@dataclass(frozen=True)
class RebuildEngine:
    """Build an engine again and run it on golden cases; the registry is not changed.

    golden: digest of the golden set.  answers: the file that the answers are written to.
    """

    request: BuildRequest
    golden: str
    answers: Path

    def run(self, context: WorkerContext) -> str:
        """The digest of the rebuilt engine.

        Raises what the backend raises, and InputError where its versions are not those that the engine was built with.
        """
        from validation.comparison.sessions import run
        from validation.golden.golden_set import GoldenSet

        store, workdir = open_store(context.store), context.workdir
        backend = discovery.configure(self.request.backend, dict(self.request.options))
        discovery.check_toolchain(backend, self.request)
        golden_cases = golden_set(store, self.golden, workdir)
        model = fetch_graph(store, self.request.model, workdir / "model.onnx")
        with open_engine(engine := build_engine(backend, self.request, model, workdir)) as session:
            cases = [case for kind in ("golden", "edge") for case in islice(golden_cases.of_kind(kind), MOST_CASES)]
            answer_cases = [replace(case, inputs={}, expected=run(session, case.inputs)) for case in cases]
        GoldenSet(answer_cases).save(self.answers)
        return engine.digest


def check_reproducible(choice: ChosenEngine, times: int, context: RunContext) -> "Reproducibility":
    """Build an engine `times` times on this machine, one process after the other: how far the builds differ.

    Raises StepError for a build that crashes, and what the backend raises for one that fails.
    """
    from validation.contracts.repeats import EngineRebuild, reproducibility
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import budgets

    entry, manifest = choice.entry, choice.manifest
    spec, request = spec_of(manifest), request_of(entry)
    limits = engine_limits(spec, "build")
    with TemporaryDirectory(prefix="enginesmith-rebuild-") as folder:
        noise = GoldenSet.load(fetch(context.store, manifest.golden, Path(folder) / "golden")).noise
        rebuilds = []
        for index in range(times):
            name, out_path = f"rebuild {index + 1} of {entry.unit}", Path(folder) / f"answers {index}"
            job = Job(name, RebuildEngine(request, manifest.golden, out_path), context.store.uri, limits)
            rebuilds.append(EngineRebuild(context.run_job(context.local, name, job), GoldenSet.load(out_path)))
            context.progress.emit(Finished(name, words=rebuilds[-1].engine[:12]))
        drift_limits = spec.validation.limits_for(request.precision, "engine")
        budget = budgets("engine", request.precision, noise).override(drift_limits)
        return reproducibility(rebuilds, budget)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of timing. seconds: of timing for each bucket, or for a whole pair.  buckets: 'few', 'all',
    or sizes as 'batch=8,length=64'.

    streams: number of concurrent sessions to time too.
    """

    seconds: float = 1.0
    buckets: Literal["few", "all"] | tuple[str, ...] = "few"
    streams: int = 1


def profile_published(choice: ChosenEngine, options: ProfileOptions, context: RunContext) -> LatencyReport:
    """Time one engine: its latency report. Raises InputError for a bucket that the model does not have."""
    terms = LatencyTerms(options.seconds, _sizes(choice, options), options.streams)
    name, work = f"profile {choice.entry.unit}", Work(spec_of(choice.manifest), context)
    return measure_now(name, engine_of(choice.entry), choice.manifest.golden, terms, work)


def benchmark_pair(
    engine: ChosenEngine, baseline: ChosenEngine, options: ProfileOptions, context: RunContext
) -> PairedBenchmark:
    """Time two engines in turns, at the last bucket that is given, else at the first's opt sizes: is `engine` faster?

    Raises InputError when they do not take the same inputs, or for a bucket that the model does not have.
    """
    inputs = [{spec.name: (spec.dtype, len(spec.shape)) for spec in side.entry.inputs} for side in (engine, baseline)]
    if inputs[0] != inputs[1]:
        raise InputError(f"the first engine takes {inputs[0]} and the second {inputs[1]}; nothing fits both")
    spec = spec_of(engine.manifest)
    sizes = _sizes(engine, options)
    bucket = {dim.name: dim.opt for dim in spec.named_dims()} if isinstance(sizes, str) else sizes[-1]
    engines, work = (engine_of(engine.entry), engine_of(baseline.entry)), Work(spec, context)
    return time_pair(f"benchmark {engine.entry.unit}", engines, engine.manifest.golden, bucket, options.seconds, work)


def _sizes(choice: ChosenEngine, options: ProfileOptions) -> BucketChoice:
    from validation.latency.measurement.loop import parse_sizes

    if isinstance(options.buckets, str):
        return options.buckets
    return tuple(parse_sizes(text, spec_of(choice.manifest).named_dims()) for text in options.buckets)
