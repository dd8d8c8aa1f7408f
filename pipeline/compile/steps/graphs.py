"""The step that writes a model in one graph variant, and compares that with the exported model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError, EnginesmithError, InputError
from enginesmith.core.state import State
from enginesmith.core.types import CALIBRATED, QUANTIZED, Precision, QuantizedState, TensorSpec
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.run_context import Work, fail_step
from pipeline.compile.steps.blobs import (
    MEASURED_BYTES,
    answers_here,
    fetch_graph,
    golden_set,
    open_reference,
    proof_of,
    put_graph,
    runnable,
    text_of,
)
from pipeline.compile.steps.calibration import CalibrationMethod, calibration_method, chosen_ranges
from pipeline.compile.steps.keys import code_key, metrics_of, model_shapes, step_limits
from pipeline.compile.steps.proofs import WrittenLimits, as_written
from pipeline.compile.steps.search import node_overrides, not_searched
from pipeline.quantization.ranges import CastNotes, QuantizationNotes, Ranges, refuse_share
from pipeline.quantization.schemes.overrides import Override
from pipeline.values import (
    Exported,
    Graph,
    GraphVariant,
    Json,
    ModelledFigures,
    ModelShapes,
    Observed,
    Proof,
    Recipe,
    Searched,
    SearchResult,
    Shards,
    StepFailure,
)
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from onnx import ModelProto

    from enginesmith.core.reports.breakdown import QuantizationRecord
    from pipeline.quantization.statistics.observations import Observations
    from pipeline.spec.model import ModelSpec
    from validation.metrics.drift import Drift


@dataclass(frozen=True)
class GraphRecipe:
    """How a graph was written: a blob with everything needed to write it again with other overrides.

    model: digest of its float model.  ranges: `Ranges.to_json`, None if unmeasured.  left: node left in float ->
    reason; formats: node of `left` -> its format.  searched: whether a search chose model and ranges.  states: those
    whose input and output the graph rounds."""

    model: str
    variant: GraphVariant
    ranges: Json | None
    overrides: tuple[Override, ...]
    left: Mapping[str, str]
    searched: bool
    states: tuple[QuantizedState, ...] = ()
    formats: Mapping[str, Precision] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenGraph:
    """The model in one graph variant. Fields as in `values.Graph`; ranges: the calibrated ranges, as a blob.

    model: digest of the ONNX file.  written_from: of the float model behind it.  recipe: of the `GraphRecipe`.
    """

    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...]
    scales: str | None
    ranges: str | None
    record: str | None
    recipe: str
    written_from: str
    idle: str | None = None
    shards: Shards = ()
    quantized_states: tuple[QuantizedState, ...] = ()
    share: float | None = None
    modelled: Mapping[str, ModelledFigures] = field(default_factory=dict)

    @property
    def blobs(self) -> list[str]:
        """Digests of the blobs that it names."""
        named_blobs = (self.model, self.ranges, self.record, self.recipe, self.written_from)
        return [*(digest for digest in named_blobs if digest), *dict(self.shards)]


@dataclass(frozen=True)
class WriteGraph:
    """Write the model in one graph variant. model, observations: digests.

    choice: a search's result; its float model and ranges are then written instead.  states: those that engines of the
    graph take and give as int8.  wide_ends: whether what follows the last products of a cast stays in fp32.
    """

    model: str
    variant: GraphVariant
    observations: str | None
    calibration: CalibrationMethod | None
    overrides: tuple[Override, ...]
    choice: SearchResult | None
    shapes: ModelShapes
    states: tuple[State, ...] = ()
    wide_ends: bool = False

    def run(self, context: WorkerContext) -> WrittenGraph:
        """The graph, its scales, the record of what quantizing did, and its recipe. Raises InputError for a rule that
        matches no node."""
        from builders.onnx_graphs.weights import load_graph
        from pipeline.quantization.insertion_points import scale_states
        from pipeline.quantization.schemes.cast import find_last_nodes
        from pipeline.quantization.schemes.write import write as write_variant
        from pipeline.quantization.statistics.observations import Observations
        from pipeline.sources.onnx_model import save_onnx, specs_of

        store, workdir, variant, choice = open_store(context.store), context.workdir, self.variant, self.choice
        source = choice.model if choice else self.model
        model = load_graph(fetch_graph(store, source, workdir / "model.onnx"))
        measured_ranges = None
        if choice:
            measured_ranges = Ranges.from_json(json.loads(store.read_blob(choice.ranges, MEASURED_BYTES)))
        elif self.observations and self.calibration:
            measured_ranges = chosen_ranges(store, variant, self.observations, self.calibration)
        float_nodes = choice.left if choice else find_last_nodes(model) if self.wide_ends else {}
        states, formats = scale_states(self.states, measured_ranges), choice.formats if choice else {}
        args, keep_io = (variant.scheme, measured_ranges, self.overrides), not variant.native_io
        variant_model, notes = write_variant(
            model, variant.precision, *args, keep_io=keep_io, float_nodes=float_nodes, states=states, formats=formats
        )
        inputs, outputs = specs_of(variant_model)
        save_onnx(variant_model, workdir / "graph.onnx")
        stored_graph = put_graph(store, workdir / "graph.onnx")
        ranges = measured_ranges.to_json() if measured_ranges else None
        recipe = GraphRecipe(source, variant, ranges, self.overrides, float_nodes, choice is not None, states, formats)
        observations = Observations("", "", (), {})
        if variant.precision in QUANTIZED and self.observations:
            observations = Observations.from_bytes(store.read_blob(self.observations, MEASURED_BYTES))
        share, idle_reason, cost = self._measure_share(model, notes, observations)
        is_calibrated, record = variant.precision in CALIBRATED, None
        if measured_ranges and is_calibrated and isinstance(notes, QuantizationNotes):
            record = self._record(store, (model, variant_model), notes, measured_ranges, observations, share)
        return WrittenGraph(
            model=stored_graph.blob.digest,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            notes=(*([choice.summary] if choice else []), *notes.lines()),
            scales=measured_ranges.digest if measured_ranges and is_calibrated else None,
            ranges=store.put_bytes(text_of(ranges)) if ranges else None,
            record=store.put_bytes(text_of(encode(record))) if record else None,
            recipe=store.put_bytes(text_of(encode(recipe))),
            written_from=source,
            idle=idle_reason,
            shards=stored_graph.shards,
            quantized_states=states,
            share=share,
            modelled=cost,
        )

    def _measure_share(
        self, model: "ModelProto", notes: QuantizationNotes | CastNotes, observations: "Observations"
    ) -> tuple[float | None, str | None, dict[str, ModelledFigures]]:
        """The share of the multiplications in the narrow format, why the graph is idle, and its modelled cost. model:
        the float model; a graph that is not quantized has no share."""
        from pipeline.quantization.insertion_points import prepare_model
        from pipeline.quantization.search.costs import model_graph
        from pipeline.quantization.shares import narrow_share, sizes_at

        variant, idle_reason, share = self.variant, notes.idle, None
        cost: dict[str, ModelledFigures] = {}
        if isinstance(notes, QuantizationNotes):
            element_counts = {name: float(observation.elements) for name, observation in observations.tensors.items()}
            prepared_model, sizes = prepare_model(model), sizes_at(self.shapes)
            share = narrow_share(prepared_model, notes.quantized, sizes, element_counts)
            idle_reason = idle_reason or refuse_share(share, variant.precision, notes.explain())
            formats = {**notes.formats, **dict.fromkeys(notes.quantized, variant.precision)}
            floats = variant.scheme.float_precision if variant.scheme else "fp32"
            cost = model_graph(prepared_model, sizes, formats, floats) if notes.quantized else {}
        if idle_reason and self.choice:
            idle_reason = f"{idle_reason}; {self.choice.summary}"
        return share, idle_reason, cost

    def _record(
        self,
        store: Store,
        models: "tuple[ModelProto, ModelProto]",
        notes: QuantizationNotes,
        ranges: "Ranges",
        observations: "Observations",
        share: float | None,
    ) -> "QuantizationRecord":
        """Record of the quantization, per tensor. models: the float model and the written one."""
        from pipeline.quantization.record import Evidence, record
        from pipeline.quantization.search.trial import SearchDocument
        from pipeline.quantization.statistics.observations import Observations

        (model, variant_model), variant, choice = models, self.variant, self.choice
        levels = variant.scheme.weight_levels if variant.scheme else 127
        evidence = Evidence(model, ranges, observations, weight_levels=levels, share=share)
        if choice:
            search_document = decode(json.loads(store.read_blob(choice.choice, MEASURED_BYTES)), SearchDocument)
            tensors = Observations.from_bytes(store.read_blob(choice.smoothed, MEASURED_BYTES)).tensors
            evidence = replace(
                evidence, smoothed=tensors, choice=search_document.recorded, weight_db=search_document.weight_db
            )
        return record(variant_model, notes, evidence)


@dataclass(frozen=True)
class CheckGraph:
    """Compare a quantized or cast graph with the fp32 graph, both without optimization (the quantization stage).

    reference, graph, golden: digests of the fp32 graph, the graph and the golden set.  samples: of a calibrated graph,
    blobs with the digests of the golden samples and of the calibration samples, which must not be the same.
    answers: of the fp32 graph to the golden set (`blobs.open_reference`).
    """

    reference: str
    graph: str
    golden: str
    precision: Precision
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...] = ()
    samples: tuple[str, str] | None = None
    answers: str | None = None

    def run(self, context: WorkerContext) -> Proof:
        """The checks, including the check of the samples."""
        from builders.onnx_graphs.outline import load_outline
        from builders.reference import ReferenceSession, threads_for
        from validation.comparison.decisions import decision_checks
        from validation.comparison.selections import selected_of
        from validation.comparison.sessions import drift_checks
        from validation.comparison.tasks import check_free_running, step_spreads
        from validation.data.joined import overlap_check
        from validation.metrics.tally import Along

        store, course, workdir = open_store(context.store), Along(), context.workdir
        golden = golden_set(store, self.golden, workdir)
        spreads = step_spreads(golden, course)
        candidate = runnable(fetch_graph(store, self.graph, workdir / "graph.onnx"), self.precision)
        base_path = fetch_graph(store, self.reference, workdir / "reference.onnx")
        with (
            open_reference(store, base_path, golden, self.answers) as reference,
            ReferenceSession(candidate, threads=threads_for(candidate, bool(golden.sequences))) as session,
        ):
            limits = WrittenLimits(base_path, self.precision, self.limits, self.metrics, workdir)
            graph_limits = limits(reference, golden)
            usual_drifts: dict[str, Drift] = {}
            is_quantized = self.precision in QUANTIZED
            selection = selected_of(load_outline(base_path).graph, self.limits, self.metrics) if is_quantized else {}
            checks = drift_checks(
                "quantization", reference, session, golden, graph_limits, spreads, usual_drifts, selection
            )
            checks += check_free_running(
                "quantization", (reference, session), golden.sequences, partial(as_written, steps=True), limits, course
            )
            decision_results = (
                decision_checks(usual_drifts, self.metrics, self.limits) if self.precision != "fp32" else []
            )
            if self.samples:
                golden_data, calibration_data = (store.read_blob(digest, MEASURED_BYTES) for digest in self.samples)
                checks = (overlap_check(golden_data, calibration_data), *checks)
            drifts = spreads.at("quantization"), course.at("quantization")
            return proof_of([*checks, *decision_results], session, golden, self.metrics, "graph", drifts)


def quantize(
    variant: GraphVariant,
    export: Exported,
    ranges: Observed | StepFailure | None,
    choices: Mapping[Searched, SearchResult | StepFailure],
    work: Work,
) -> Graph:
    """`write_graph`, with the checks of the graph against the exported model (the quantization stage).

    A graph that cannot be written or compared says why (`Graph.failure`), and the others are built. A cast that misses
    its limits is written again with its last nodes in fp32 (`find_last_nodes`); that graph is used if it keeps them.
    Raises errors that are not about the graph (`stops_run`), and what `check_own_qdq` raises.
    """
    check_own_qdq(variant, work.spec, export)
    observed_ranges = None if isinstance(ranges, StepFailure) else ranges
    try:
        graph = write_graph(variant, export, ranges, choices, work)
        if graph.recipe is None or graph.idle:  # an idle one is refused
            return graph
        graph = replace(graph, proof=_check_graph(export, graph, observed_ranges, work))
        if variant.precision not in ("fp16", "bf16") or not graph.proof.failed or variant.native_io:
            return graph
    except EnginesmithError as error:
        return _unwritten(variant, export, fail_step(f"graph {variant.name}", error, work.context))
    try:
        wide_graph = write_graph(variant, export, ranges, choices, work, wide_ends=True)
        if wide_graph.idle:
            return graph
        wide_graph = replace(wide_graph, proof=_check_graph(export, wide_graph, observed_ranges, work))
        return graph if wide_graph.proof.failed else wide_graph
    except EnginesmithError as error:
        fail_step(f"graph {variant.name} with its last nodes in fp32", error, work.context)
        return graph


def _unwritten(variant: GraphVariant, export: Exported, failure: StepFailure) -> Graph:
    model = export.model
    return Graph(variant, model.digest, model.inputs, model.outputs, shards=model.shards, failure=failure)


def check_own_qdq(variant: GraphVariant, spec: "ModelSpec", export: Exported) -> None:
    """Raise InputError for quantization settings in the spec of a model that has its own Q/DQ."""
    if not export.model.carries_qdq or variant.precision == "fp32":
        return
    overrides, states = spec.quantization.overrides, spec.int8_states() if variant.precision in QUANTIZED else ()
    if overrides or states:
        key = f"quantization.overrides: {overrides[0].match!r}" if overrides else f"state.{states[0].input}.dtype"
        raise InputError(
            f"{key} changes nothing: the model already has Q/DQ nodes, which stay as they are; remove "
            f"{'the overrides' if overrides else 'it'}, or give the float model"
        )


def is_exported(variant: GraphVariant, export: Exported) -> bool:
    """Whether the graph of this variant is the exported model as it is, for which nothing is observed or written."""
    return variant.precision == "fp32" or export.model.carries_qdq


def write_graph(
    variant: GraphVariant,
    export: Exported,
    ranges: Observed | StepFailure | None,
    choices: Mapping[Searched, SearchResult | StepFailure],
    work: Work,
    wide_ends: bool = False,
) -> Graph:
    """Write the model in one graph variant; returns the graph. For fp32, and for a model that has Q/DQ, it is the
    exported model, whatever its share of int8.

    ranges: of calibration. If calibration failed, a graph that needs ranges has failed too, and any other has a note.
    choices: results of `choose` by kind of int8.  wide_ends: as in `WriteGraph`. Raises DataError if real samples are
    needed and missing."""
    spec = work.spec
    model = export.model
    if is_exported(variant, export):
        share = model.narrow_share if variant.precision in QUANTIZED else None
        graph = Graph(variant, model.digest, model.inputs, model.outputs, share=share, shards=model.shards)
        return replace(graph, proof=Proof(metrics=export.proof.metrics), own_int8=model.own_int8)
    if isinstance(ranges, StepFailure):
        if variant.precision in CALIBRATED:
            return _unwritten(variant, export, ranges)
        graph = write_graph(variant, export, None, choices, work, wide_ends)
        return replace(graph, notes=(f"written without measured ranges: {ranges.reason}", *graph.notes))
    choice = choices.get(variant.searched) if variant.searched else None
    if isinstance(choice, StepFailure):
        return _unwritten(variant, export, choice)
    if variant.precision in CALIBRATED and ranges is None:
        raise DataError(
            f"{variant.precision} needs real samples, and the model has no Q/DQ nodes; add calibration.data"
        )
    request = WriteGraph(
        model.digest,
        variant,
        ranges.observations if ranges else None,
        calibration_method(spec),
        node_overrides(spec),
        choice,
        model_shapes(spec),
        spec.int8_states() if variant.precision in QUANTIZED else (),
        wide_ends,
    )
    key = {**encode(request), "observations": ranges.seen if ranges else None, **code_key(WriteGraph)}
    job = Job("quantize", request, work.context.store.uri, step_limits(spec, "quantization"))
    new_graph = work.context.once("quantize", f"write {variant.name}", key, job, lambda written: written.blobs)
    recipe = Recipe(new_graph.recipe, new_graph.written_from if new_graph.written_from != model.digest else None)
    notes = (*not_searched(variant, spec, export), *new_graph.notes)
    graph_fields = new_graph.inputs, new_graph.outputs, new_graph.scales, notes
    graph = Graph(variant, new_graph.model, *graph_fields, record=new_graph.record, recipe=recipe)
    graph = replace(graph, idle=new_graph.idle, own_int8=model.own_int8, quantized_states=new_graph.quantized_states)
    return replace(graph, shards=new_graph.shards, share=new_graph.share, modelled=new_graph.modelled)


def _check_graph(export: Exported, graph: Graph, ranges: Observed | None, work: Work) -> Proof:
    spec = work.spec
    precision = graph.variant.precision
    samples = (export.golden_inputs, ranges.inputs) if export.golden_inputs and ranges else None
    digests = export.model.digest, graph.model, export.golden
    limits, metrics = spec.validation.limits_for(precision, "quantization"), metrics_of(spec, precision)
    check = CheckGraph(*digests, precision, limits, metrics, samples if precision in CALIBRATED else None)
    key = {**encode(check), **code_key(CheckGraph)}
    check_request = replace(check, answers=answers_here(export))
    job = Job("check graph", check_request, work.context.store.uri, step_limits(spec, "proof"))
    return work.context.once("check-graph", f"check {graph.variant.name}", key, job)
