"""The step that writes a model in one flavour, and measures what that cost."""

from collections.abc import Mapping
from dataclasses import asdict, replace

from builders.errors import DataError, InputError
from builders.jobs import Job
from builders.types import CALIBRATED, tensor_from_json
from pipeline.spec.model import ModelSpec, overrides
from pipeline.steps.keys import CHECK_GRAPH, QUANTIZE, code_key, metric_of, step_limits
from pipeline.values import Exported, Flavour, Graph, Json, Proof, Recipe, Searched
from pipeline.workshop import Workshop


def quantize(
    flavour: Flavour,
    spec: ModelSpec,
    exported: Exported,
    ranges: Json | None,
    choices: Mapping[Searched, Json],
    shop: Workshop,
) -> Graph:
    """Write the model in one flavour and measure what that cost (the quantization joint). Arguments as for `write`."""
    graph = write(flavour, spec, exported, ranges, choices, shop)
    return graph if graph.recipe is None else replace(graph, proof=_check_graph(spec, exported, graph, ranges, shop))


def write(
    flavour: Flavour,
    spec: ModelSpec,
    exported: Exported,
    ranges: Json | None,
    choices: Mapping[Searched, Json],
    shop: Workshop,
) -> Graph:
    """Write the model in one flavour.

    choices: what `choose` gave, by kind of int8.
    Raises DataError where real samples are needed, InputError for overrides of a model that carries Q/DQ of its own.
    """
    model = exported.model
    if model.carries_qdq and spec.quantization.overrides and flavour.precision != "fp32":
        raise InputError(
            f"quantization.overrides: {spec.quantization.overrides[0].match!r} changes nothing, since the model "
            "carries Q/DQ of its own, which stays as it is; remove the overrides, or give the float model"
        )
    if flavour.precision == "fp32" or model.carries_qdq:
        return Graph(flavour, model.digest, model.inputs, model.outputs, proof=Proof(metrics=exported.proof.metrics))
    if flavour.precision in CALIBRATED and ranges is None:
        raise DataError(
            f"{flavour.precision} needs real samples, and the model carries no Q/DQ of its own; add calibration.data"
        )
    key = {
        "onnx": model.digest,
        "flavour": asdict(flavour),
        "seen": ranges and ranges["seen"],
        "calibration": spec.calibration and spec.calibration.model_dump(include={"method", "percentile"}),
        "overrides": [item.model_dump() for item in spec.quantization.overrides],
        "choice": choices.get(flavour.searched) if flavour.searched else None,
        **code_key(QUANTIZE),
    }

    def job() -> Job:
        arguments = {name: key[name] for name in ("onnx", "flavour", "calibration", "overrides", "choice")}
        arguments["observations"] = ranges and ranges["observations"]
        limits = step_limits(spec, "quantization")
        return Job("quantize", QUANTIZE, {"store": shop.store.uri, **arguments}, limits)

    value = shop.once("quantize", f"write {flavour.name}", key, job, _graph_blobs)
    inputs, outputs = (tuple(map(tensor_from_json, value[name])) for name in ("inputs", "outputs"))
    graph = Graph(flavour, value["model"], inputs, outputs, value["scales"], tuple(value["notes"]))
    return replace(graph, record=value["record"], recipe=_recipe(value, model.digest))


def _graph_blobs(value: Json) -> list[str]:
    named = ("model", "ranges", "record", "recipe", "written_from")
    return [value[name] for name in named if value[name]]


def _recipe(value: Json, onnx: str) -> Recipe:
    return Recipe(value["recipe"], value["written_from"] if value["written_from"] != onnx else None)


def _check_graph(spec: ModelSpec, exported: Exported, graph: Graph, ranges: Json | None, shop: Workshop) -> Proof:
    precision = graph.flavour.precision
    compared = precision in CALIBRATED and ranges and exported.golden_inputs
    key = {
        "reference": exported.model.digest,
        "graph": graph.model,
        "golden": exported.golden,
        "samples": {"golden": exported.golden_inputs, "calibration": ranges["inputs"]} if ranges and compared else None,
        "precision": precision,
        "limits": dict(overrides(spec, precision, "quantization")),
        "metric": metric_of(spec),
        **code_key(CHECK_GRAPH),
    }

    def job() -> Job:
        arguments = {name: value for name, value in key.items() if name not in ("versions", "code")}
        limits = step_limits(spec, "proof")
        return Job("check graph", CHECK_GRAPH, {"store": shop.store.uri, **arguments}, limits)

    return Proof.from_json(shop.once("check-graph", f"check {graph.flavour.name}", key, job, lambda _: []))
