"""Times published engines on this machine, now: one by itself, or two side by side."""

from dataclasses import dataclass
from typing import Literal

from builders.execution.jobs import Job, Needs
from enginery.core.errors import InputError
from pipeline.canary.engines import Chosen
from pipeline.compile.jobs.latency import Buckets, LatencyTerms, MeasureEngine, RaceEngines
from pipeline.compile.run_context import Workshop
from pipeline.compile.steps.keys import engine_limits, model_shapes
from pipeline.operations.revalidate import as_built, spec_of
from pipeline.values import Json


@dataclass(frozen=True)
class Asked:
    """seconds: for each bucket.  buckets: 'few', 'all', or sizes as 'batch=8,length=64'.  streams: sessions at once."""

    seconds: float = 1.0
    buckets: Literal["few", "all"] | tuple[str, ...] = "few"
    streams: int = 1
    seed: int = 0


def profile_published(chosen: Chosen, asked: Asked, shop: Workshop) -> Json:
    """The latency report of one engine, made now. Raises InputError for a bucket that the model does not have."""
    import json

    spec = spec_of(chosen.manifest)
    terms = LatencyTerms(asked.seconds, _sizes(chosen, asked), asked.streams)
    engine, golden = as_built(chosen.entry).blob, chosen.manifest.sources["golden"]
    measure = MeasureEngine(engine, golden, model_shapes(spec), terms)
    name = f"profile {chosen.entry.unit}"
    job = Job(name, measure, shop.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    report = shop.shown(shop.local, name, job).latency
    return {**chosen.identity, **json.loads(shop.store.read_blob(report))}


def race_published(first: Chosen, second: Chosen, asked: Asked, shop: Workshop) -> Json:
    """Two engines side by side, at one bucket of the first: its largest unless one is given. The first is judged.

    Raises InputError when they do not take the same inputs, or for a bucket that the model does not have.
    """
    takes = [{spec.name: (spec.dtype, len(spec.shape)) for spec in side.entry.inputs} for side in (first, second)]
    if takes[0] != takes[1]:
        raise InputError(f"the first engine takes {takes[0]} and the second {takes[1]}; nothing fits both")
    spec = spec_of(first.manifest)
    sizes = _sizes(first, asked)
    at = {dim.name: dim.opt for dim in spec.named_dims()} if isinstance(sizes, str) else sizes[-1]
    engines, golden = [as_built(side.entry).blob for side in (first, second)], first.manifest.sources["golden"]
    race = RaceEngines(engines[0], engines[1], golden, model_shapes(spec), at, asked.seconds, asked.seed)
    name = f"race {first.entry.unit}"
    job = Job(name, race, shop.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    found = shop.shown(shop.local, name, job)
    return {"first": first.identity, "second": second.identity, **found}


def _sizes(chosen: Chosen, asked: Asked) -> Buckets:
    from validation.latency.measurement.buckets import parse_sizes

    if isinstance(asked.buckets, str):
        return asked.buckets
    return tuple(parse_sizes(text, spec_of(chosen.manifest).named_dims()) for text in asked.buckets)
