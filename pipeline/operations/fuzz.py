"""Fuzzes one published engine on this machine, with the limits of the spec that it was built from."""

from dataclasses import dataclass
from typing import Any

from builders.execution.jobs import Job
from enginery.registry.build_request import request_of
from pipeline.canary.engines import Chosen
from pipeline.compile.run_context import Workshop
from pipeline.compile.steps.keys import engine_limits, limits_of, model_shapes
from pipeline.operations.jobs.fuzz import FuzzEngine, FuzzTerms
from pipeline.operations.revalidate import spec_of
from pipeline.values import EngineBlob, Json


@dataclass(frozen=True)
class Asked:
    """What to try. cases: random ones, besides the boundaries.  histogram: {dim: {size: count}}.  only: one case."""

    seed: int = 0
    cases: int = 50
    histogram: Any = None
    only: str | None = None


def fuzz_published(chosen: Chosen, asked: Asked, shop: Workshop) -> Json:
    """The report on one engine: every case with its outcome, and the smallest failing ones with their command.

    Raises InputError for a histogram or a case that does not fit the model, StepError for an engine that crashes.
    """
    entry, manifest = chosen.entry, chosen.manifest
    spec, request = spec_of(manifest), request_of(entry)
    registry = shop.store.uri.removeprefix("file://")
    command = ["enginery", "fuzz", f"{manifest.model}@{manifest.version}", "--registry", registry]
    command += ["--target", entry.target, "--precision", entry.precision, "--seed", str(asked.seed)]
    terms = FuzzTerms(asked.seed, asked.cases, tuple(command), asked.histogram, asked.only)
    engine = EngineBlob(request, str(entry.digest), str(entry.suffix))
    limits, shapes = limits_of(spec, request.precision, "engine"), model_shapes(spec)
    fuzz = FuzzEngine(engine, manifest.sources["golden"], shapes, limits, terms)
    name = f"fuzz {entry.unit}"
    job = Job(name, fuzz, shop.store.uri, engine_limits(spec, "proof"))
    report = shop.shown(shop.local, name, job)
    return {**chosen.identity, **report}
