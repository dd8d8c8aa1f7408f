"""What the process of an export does: canonical ONNX, the golden set, and the comparison of the two, as blobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import DataError
from enginesmith.core.state import step_inputs
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.steps.blobs import fetch_graph, proof_of, put_graph, this_machine
from pipeline.sources.request import ExportRequest
from pipeline.values import KeptAnswers, ModelShapes, OnnxModel, Proof
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from validation.data.samples import Samples


@dataclass(frozen=True)
class FrozenGolden:
    """A golden set. golden: its digest.  inputs: blob with the digests of real samples; None where they are random.

    notes: for people.  proof: the parity of framework and ONNX.  answers: as in `Exported`.
    """

    golden: str
    inputs: str | None
    notes: tuple[str, ...]
    proof: Proof
    answers: KeptAnswers | None = None

    @property
    def blobs(self) -> list[str]:
        """Digests of the blobs that it names."""
        named = (self.golden, self.inputs, self.answers and self.answers.blob)
        return [digest for digest in named if digest]


@dataclass(frozen=True)
class ExportOutcome:
    """What an export gave. model: None where it was known."""

    model: OnnxModel | None
    golden: FrozenGolden


@dataclass(frozen=True)
class ExportModel:
    """Export to canonical ONNX, freeze the golden set and compare the two (the export stage).

    known: digest of the exported model when only the golden set is new.  data: the file or folder of the golden inputs,
    labels, sequence: its arrays of right answers and of which sequence each sample is of; None where there are none.
    steps: as in `read_steps`.
    """

    source: ExportRequest
    known: str | None
    data: Path | None
    labels: str | None
    metrics: tuple[TaskMetric, ...]
    limits: Mapping[str, float]
    sequence: str | None = None
    steps: tuple[str, str] | None = None

    def run(self, context: WorkerContext) -> ExportOutcome:
        """Model and golden set. Raises ModelError for a source that cannot be exported, DataError for the samples."""
        from builders.onnx_graphs.dependence import find_dependences
        from builders.onnx_graphs.outline import load_outline
        from builders.reference import ReferenceSession, threads_for
        from pipeline.sources.export import export as export_source
        from validation.comparison.coverage import unmeasured_checks
        from validation.data.joined import read_steps
        from validation.data.overlap import golden_digests, window_digests
        from validation.data.sequences import read_order, split
        from validation.golden.golden_set import GoldenSet

        place, workdir, labels = open_store(context.store), context.workdir, self.labels
        extra = [name for name in (labels, self.sequence, self.steps and self.steps[1]) if name]
        samples = _open_golden_samples(self.data, self.source, extra) if self.data else None
        column = samples.column(labels) if samples and labels else None
        order = read_order(samples, self.sequence) if samples else None
        steps = read_steps(samples, self.steps, order, self.source.dims) if samples else None
        known = fetch_graph(place, self.known, workdir / "known.onnx") if self.known else None
        exported = export_source(self.source, samples, column, workdir, self.limits, known, order, steps)
        frozen = GoldenSet.load(exported.golden)
        drifts = exported.spreads, exported.free_running
        proof = Proof(exported.checks, (), *drifts)
        if self.metrics:
            threads = threads_for(exported.onnx, bool(self.source.states))
            with ReferenceSession(exported.onnx, threads=threads, name="the exported model") as session:
                proof = proof_of(exported.checks, session, frozen, self.metrics, "exported model", drifts)
        named = find_dependences(load_outline(exported.onnx).graph)
        proof = replace(proof, checks=(*proof.checks, *unmeasured_checks(frozen, named, self.metrics)))
        inputs = None
        if samples and self.source.states:
            sequences = (map(itemgetter(1), steps) for steps in split(samples, order))
            inputs = place.put_bytes(window_digests(sequences))
        elif samples:
            groups = (case.inputs for case in frozen.of_kind("golden"))
            inputs = place.put_bytes(golden_digests(groups, samples.complete))
        model = (
            None if self.known else store_model(place, exported.onnx, ModelShapes(self.source.inputs, self.source.dims))
        )
        answers = KeptAnswers(place.put_file(exported.answers), this_machine()) if exported.answers else None
        golden = FrozenGolden(place.put_file(exported.golden), inputs, exported.notes, proof, answers)
        return ExportOutcome(model, golden)


def _open_golden_samples(data: Path, wanted: ExportRequest, extra: Sequence[str]) -> "Samples":
    """The golden inputs. Raises DataError; ModelError instead where it is the spec that names other inputs than an ONNX
    source has."""
    from pipeline.sources.canonical import check_names
    from pipeline.sources.onnx_model import load_onnx, specs_of
    from validation.data.samples import Samples

    try:
        return Samples.open(data, step_inputs(wanted.inputs, wanted.states), wanted.dims, extra)
    except DataError:
        if wanted.kind == "onnx":
            own, _ = specs_of(load_onnx(wanted.root / wanted.file, wanted.root, wanted.most_embedded_bytes))
            taken = [spec.name for spec in own if spec.name not in wanted.arguments]
            check_names(taken, [spec.name for spec in wanted.inputs])
        raise


def store_model(place: Store, path: Path, shapes: ModelShapes) -> OnnxModel:
    """Put the canonical ONNX file `path` into the store: its digests, and what the steps after it ask of it."""
    from builders.onnx_graphs.outline import load_outline
    from pipeline.quantization.graph import tidy
    from pipeline.quantization.own_integers import count_integer_nodes
    from pipeline.quantization.schemes.qdq import carries_qdq
    from pipeline.quantization.shares import narrow_share, sizes_at
    from pipeline.sources.onnx_model import specs_of

    model = load_outline(path)
    inputs, outputs = specs_of(model)
    stored = put_graph(place, path)
    opset = max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    quantized = carries_qdq(model)
    share = narrow_share(tidy(model), (), sizes_at(shapes)) if quantized else None
    own = quantized, stored.blob.blake3, count_integer_nodes(model), stored.shards, share
    return OnnxModel(stored.blob.digest, tuple(inputs), tuple(outputs), opset, *own)
