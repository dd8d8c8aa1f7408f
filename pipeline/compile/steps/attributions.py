"""The step that finds out which node drifted, for what failed its checks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from builders.backends import discovery
from builders.execution.jobs import Job, Request
from enginery.core.codec import encode_fields
from enginery.core.errors import EngineryError, StepError, UnavailableError
from enginery.core.reports.proof import OVERLAP, Check
from pipeline.compile.closure.code import backend_root
from pipeline.compile.jobs.attribution import AttributeEngine, AttributeGraph, AttributionFound
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.keys import code_key, limits_of, metric_of, step_limits
from pipeline.compile.verdict import JudgedUnit
from pipeline.progress.events import Finished
from pipeline.spec.model import ModelSpec
from pipeline.values import Attributed, Built


@dataclass(frozen=True)
class Suspect:
    """What is taken apart: the graph of `built`, or its engine. units: whose it is, as text.

    sizes: cases of a failed check of sizes, the golden set having passed.
    """

    joint: Literal["quantization", "engine"]
    built: Built
    units: tuple[str, ...]
    sizes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """'graph int8 (...)', or the unit."""
        unit = self.built.unit
        return f"graph {unit.graph.flavour.name}" if self.joint == "quantization" else unit.name


def suspects(judged: Sequence[JudgedUnit]) -> list[Suspect]:
    """What broke a limit: each graph once, whatever it was built for, and each engine that can be taken apart."""
    found: dict[tuple[str, str], Suspect] = {}
    for item in judged:
        for joint in _broken(item):
            unit = item.built.unit
            key = (joint, unit.request.model if joint == "quantization" else unit.name)
            known = found.get(key, Suspect(joint, item.built, (), _sizes(item) if joint == "engine" else ()))
            found[key] = replace(known, units=(*known.units, unit.name))
    return list(found.values())


def _broken(item: JudgedUnit) -> list[Literal["quantization", "engine"]]:
    # A broken contract and calls that do not repeat say how the engine behaves, an overlap how it was measured, and no
    # node that drifted.
    found = item.report.failed if item.report else ()
    failed = [check for check in found if not check.name.startswith(("contract ", "calls ")) and check.name != OVERLAP]
    lost = _find_lost_stage(failed)
    graph = lost == "graph" or any(check.joint == "quantization" for check in failed)
    engine = lost == "engine" or any(check.joint == "engine" for check in failed)
    written = item.built.unit.graph.recipe is not None
    tappable = discovery.capabilities_of(item.built.unit.request.backend).opens_parts
    return [*(["quantization"] if graph and written else []), *(["engine"] if engine and tappable else [])]  # type: ignore[list-item]


def _sizes(item: JudgedUnit) -> tuple[str, ...]:
    return tuple(check.case for check in item.report.failed if check.name == "sizes") if item.report else ()


def _find_lost_stage(failed: Sequence[Check]) -> str | None:
    """The first of 'exported model', 'graph' and 'engine' that the task metric fails on; what follows inherits that.

    Failed on the exported model, it is about labels, data or training, and no graph or engine is to blame.
    """
    places = {check.case.rpartition(", ")[2] for check in failed if check.joint == "task"}
    return next((place for place in ("exported model", "graph", "engine") if place in places), None)


def attribute(suspect: Suspect, spec: ModelSpec, reference: str, golden: str, context: RunContext) -> Attributed:
    """Take one apart; that it cannot be done is an answer too, and stops nobody.

    reference: digest of the float model.  golden: of the golden set.
    Raises UnavailableError, and StepError when cancelled.
    """
    try:
        found = _run_attribution(suspect, spec, reference, golden, context)
    except UnavailableError:
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        context.progress.emit(Finished(f"attribute {suspect.name}", "failed", str(error).splitlines()[0]))
        return Attributed(suspect.joint, suspect.name, suspect.units, None, str(error))
    return Attributed(suspect.joint, suspect.name, suspect.units, found.attribution, found.headline)


def _run_attribution(
    suspect: Suspect, spec: ModelSpec, reference: str, golden: str, context: RunContext
) -> AttributionFound:
    if suspect.joint == "quantization":
        return _run(_graph_request(suspect, spec, reference, golden), suspect, spec, context)
    return _run(_engine_request(suspect, spec, golden), suspect, spec, context)


def _run(
    request: Request[AttributionFound], suspect: Suspect, spec: ModelSpec, context: RunContext
) -> AttributionFound:
    opened = [backend_root(suspect.built.unit.request.backend)] if suspect.joint == "engine" else []
    key = {**encode_fields(request), **code_key(type(request), *opened)}
    name = f"attribute {suspect.name}"
    job = Job(name, request, context.store.uri, step_limits(spec, "attribution"))
    return context.once("attribute", name, key, job, lambda found: [found.attribution])


def _graph_request(suspect: Suspect, spec: ModelSpec, reference: str, golden: str) -> AttributeGraph:
    graph, request = suspect.built.unit.graph, suspect.built.unit.request
    recipe, precision = graph.recipe.digest if graph.recipe else None, request.precision
    limits = limits_of(spec, precision, "quantization")
    return AttributeGraph(reference, request.model, recipe, golden, precision, limits, metric_of(spec))


def _engine_request(suspect: Suspect, spec: ModelSpec, golden: str) -> AttributeEngine:
    limits = limits_of(spec, suspect.built.unit.request.precision, "engine")
    return AttributeEngine(suspect.built.blob, golden, limits, metric_of(spec), suspect.sizes)
