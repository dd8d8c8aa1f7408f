"""The step that finds out which node drifted, for what failed its checks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from builders.errors import EngineryError, StepError, UnavailableError
from builders.jobs import Job
from pipeline.closure.code import backend_root
from pipeline.spec.model import ModelSpec, overrides
from pipeline.steps.keys import ATTRIBUTE_ENGINE, ATTRIBUTE_GRAPH, code_key, metric_of, step_limits
from pipeline.values import Attributed, Built, Json
from pipeline.verdict import Judged
from pipeline.workshop import Workshop
from validation.report import OVERLAP, Check

# Engines whose file can be taken apart.
TAPPABLE = ("onnxruntime",)


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


def suspects(judged: Sequence[Judged]) -> list[Suspect]:
    """What broke a limit: each graph once, whatever it was built for, and each engine that can be taken apart."""
    found: dict[tuple[str, str], Suspect] = {}
    for item in judged:
        for joint in _broken(item):
            unit = item.built.unit
            key = (joint, unit.request.model if joint == "quantization" else unit.name)
            known = found.get(key, Suspect(joint, item.built, (), _sizes(item) if joint == "engine" else ()))
            found[key] = replace(known, units=(*known.units, unit.name))
    return list(found.values())


def _broken(item: Judged) -> list[Literal["quantization", "engine"]]:
    # A broken contract and calls that do not repeat say how the engine behaves, an overlap how it was measured, and no
    # node that drifted.
    found = item.report.failed if item.report else ()
    failed = [check for check in found if not check.name.startswith(("contract ", "calls ")) and check.name != OVERLAP]
    lost = _lost(failed)
    graph = lost == "graph" or any(check.joint == "quantization" for check in failed)
    engine = lost == "engine" or any(check.joint == "engine" for check in failed)
    written = item.built.unit.graph.recipe is not None
    tappable = item.built.unit.request.backend in TAPPABLE
    return [*(["quantization"] if graph and written else []), *(["engine"] if engine and tappable else [])]  # type: ignore[list-item]


def _sizes(item: Judged) -> tuple[str, ...]:
    return tuple(check.case for check in item.report.failed if check.name == "sizes") if item.report else ()


def _lost(failed: Sequence[Check]) -> str | None:
    """The first of 'exported model', 'graph' and 'engine' that the task metric fails on; what follows inherits that.

    Failed on the exported model, it is about labels, data or training, and no graph or engine is to blame.
    """
    places = {check.case.rpartition(", ")[2] for check in failed if check.joint == "task"}
    return next((place for place in ("exported model", "graph", "engine") if place in places), None)


def attribute(suspect: Suspect, spec: ModelSpec, reference: str, golden: str, shop: Workshop) -> Attributed:
    """Take one apart; that it cannot be done is an answer too, and stops nobody.

    reference: digest of the float model.  golden: of the golden set.
    Raises UnavailableError, and StepError when cancelled.
    """
    try:
        value = _found(suspect, spec, reference, golden, shop)
    except UnavailableError:
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        shop.progress.finished(f"attribute {suspect.name}", f"failed: {str(error).splitlines()[0]}")
        return Attributed(suspect.joint, suspect.name, suspect.units, None, str(error))
    return Attributed(suspect.joint, suspect.name, suspect.units, value["attribution"], value["headline"])


def _found(suspect: Suspect, spec: ModelSpec, reference: str, golden: str, shop: Workshop) -> Json:
    built = suspect.built
    precision = built.unit.request.precision
    arguments = {
        "golden": golden,
        "limits": dict(overrides(spec, precision, suspect.joint)),
        "metric": metric_of(spec),
        **(_of_graph(built, reference) if suspect.joint == "quantization" else _of_engine(suspect)),
    }
    function = ATTRIBUTE_GRAPH if suspect.joint == "quantization" else ATTRIBUTE_ENGINE
    opened = [backend_root(built.unit.request.backend)] if suspect.joint == "engine" else []
    key = {**arguments, **code_key(function, *opened)}
    name = f"attribute {suspect.name}"

    def job() -> Job:
        given = {"store": shop.store.uri, **arguments}
        return Job(name, function, given, step_limits(spec, "attribution"))

    return shop.once("attribute", name, key, job, lambda value: [value["attribution"]])


def _of_graph(built: Built, reference: str) -> Json:
    graph, request = built.unit.graph, built.unit.request
    recipe = graph.recipe.digest if graph.recipe else None
    return {"reference": reference, "graph": request.model, "recipe": recipe, "precision": request.precision}


def _of_engine(suspect: Suspect) -> Json:
    built, sizes = suspect.built, list(suspect.sizes)
    return {"request": built.unit.request.to_json(), "suffix": built.suffix, "engine": built.digest, "sizes": sizes}
