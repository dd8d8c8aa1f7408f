"""Builds a model with every backend that can, proves and times what runs here, and puts the engines side by side.

The steps are those of a build, with its records: what was built, proven or timed before is not again. Nothing is
published and no channel moves. Only the duels are run anew: they are what the recommendation rests on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from builders.backends import discovery as backends
from builders.execution.jobs import Job, Needs
from enginery.core.codec import encode
from enginery.core.errors import EngineryError, InputError, StepError, UnavailableError
from enginery.core.moment import now
from enginery.core.types import BuildRequest, Precision, Target
from pipeline.compile import steps
from pipeline.compile.closure.code import backend_root
from pipeline.compile.composition import Prepared, Runner, prepare
from pipeline.compile.jobs.latency import RaceEngines
from pipeline.compile.jobs.shapes import ProbeShapes
from pipeline.compile.plan import Selection
from pipeline.compile.run_context import Workshop
from pipeline.compile.steps.keys import code_key, engine_limits, model_shapes
from pipeline.compile.steps.latency import time_engine
from pipeline.compile.verdict import Judged
from pipeline.operations.compare.facts import Duel, Facts, Shapes, fastest, ranked_alike
from pipeline.operations.compare.recommend import recommend
from pipeline.progress.events import Finished
from pipeline.spec.limits import Latency
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Json, Unit
from validation.latency.machine import machine

# Decibels: beyond what a float32 tells apart, an output is a copy.
MOST_DB = 200.0
# An engine whose times, alone, were all slower than so many times the fastest one's is not run against it.
FAR = 2.0
# The fastest of the times that each had alone may lose its duels; then the winner is run against the others, so often.
ROUNDS = 2


@dataclass(frozen=True)
class Asked:
    """target: the only one.  backends, precisions: empty means all that are installed, all of the spec.  seconds: for
    each bucket, and for each duel ten times as long; seed: of the order in duels."""

    target: Target
    backends: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    seconds: float = 0.2
    seed: int = 0


def widened(spec: ModelSpec, asked: Asked) -> ModelSpec:
    """The spec for the one target, with every backend that is asked for; the spec's own keep their options.

    Raises InputError where none of them is for this target, UnknownNameError for one that is not known.
    """
    names = asked.backends or tuple(name for name in backends.names() if backends.configure(name, {}).versions())
    chosen = {name: spec.backends.get(name, {}) for name in names}
    serving = {
        name: options for name, options in chosen.items() if backends.configure(name, options).serves(asked.target)
    }
    if not serving:
        raise InputError(
            f"none of {', '.join(names)} builds for {asked.target.name}; `enginery backends` says what does"
        )
    return spec.model_copy(update={"backends": serving, "targets": (asked.target.name,)})


def compare(spec: ModelSpec, asked: Asked, shop: Workshop, run: Runner) -> Json:
    """The comparison as a JSON object: engines, duels, recommendation.

    Raises what exporting and quantizing raise; an engine that is refused or fails is one of the engines.
    """
    wide = widened(spec, asked)
    ready = prepare(wide, Selection(precisions=asked.precisions), shop, run)
    built = run.map(steps.build, ready.plan.wanted, wide, shop)
    judged = run.map(steps.validate, built, wide, ready.exported, shop)
    fleet = tuple(dict.fromkeys((*(target.name for target in spec.target_list()), asked.target.name)))
    facts = ranked_alike([_measured(item, wide, ready, asked, fleet, shop) for item in judged])
    facts += [_refused(unit) for unit in ready.plan.refused]
    by_unit = {item.built.unit.name: item for item in judged}
    duels = _duels(facts, by_unit, wide, ready.exported, asked, shop)
    return {
        "model": spec.model,
        "target": asked.target.name,
        "bucket": bucket_name(wide),
        "fleet": list(fleet),
        "machine": machine(),
        "created_at": now(),
        "original": dict(ready.exported.proof.metrics),
        "engines": [item.to_json() for item in facts],
        "duels": [duel.to_json() for duel in duels],
        "recommendation": recommend(facts, duels, fleet).to_json(),
    }


def bucket_name(spec: ModelSpec) -> str:
    """The sizes that engines are compared at: what the dims are tuned for."""
    return " ".join(f"{dim.name}={dim.opt}" for dim in spec.named_dims()) or "static"


def _refused(unit: Unit) -> Facts:
    return Facts(unit.name, unit.request.backend, unit.request.precision, "refused", unit.reason)


def _measured(
    item: Judged, spec: ModelSpec, ready: Prepared, asked: Asked, fleet: Sequence[str], shop: Workshop
) -> Facts:
    request, built = item.built.unit.request, item.built
    verdict: Any = item.verdict
    known = Facts(
        unit=request.unit,
        backend=request.backend,
        precision=request.precision,
        status=verdict,
        reason="" if verdict == "proven" else item.reason,
        size_bytes=built.size_bytes or None,
        build_s=built.seconds if built.digest else None,
        sqnr_db=_least_sqnr(item),
        metrics=dict(item.metrics),
        covers=covered(request, spec, fleet),
        notes=built.notes,
    )
    if verdict != "proven":
        return known
    latency = Latency(seconds=asked.seconds, buckets="few")
    report = time_engine(built, spec, latency, ready.exported.golden, shop)
    if report is None:
        return replace(known, reason="it could not be timed")
    found = json.loads(shop.store.read_blob(report))
    return replace(known, **_times(found, spec), shapes=_shapes(item, spec, ready.exported, shop))


def _times(report: Json, spec: ModelSpec) -> Json:
    bucket = next((item for item in report["buckets"] if item["name"] == bucket_name(spec)), report["buckets"][-1])
    middle = next((item for item in bucket["quantiles"] if item["p"] == 0.5 and item["value"] is not None), None)
    own = bucket["runtime"]
    return {
        "median_s": bucket["median_s"],
        "low_s": middle and middle["low"],
        "high_s": middle and middle["high"],
        "session_s": bucket["median_s"],
        "runtime": own and own["value"] and {"median_s": own["value"], "low_s": own["low"], "high_s": own["high"]},
        "items_per_s": bucket["items_per_s"],
        "load_s": report["load_s"] + (report["import_s"] or 0.0),
        "memory_bytes": bucket["memory_bytes"],
        "busy": tuple(bucket["surroundings"]["busy"]),
    }


def _least_sqnr(item: Judged) -> float | None:
    checks = item.report.checks if item.report else ()
    values = [
        min(check.value, MOST_DB)
        for check in checks
        if check.name == "sqnr_db" and check.joint in ("quantization", "engine") and check.value is not None
    ]
    return min(values, default=None)


def covered(request: BuildRequest, spec: ModelSpec, fleet: Sequence[str]) -> tuple[str, ...]:
    """Of the fleet's targets, those that the request's backend does not refuse, for this precision."""
    from enginery.core.hardware.targets import parse_targets

    backend = backends.configure(request.backend, spec.backends.get(request.backend, {}))
    wanted = [(name, parse_targets(name)[0]) for name in fleet]
    return tuple(
        name
        for name, target in wanted
        if backend.serves(target) and backend.refuses(replace(request, target=target)) is None
    )


def _shapes(item: Judged, spec: ModelSpec, exported: Exported, shop: Workshop) -> Shapes | None:
    """From the record, or tried now; None for a model without dynamic dims, and where it could not be tried."""
    if not spec.named_dims():
        return None
    probe = ProbeShapes(item.built.blob, exported.golden, model_shapes(spec))
    name = f"shapes {item.built.unit.name}"
    key = {**encode(probe), **code_key(ProbeShapes, backend_root(item.built.unit.request.backend))}

    try:
        found = shop.once("shapes", name, key, Job(name, probe, shop.store.uri, engine_limits(spec, "latency")))
    except UnavailableError:
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        shop.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return None
    if found.within is False:
        return "some"
    return "any" if found.outside else "within"


def _duels(
    facts: Sequence[Facts],
    judged: dict[str, Judged],
    spec: ModelSpec,
    exported: Exported,
    asked: Asked,
    shop: Workshop,
) -> list[Duel]:
    """The fastest against each of the others. One that loses makes way for its best opponent, `ROUNDS` times."""
    lead = fastest(facts)
    met: dict[tuple[str, str], Duel] = {}
    for _ in range(ROUNDS):
        if lead is None:
            return []
        for other in facts:
            if other.runs and other is not lead and (lead.unit, other.unit) not in met:
                duel = _duel(lead, other, judged, spec, exported, asked, shop)
                met |= {(lead.unit, other.unit): duel, (other.unit, lead.unit): duel.turned()}
        duels = [duel for (first, _), duel in met.items() if first == lead.unit]
        lost = [duel for duel in duels if duel.verdict == "slower"]
        if not lost:
            return duels
        winner = max(lost, key=lambda duel: duel.ratio or 0.0).second
        lead = next(item for item in facts if item.unit == winner)
    return duels


def _duel(
    lead: Facts,
    other: Facts,
    judged: dict[str, Judged],
    spec: ModelSpec,
    exported: Exported,
    asked: Asked,
    shop: Workshop,
) -> Duel:
    if lead.high_s is not None and other.low_s is not None and other.low_s > FAR * lead.high_s:
        return Duel(lead.unit, other.unit, "far faster", (lead.median_s or 0.0) / (other.median_s or 1.0))
    first, second = (judged[item.unit].built.blob for item in (lead, other))
    sizes = {dim.name: dim.opt for dim in spec.named_dims()}
    race = RaceEngines(first, second, exported.golden, model_shapes(spec), sizes, 10 * asked.seconds, asked.seed)
    name = f"{lead.unit} against {other.unit}"
    job = Job(name, race, shop.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    try:
        found = shop.shown(shop.local, name, job)
    except StepError as error:
        if error.kind == "cancelled":
            raise
        # Two runtimes that cannot live in one process: what is left are the times that each had alone.
        shop.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        apart = lead.high_s is not None and other.low_s is not None and lead.high_s < other.low_s
        return Duel(lead.unit, other.unit, "faster" if apart else "no difference shown")
    shop.progress.emit(Finished(name, words=found["verdict"]))
    middle = next(item for item in found["ratios"] if item["p"] == 0.5)
    parts = {key: middle[key] for key in ("ratio", "low", "high", "detectable")}
    return Duel(lead.unit, other.unit, found["verdict"], **parts, busy=tuple(found["surroundings"]["busy"]))
