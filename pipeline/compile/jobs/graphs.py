"""Writing a model in one graph variant, and comparing it with the original."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginery.core.codec import decode, encode
from enginery.core.reports.proof import Check
from enginery.core.types import CALIBRATED, QUANTIZED, Precision, TensorSpec
from enginery.registry.store.base import Store, open_store
from pipeline.compile.jobs.blobs import fetch, golden_set, proof_of, runnable, text_of
from pipeline.compile.jobs.limits import graph_limits
from pipeline.compile.jobs.ranges import CalibrationMethod, chosen_ranges
from pipeline.quantization.schemes.overrides import Override
from pipeline.values import GraphVariant, Json, Proof, SearchResult
from validation.comparison.task import TaskMetric

if TYPE_CHECKING:
    from onnx import ModelProto

    from enginery.core.reports.quantization import QuantizationRecord
    from pipeline.quantization.notes import CastNotes, QuantizationNotes
    from pipeline.quantization.ranges import Ranges
    from pipeline.quantization.record.record import Evidence


@dataclass(frozen=True)
class GraphRecipe:
    """How a graph was written, with all that writing it again with other overrides takes. Kept as a blob.

    model: digest of the float model behind it.  ranges: as `Ranges.to_json` gives them.  left: nodes left in float,
    with the reason.  searched: whether a search chose model and ranges.
    """

    model: str
    flavour: GraphVariant
    ranges: Json | None
    overrides: tuple[Override, ...]
    left: Mapping[str, str]
    searched: bool


@dataclass(frozen=True)
class WrittenGraph:
    """The model in one graph variant. Fields as in `values.Graph`; ranges: the calibrated ranges, as a blob.

    written_from: digest of the float model behind it.
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

    @property
    def blobs(self) -> list[str]:
        """Digests of the blobs that it names."""
        named = (self.model, self.ranges, self.record, self.recipe, self.written_from)
        return [digest for digest in named if digest]


@dataclass(frozen=True)
class WriteGraph:
    """Write the model in one graph variant. model, observations: digests.

    choice: what a search gave; then its model, in float, and its ranges are written instead.
    """

    model: str
    flavour: GraphVariant
    observations: str | None
    calibration: CalibrationMethod | None
    overrides: tuple[Override, ...]
    choice: SearchResult | None

    def run(self, context: WorkerContext) -> WrittenGraph:
        """The graph, its scales, the record of what quantizing did, and its recipe. Raises InputError for a rule that
        matches no node."""
        import onnx

        from pipeline.quantization.ranges import Ranges
        from pipeline.quantization.schemes.write import write
        from pipeline.sources.onnx_model import save_onnx, specs_of

        place, workdir, flavour, choice = open_store(context.store), context.workdir, self.flavour, self.choice
        source = choice.model if choice else self.model
        model = onnx.load(fetch(place, source, workdir / "model.onnx"))
        measured = chosen_ranges(place, flavour, self.observations, self.calibration)
        if choice:
            measured = Ranges.from_json(json.loads(place.read_blob(choice.ranges)))
        left = choice.left if choice else {}
        told = flavour.scheme, measured, self.overrides
        written, notes = write(model, flavour.precision, *told, keep_io=not flavour.native_io, left=left)
        inputs, outputs = specs_of(written)
        save_onnx(written, workdir / "graph.onnx")
        ranges = measured.to_json() if measured else None
        recipe = GraphRecipe(source, flavour, ranges, self.overrides, left, choice is not None)
        calibrated = flavour.precision in CALIBRATED
        record = None
        if measured and self.observations and calibrated:
            record = _record(written, notes, _evidence(place, model, measured, self.observations, choice, flavour))
        return WrittenGraph(
            model=place.put_file(workdir / "graph.onnx"),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            notes=(*([choice.summary] if choice else []), *notes.lines()),
            scales=measured.digest if measured and calibrated else None,
            ranges=place.put_bytes(text_of(ranges)) if ranges else None,
            record=place.put_bytes(text_of(encode(record))) if record else None,
            recipe=place.put_bytes(text_of(encode(recipe))),
            written_from=source,
        )


def _record(
    written: "ModelProto", notes: "QuantizationNotes | CastNotes", evidence: "Evidence"
) -> "QuantizationRecord | None":
    from pipeline.quantization.notes import QuantizationNotes
    from pipeline.quantization.record.record import record

    return record(written, notes, evidence) if isinstance(notes, QuantizationNotes) else None


def _evidence(
    place: Store,
    model: "ModelProto",
    ranges: "Ranges",
    observations: str,
    choice: SearchResult | None,
    flavour: GraphVariant,
) -> "Evidence":
    from pipeline.quantization.record.record import Evidence
    from pipeline.quantization.search.chosen import SearchDocument
    from pipeline.quantization.statistics.observations import Observations

    seen = Observations.from_bytes(place.read_blob(observations))
    levels = flavour.scheme.weight_levels if flavour.scheme else 127
    if choice is None:
        return Evidence(model, ranges, seen, weight_levels=levels)
    found = decode(json.loads(place.read_blob(choice.choice)), SearchDocument)
    smoothed = Observations.from_bytes(place.read_blob(choice.smoothed)).tensors
    return Evidence(model, ranges, seen, smoothed, found.recorded, found.weight_db, levels)


@dataclass(frozen=True)
class SampleDigests:
    """Blobs with the digests of the golden samples and of the calibration samples, which must not be the same."""

    golden: str
    calibration: str


@dataclass(frozen=True)
class CheckGraph:
    """Compare a quantized or cast graph with the fp32 graph, both without optimization (the quantization stage).

    reference, graph, golden: digests of the fp32 graph, the graph and the golden set.  samples: of a calibrated graph.
    """

    reference: str
    graph: str
    golden: str
    precision: Precision
    limits: Mapping[str, float]
    metric: TaskMetric | None = None
    samples: SampleDigests | None = None

    def run(self, context: WorkerContext) -> Proof:
        """The checks, that of the samples among them."""
        from builders.reference import ReferenceSession
        from validation.comparison.decisions import decision_checks
        from validation.comparison.sessions import drift_checks
        from validation.metrics.tally import Spreads

        place, spreads, workdir = open_store(context.store), Spreads(), context.workdir
        frozen = golden_set(place, self.golden, workdir)
        candidate = runnable(fetch(place, self.graph, workdir / "graph.onnx"), self.precision)
        original = fetch(place, self.reference, workdir / "reference.onnx")
        with (
            ReferenceSession(original) as expected,
            ReferenceSession(candidate) as actual,
        ):
            held = graph_limits(original, expected, self.precision, frozen, self.limits, self.metric, workdir)
            checks = drift_checks("quantization", expected, actual, frozen, held, spreads)
            decided = decision_checks(checks, frozen, self.metric, self.limits) if self.precision in QUANTIZED else []
            found = [*self._overlap(place), *checks, *decided]
            return proof_of(found, actual, frozen, self.metric, "graph", spreads.at("quantization"))

    def _overlap(self, place: Store) -> "list[Check]":
        from validation.data.overlap import overlap_check

        found = self.samples
        return [overlap_check(place.read_blob(found.golden), place.read_blob(found.calibration))] if found else []
