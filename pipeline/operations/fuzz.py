"""Fuzzes one published engine on this machine, with the limits of the spec that it was built from."""

from collections.abc import Mapping
from dataclasses import dataclass

from builders.execution.jobs import Job
from enginery.registry.manifest import request_of
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.keys import engine_limits, limits_of, model_shapes
from pipeline.operations.jobs.fuzz import FuzzEngine, FuzzTerms
from pipeline.operations.revalidate import spec_of
from pipeline.values import EngineBlob
from validation.fuzz.run import FuzzReport


@dataclass(frozen=True)
class FuzzOptions:
    """What to try. cases: random ones, besides the boundaries.  histogram: {dim: {size: count}}.  only: one case."""

    seed: int = 0
    cases: int = 50
    histogram: Mapping[str, Mapping[int, float]] | None = None
    only: str | None = None


def fuzz_published(chosen: ChosenEngine, options: FuzzOptions, context: RunContext) -> FuzzReport:
    """The report on one engine: every case with its outcome, and the smallest failing ones with their command.

    Raises InputError for a histogram or a case that does not fit the model, StepError for an engine that crashes.
    """
    entry, manifest = chosen.entry, chosen.manifest
    spec, request = spec_of(manifest), request_of(entry)
    registry = context.store.uri.removeprefix("file://")
    command = ["enginery", "fuzz", f"{manifest.model}@{manifest.version}", "--registry", registry]
    command += ["--target", entry.target, "--precision", entry.precision, "--seed", str(options.seed)]
    sizes = {
        dim: {str(size): count for size, count in counts.items()} for dim, counts in (options.histogram or {}).items()
    }
    terms = FuzzTerms(options.seed, options.cases, tuple(command), sizes or None, options.only)
    engine = EngineBlob(request, str(entry.digest), str(entry.suffix))
    limits, shapes = limits_of(spec, request.precision, "engine"), model_shapes(spec)
    fuzz = FuzzEngine(engine, manifest.golden, shapes, limits, terms)
    name = f"fuzz {entry.unit}"
    job = Job(name, fuzz, context.store.uri, engine_limits(spec, "proof"))
    return context.run_job(context.local, name, job)
