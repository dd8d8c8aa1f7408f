"""Export to canonical ONNX, golden set and parity."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginery.core.errors import DataError
from enginery.core.types import TensorSpec
from enginery.registry.store.base import Store, open_store
from pipeline.compile.jobs.blobs import fetch, proof_of
from pipeline.sources.request import ExportRequest
from pipeline.values import Proof
from validation.comparison.task import TaskMetric

if TYPE_CHECKING:
    from validation.data.samples import Samples


@dataclass(frozen=True)
class ExportedModel:
    """The exported model. onnx: digest of the canonical file.  blake3: where who uploaded it had the library.

    carries_qdq: it was quantized by its author (QAT).
    """

    onnx: str
    blake3: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    carries_qdq: bool


@dataclass(frozen=True)
class FrozenGolden:
    """A golden set. golden: its digest.  inputs: blob with the digests of real samples; None where they are random.

    notes: for people.  proof: the parity of framework and ONNX.
    """

    golden: str
    inputs: str | None
    notes: tuple[str, ...]
    proof: Proof

    @property
    def blobs(self) -> list[str]:
        """Digests of the blobs that it names."""
        return [digest for digest in (self.golden, self.inputs) if digest]


@dataclass(frozen=True)
class ExportOutcome:
    """What an export gave. model: None where it was known."""

    model: ExportedModel | None
    golden: FrozenGolden


@dataclass(frozen=True)
class ExportModel:
    """Export to canonical ONNX, freeze the golden set and compare the two (the export stage).

    known: digest of the exported model when only the golden set is new.  data: the file of the golden inputs, labels:
    its array of class indices; None where there are none.
    """

    source: ExportRequest
    known: str | None
    data: Path | None
    labels: str | None
    metric: TaskMetric | None
    limits: Mapping[str, float]

    def run(self, context: WorkerContext) -> ExportOutcome:
        """Model and golden set. Raises ModelError for a source that cannot be exported, DataError for the samples."""
        from builders.reference import ReferenceSession
        from pipeline.sources.export import export
        from validation.data.overlap import golden_digests
        from validation.golden.golden_set import GoldenSet

        place, workdir, labels = open_store(context.store), context.workdir, self.labels
        samples = _golden(self.data, self.source, labels) if self.data else None
        column = samples.column(labels) if samples and labels else None
        known = fetch(place, self.known, workdir / "known.onnx") if self.known else None
        exported = export(self.source, samples, column, workdir, self.limits, known)
        frozen = GoldenSet.load(exported.golden)
        with ReferenceSession(exported.onnx, name="the exported model") as session:
            proof = proof_of(exported.checks, session, frozen, self.metric, "exported model", exported.spreads)
        groups = (case.inputs for case in frozen.of_kind("golden"))
        inputs = place.put_bytes(golden_digests(groups, samples.complete)) if samples else None
        model = None if self.known else store_model(place, exported.onnx)
        return ExportOutcome(model, FrozenGolden(place.put_file(exported.golden), inputs, exported.notes, proof))


@dataclass(frozen=True)
class ExternalFiles:
    """Names of an ONNX file's external data files, seen from its folder."""

    files: tuple[str, ...]


@dataclass(frozen=True)
class ReadExternalFiles:
    """Read which files an ONNX file keeps its data in. root: the spec's folder."""

    path: Path
    root: Path

    def run(self, context: WorkerContext) -> ExternalFiles:  # noqa: ARG002 - the protocol's
        """Their names. Raises ModelError for a file that is no ONNX model, or leads out of the spec's folder."""
        return external_data(self.path, self.root)


def external_data(path: Path, root: Path) -> ExternalFiles:
    """Names of an ONNX file's external data files. Arguments and errors as for `ReadExternalFiles`."""
    from pipeline.sources.onnx_model import external_files

    return ExternalFiles(tuple(str(item.relative_to(path.parent)) for item in external_files(path, root)))


def _golden(data: Path, wanted: ExportRequest, labels: str | None) -> "Samples":
    """The golden inputs. Raises DataError; ModelError instead where it is the spec that names other inputs than an ONNX
    source has."""
    from pipeline.sources.canonical import check_names
    from pipeline.sources.onnx_model import load_onnx, specs_of
    from validation.data.samples import Samples

    try:
        return Samples.open(data, wanted.inputs, wanted.dims, (labels,) if labels else ())
    except DataError:
        if wanted.kind == "onnx":
            own, _ = specs_of(load_onnx(wanted.root / wanted.file, wanted.root))
            check_names([spec.name for spec in own], [spec.name for spec in wanted.inputs])
        raise


def store_model(place: Store, path: Path) -> ExportedModel:
    """Put an exported model into the store: its digests, and what the steps after it ask of it."""
    from pipeline.quantization.schemes.qdq import carries_qdq
    from pipeline.sources.onnx_model import load_onnx, specs_of

    model = load_onnx(path, path.parent)
    inputs, outputs = specs_of(model)
    stored = place.put_and_digest_file(path)
    opset = max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    return ExportedModel(stored.digest, stored.blake3, tuple(inputs), tuple(outputs), opset, carries_qdq(model))
