"""Times published engines on this machine: one by itself, or two in turns."""

from dataclasses import dataclass
from typing import Literal

from builders.execution.jobs import Job, Needs
from enginesmith.core.errors import InputError
from enginesmith.core.reports.latency import BucketChoice, LatencyReport, LatencyTerms, PairedBenchmark
from enginesmith.registry.evidence.latencies import read_latency_report
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.keys import engine_limits, model_shapes
from pipeline.compile.steps.latency import BenchmarkPair, MeasureEngine
from pipeline.operations.revalidate import as_built, spec_of


@dataclass(frozen=True)
class ProfileOptions:
    """seconds: of timing for each bucket, or for a whole pair.  buckets: 'few', 'all', or sizes as 'batch=8,length=64'.

    streams: number of concurrent sessions to time too.  seed: of the order of runs in a pair.
    """

    seconds: float = 1.0
    buckets: Literal["few", "all"] | tuple[str, ...] = "few"
    streams: int = 1
    seed: int = 0


def profile_published(chosen: ChosenEngine, options: ProfileOptions, context: RunContext) -> LatencyReport:
    """Time one engine: its latency report. Raises InputError for a bucket that the model does not have."""
    spec = spec_of(chosen.manifest)
    terms = LatencyTerms(options.seconds, _sizes(chosen, options), options.streams)
    engine, golden = as_built(chosen.entry).blob, chosen.manifest.golden
    measure = MeasureEngine(engine, golden, model_shapes(spec), terms)
    name = f"profile {chosen.entry.unit}"
    job = Job(name, measure, context.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    return read_latency_report(context.store, context.run_job(context.local, name, job).latency)


def benchmark_pair(
    first: ChosenEngine, second: ChosenEngine, options: ProfileOptions, context: RunContext
) -> PairedBenchmark:
    """Time two engines in turns, at the last bucket that is given, else at the first's opt sizes: is `first` faster?

    Raises InputError when they do not take the same inputs, or for a bucket that the model does not have.
    """
    takes = [{spec.name: (spec.dtype, len(spec.shape)) for spec in side.entry.inputs} for side in (first, second)]
    if takes[0] != takes[1]:
        raise InputError(f"the first engine takes {takes[0]} and the second {takes[1]}; nothing fits both")
    spec = spec_of(first.manifest)
    sizes = _sizes(first, options)
    at = {dim.name: dim.opt for dim in spec.named_dims()} if isinstance(sizes, str) else sizes[-1]
    engines, golden = [as_built(side.entry).blob for side in (first, second)], first.manifest.golden
    pair = BenchmarkPair(engines[0], engines[1], golden, model_shapes(spec), at, options.seconds, options.seed)
    name = f"benchmark {first.entry.unit}"
    job = Job(name, pair, context.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    return context.run_job(context.local, name, job)


def _sizes(chosen: ChosenEngine, options: ProfileOptions) -> BucketChoice:
    from validation.latency.measurement.buckets import parse_sizes

    if isinstance(options.buckets, str):
        return options.buckets
    return tuple(parse_sizes(text, spec_of(chosen.manifest).named_dims()) for text in options.buckets)
