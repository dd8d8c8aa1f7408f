"""Export to canonical ONNX, golden set and parity.

Content of everything that an export reads.

The step that exports a model and freezes its golden set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.execution.jobs import Job, WorkerContext
from enginery.core.codec import encode
from enginery.core.digest import digest_of, digest_of_file
from enginery.core.errors import DataError, InputError, ModelError, StepError
from enginery.core.types import TensorSpec
from enginery.registry.store.base import Store, open_store
from enginery.user_code.entry_point import imported_packages, source_files
from pipeline.compile.run_context import RunContext, import_versions
from pipeline.compile.steps.blobs import fetch, proof_of
from pipeline.compile.steps.golden import settle_golden
from pipeline.compile.steps.keys import WRITE_MODEL, code_key, limits_of, metric_of, shapes_of, step_limits
from pipeline.progress.events import Finished
from pipeline.sources.request import ExportRequest
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Json, OnnxModel, Proof
from validation.comparison.terms import TaskMetric

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


# Protobuf takes up to 90 times a file's size when there is nothing in it but empty nodes: larger files are parsed in a
# process of their own, which has a limit.
_HERE_BYTES = 32 << 20


def source_digests(spec: ModelSpec, context: RunContext) -> Mapping[str, Any]:
    """Content of everything the export reads: the entry point with its local imports, weights, external data; and the
    versions of the packages that the entry point imports."""
    source, packages = spec.source, dict[str, str]()
    files = [spec.file(source.file)]
    if source.kind == "torch":
        packages = import_versions(*imported_packages(spec.folder, files[0]))
        files = list(source_files(spec.folder, files[0]))
    if source.kind == "onnx":
        files += [files[0].parent / name for name in _external_data(spec, context)]
    if source.weights:
        files.append(spec.file(source.weights))
    names = {place_of(file, spec): digest_of_file(file) for file in files if file.is_file()}
    return {"spec": source.model_dump(), "files": names, "packages": packages}


def place_of(file: Path, spec: ModelSpec) -> str:
    """Where a file lies in the spec's folder. Raises ModelError for a link that has come to lead out of it."""
    if not file.resolve().is_relative_to(spec.folder):
        raise ModelError(f"{file} leads outside the spec's folder {spec.folder}; put the file itself inside")
    return str(file.resolve().relative_to(spec.folder))


def _external_data(spec: ModelSpec, context: RunContext) -> list[str]:
    """Names of an ONNX source's external data files, remembered by the model file's content."""
    path = spec.file(spec.source.file)
    key = {"onnx": digest_of_file(path)}
    if (known := context.recall("external-data", key, ExternalFiles)) is None:
        known = _external_names(path, spec, context)
        context.remember("external-data", key, encode(known), [])
    return list(known.files)


def _external_names(path: Path, spec: ModelSpec, context: RunContext) -> ExternalFiles:
    if path.stat().st_size <= _HERE_BYTES:
        return external_data(path, spec.folder)
    name = "read model"
    job = Job(name, ReadExternalFiles(path, spec.folder), limits=step_limits(spec, "export"))
    found = context.run_job(context.local, name, job)
    context.progress.emit(Finished(name))
    return found


def export(spec: ModelSpec, context: RunContext) -> Exported:
    """Export to canonical ONNX, freeze the golden set, and measure the parity of framework and ONNX.

    Two records, because a new golden value needs no new export; one process, because both need the framework.
    """
    reads = _export_reads(spec, context)
    model_key = _model_key(spec, reads)
    model = context.recall("export", model_key, ExportedModel)
    if model and (golden := context.recall("golden", _golden_key(spec, reads, model.onnx), FrozenGolden)):
        context.progress.emit(Finished("export", "cached"))
        settle_golden(spec, golden.golden, context)
        return _run_export(model, golden, model_key, _golden_key(spec, reads, model.onnx))
    name = "golden set" if model else "export"
    outcome = context.run_job(context.local, name, _export_job(spec, context, model))
    if reads != _export_reads(spec, context):
        raise InputError("the model's files changed while they were read; nothing was kept: run again")
    model, golden = model or outcome.model, outcome.golden
    if model is None:
        raise StepError("export: no model came of it; run again")
    if outcome.model:
        context.remember("export", model_key, encode(model), [model.onnx])
    context.remember("golden", _golden_key(spec, reads, model.onnx), encode(golden), golden.blobs)
    context.progress.emit(Finished(name))
    settle_golden(spec, golden.golden, context)
    return _run_export(model, golden, model_key, _golden_key(spec, reads, model.onnx))


def recorded_export(spec: ModelSpec, context: RunContext) -> Exported | None:
    """The export that is on record; its golden set is '' where the model alone is. Raises as `settle_golden`."""
    reads = _export_reads(spec, context)
    model_key = _model_key(spec, reads)
    model = context.recall("export", model_key, ExportedModel)
    if model is None:
        return None
    golden_key = _golden_key(spec, reads, model.onnx)
    golden = context.recall("golden", golden_key, FrozenGolden)
    if golden is not None:
        settle_golden(spec, golden.golden, context)
    return _run_export(model, golden or FrozenGolden("", None, (), Proof()), model_key, golden_key)


def _run_export(model: ExportedModel, golden: FrozenGolden, *read: Json) -> Exported:
    return Exported(
        OnnxModel(model.onnx, model.inputs, model.outputs, model.opset, model.carries_qdq),
        golden.golden,
        golden.proof,
        golden.notes,
        model.blake3,
        golden.inputs,
        digest_of(read),
    )


def _export_reads(spec: ModelSpec, context: RunContext) -> Json:
    """Content of the files that export and golden set are made from."""
    golden = spec.golden
    data = digest_of_file(spec.file(golden.data)) if golden else None
    return {"source": source_digests(spec, context), "data": data}


def _model_key(spec: ModelSpec, reads: Json) -> Json:
    return {
        "source": reads["source"],
        "shapes": shapes_of(spec),
        **code_key(*WRITE_MODEL),
    }


def _golden_key(spec: ModelSpec, reads: Json, onnx: str) -> Json:
    golden = spec.golden
    return {
        **reads,
        "onnx": onnx,
        "golden": golden.model_dump(exclude={"frozen"}) if golden else None,
        "shapes": shapes_of(spec),
        "limits": limits_of(spec, "fp32", "export"),
        **code_key(ExportModel),
    }


def _export_job(spec: ModelSpec, context: RunContext, known: ExportedModel | None) -> Job[ExportOutcome]:
    golden = spec.golden
    request = ExportModel(
        _export_request(spec),
        known.onnx if known else None,
        spec.file(golden.data) if golden else None,
        golden.labels if golden else None,
        metric_of(spec),
        limits_of(spec, "fp32", "export"),
    )
    return Job("export", request, context.store.uri, step_limits(spec, "export"))


def _export_request(spec: ModelSpec) -> ExportRequest:
    source = spec.source
    return ExportRequest(
        source.kind,
        spec.folder,
        source.file,
        tuple(spec.tensors()),
        tuple(spec.named_dims()),
        tuple(spec.outputs) if spec.outputs else None,
        source.function or "",
        dict(source.arguments),
        source.weights,
        source.opset,
    )
