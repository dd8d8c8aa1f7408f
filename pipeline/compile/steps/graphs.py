"""The step that writes a model in one graph variant, and measures what that cost."""

from collections.abc import Mapping
from dataclasses import replace

from builders.execution.jobs import Job
from enginery.core.codec import encode
from enginery.core.errors import DataError, InputError
from enginery.core.types import CALIBRATED
from pipeline.compile.jobs.graphs import CheckGraph, SampleDigests, WriteGraph
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.keys import code_key, limits_of, metric_of, step_limits
from pipeline.compile.steps.ranges import calibration_method, node_overrides
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Graph, GraphVariant, Observed, Proof, Recipe, Searched, SearchResult


def quantize(
    flavour: GraphVariant,
    spec: ModelSpec,
    exported: Exported,
    ranges: Observed | None,
    choices: Mapping[Searched, SearchResult],
    context: RunContext,
) -> Graph:
    """Write the model in one graph variant and measure what that cost (quantization stage). Arguments as `write`."""
    graph = write(flavour, spec, exported, ranges, choices, context)
    return graph if graph.recipe is None else replace(graph, proof=_check_graph(spec, exported, graph, ranges, context))


def write(
    flavour: GraphVariant,
    spec: ModelSpec,
    exported: Exported,
    ranges: Observed | None,
    choices: Mapping[Searched, SearchResult],
    context: RunContext,
) -> Graph:
    """Write the model in one graph variant.

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
    request = WriteGraph(
        model.digest,
        flavour,
        ranges.observations if ranges else None,
        calibration_method(spec),
        node_overrides(spec),
        choices.get(flavour.searched) if flavour.searched else None,
    )
    key = {
        **encode(request),
        "observations": ranges.seen if ranges else None,
        **code_key(WriteGraph),
    }
    job = Job("quantize", request, context.store.uri, step_limits(spec, "quantization"))
    found = context.once("quantize", f"write {flavour.name}", key, job, lambda written: written.blobs)
    recipe = Recipe(found.recipe, found.written_from if found.written_from != model.digest else None)
    shown = found.inputs, found.outputs, found.scales, found.notes
    return Graph(flavour, found.model, *shown, record=found.record, recipe=recipe)


def _check_graph(
    spec: ModelSpec, exported: Exported, graph: Graph, ranges: Observed | None, context: RunContext
) -> Proof:
    precision = graph.flavour.precision
    samples = None
    if precision in CALIBRATED and ranges and exported.golden_inputs:
        samples = SampleDigests(exported.golden_inputs, ranges.inputs)
    check = CheckGraph(
        exported.model.digest,
        graph.model,
        exported.golden,
        precision,
        limits_of(spec, precision, "quantization"),
        metric_of(spec),
        samples,
    )
    key = {**encode(check), **code_key(CheckGraph)}
    job = Job("check graph", check, context.store.uri, step_limits(spec, "proof"))
    return context.once("check-graph", f"check {graph.flavour.name}", key, job)
