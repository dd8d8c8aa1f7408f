"""Times published engines on this machine, now: one by itself, or two side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from builders.errors import InputError
from builders.jobs import Job, Needs
from pipeline.canary.engines import Chosen
from pipeline.revalidate import as_built, spec_of
from pipeline.steps.keys import engine_limits
from pipeline.steps.latency import arguments_of
from pipeline.values import Json
from pipeline.workshop import Workshop


@dataclass(frozen=True)
class Asked:
    """seconds: for each bucket.  buckets: 'few', 'all', or sizes as 'batch=8,length=64'.  streams: sessions at once."""

    seconds: float = 1.0
    buckets: str | Sequence[str] = "few"
    streams: int = 1
    seed: int = 0


def profile_published(chosen: Chosen, asked: Asked, shop: Workshop) -> Json:
    """The latency report of one engine, made now. Raises InputError for a bucket that the model does not have."""
    import json

    spec = spec_of(chosen.manifest)
    arguments = arguments_of(as_built(chosen.entry), spec, chosen.manifest.sources["golden"])
    wanted = {"seconds": asked.seconds, "buckets": _sizes(chosen, asked), "streams": asked.streams}
    name = f"profile {chosen.entry.unit}"
    limits = engine_limits(spec, "latency")
    given = {"store": shop.store.uri, **arguments, "asked": wanted}
    job = Job(name, "pipeline.jobs.latency:measure_engine", given, limits, Needs(alone=True))
    report = shop.shown(shop.local, name, job)["latency"]
    return {**chosen.identity, **json.loads(shop.store.read_blob(report))}


def race_published(first: Chosen, second: Chosen, asked: Asked, shop: Workshop) -> Json:
    """Two engines side by side, at one bucket of the first: its largest unless one is given. The first is judged.

    Raises InputError when they do not take the same inputs, or for a bucket that the model does not have.
    """
    takes = [{spec.name: (spec.dtype, len(spec.shape)) for spec in side.entry.inputs} for side in (first, second)]
    if takes[0] != takes[1]:
        raise InputError(f"the first engine takes {takes[0]} and the second {takes[1]}; nothing fits both")
    spec = spec_of(first.manifest)
    sides = [arguments_of(as_built(side.entry), spec, "") for side in (first, second)]
    sizes = _sizes(first, asked)
    at = sizes[-1] if isinstance(sizes, list) else {dim.name: dim.opt for dim in spec.named_dims()}
    arguments = {
        "store": shop.store.uri,
        "sides": [{key: side[key] for key in ("request", "suffix", "engine")} for side in sides],
        "golden": first.manifest.sources["golden"],
        "model": sides[0]["model"],
        "asked": {"seconds": asked.seconds, "seed": asked.seed, "sizes": at},
    }
    name = f"race {first.entry.unit}"
    limits = engine_limits(spec, "latency")
    job = Job(name, "pipeline.jobs.latency:race_engines", arguments, limits, Needs(alone=True))
    found: Json = shop.shown(shop.local, name, job)
    return {"first": first.identity, "second": second.identity, **found}


def _sizes(chosen: Chosen, asked: Asked) -> Any:
    from validation.latency.buckets import parse_sizes

    if isinstance(asked.buckets, str):
        return asked.buckets
    return [parse_sizes(text, spec_of(chosen.manifest).named_dims()) for text in asked.buckets]
