"""The step that exports a model to canonical ONNX, freezes its golden set and compares the two.

Two records are kept, because a new golden set needs no new export; one process makes both, because both need the
framework.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.execution.jobs import Job, WorkerContext
from enginery.core.codec import encode
from enginery.core.digest import digest_of, digest_of_file, digest_of_path
from enginery.core.errors import DataError, InputError, ModelError, StepError
from enginery.core.state import without_states
from enginery.registry.store.base import Store, open_store
from enginery.user_code.entry_point import imported_packages, source_files
from pipeline.compile.run_context import RunContext, import_versions
from pipeline.compile.steps.blobs import fetch_graph, proof_of, put_graph, this_machine
from pipeline.compile.steps.golden import settle_golden
from pipeline.compile.steps.keys import WRITE_MODEL, code_key, limits_of, metrics_of, shapes_of, step_limits
from pipeline.progress.events import Finished
from pipeline.sources.request import MOST_EMBEDDED_BYTES, ExportRequest
from pipeline.values import Exported, Json, KeptAnswers, OnnxModel, Proof
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec
    from validation.data.samples import Samples

# Protobuf takes up to 90 times a file's size when there is nothing in it but empty nodes: larger files are parsed in a
# process of their own, which has a limit.
_HERE_BYTES = 32 << 20


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
    """

    source: ExportRequest
    known: str | None
    data: Path | None
    labels: str | None
    metrics: tuple[TaskMetric, ...]
    limits: Mapping[str, float]
    sequence: str | None = None

    def run(self, context: WorkerContext) -> ExportOutcome:
        """Model and golden set. Raises ModelError for a source that cannot be exported, DataError for the samples."""
        from builders.reference import ReferenceSession
        from pipeline.sources.export import export as export_source
        from validation.data.overlap import golden_digests, window_digests
        from validation.data.sequences import read_order, split
        from validation.golden.golden_set import GoldenSet

        place, workdir, labels = open_store(context.store), context.workdir, self.labels
        extra = [name for name in (labels, self.sequence) if name]
        samples = _open_golden_samples(self.data, self.source, extra) if self.data else None
        column = samples.column(labels) if samples and labels else None
        order = read_order(samples, self.sequence) if samples else None
        known = fetch_graph(place, self.known, workdir / "known.onnx") if self.known else None
        exported = export_source(self.source, samples, column, workdir, self.limits, known, order)
        frozen = GoldenSet.load(exported.golden)
        proof = Proof(exported.checks, spreads=exported.spreads)
        if self.metrics:
            with ReferenceSession(exported.onnx, name="the exported model") as session:
                proof = proof_of(exported.checks, session, frozen, self.metrics, "exported model", exported.spreads)
        inputs = None
        if samples and self.source.states:
            sequences = (map(itemgetter(1), steps) for steps in split(samples, order))
            inputs = place.put_bytes(window_digests(sequences))
        elif samples:
            groups = (case.inputs for case in frozen.of_kind("golden"))
            inputs = place.put_bytes(golden_digests(groups, samples.complete))
        model = None if self.known else store_model(place, exported.onnx)
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
        return Samples.open(data, without_states(wanted.inputs, wanted.states), wanted.dims, extra)
    except DataError:
        if wanted.kind == "onnx":
            own, _ = specs_of(load_onnx(wanted.root / wanted.file, wanted.root, wanted.most_embedded_bytes))
            taken = [spec.name for spec in own if spec.name not in wanted.arguments]
            check_names(taken, [spec.name for spec in wanted.inputs])
        raise


def store_model(place: Store, path: Path) -> OnnxModel:
    """Put the canonical ONNX file `path` into the store: its digests, and what the steps after it ask of it."""
    from builders.onnx_graphs.outline import load_outline
    from pipeline.quantization.own_integers import count_integer_nodes
    from pipeline.quantization.schemes.qdq import carries_qdq
    from pipeline.sources.onnx_model import specs_of

    model = load_outline(path)
    inputs, outputs = specs_of(model)
    stored = put_graph(place, path)
    opset = max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    own = carries_qdq(model), stored.blob.blake3, count_integer_nodes(model), stored.shards
    return OnnxModel(stored.blob.digest, tuple(inputs), tuple(outputs), opset, *own)


@dataclass(frozen=True)
class ExternalFiles:
    """Names of an ONNX file's external data files, seen from its folder."""

    files: tuple[str, ...]


@dataclass(frozen=True)
class ReadExternalFiles:
    """Read which files the ONNX file `path` keeps its data in. root: the spec's folder."""

    path: Path
    root: Path

    def run(self, context: WorkerContext) -> ExternalFiles:  # noqa: ARG002 - the protocol's
        """Their names. Raises ModelError for a file that is no ONNX model, or leads out of the spec's folder."""
        return _read_external_files(self.path, self.root)


def _read_external_files(path: Path, root: Path) -> ExternalFiles:
    from pipeline.sources.onnx_model import external_files

    return ExternalFiles(tuple(str(item.relative_to(path.parent)) for item in external_files(path, root)))


def source_digests(spec: "ModelSpec", context: RunContext) -> Mapping[str, Any]:
    """Digests of everything the export reads: the entry point with its local imports, weights, external data; and the
    versions of the packages that the entry point imports. Raises ModelError for a file outside of the spec's folder."""
    source, packages = spec.source, dict[str, str]()
    files = [spec.file(spec.source_file)]
    if source.kind == "torch":
        packages = import_versions(*imported_packages(spec.folder, files[0], source.module))
        files = list(source_files(spec.folder, files[0], source.module))
    known = dict[Path, str]()
    if source.kind == "onnx":
        known[files[0]] = digest_of_file(files[0])
        beside = _find_external_files(files[0], known[files[0]], spec, context)
        files += [files[0].parent / name for name in beside]
    if source.weights:
        files.append(spec.file(source.weights))
    names = {place_of(file, spec): known.get(file) or digest_of_file(file) for file in files if file.is_file()}
    return {"spec": source.model_dump(), "files": names, "packages": packages}


def place_of(file: Path, spec: "ModelSpec") -> str:
    """Where a file lies in the spec's folder. Raises ModelError for a link that has come to lead out of it."""
    if not file.resolve().is_relative_to(spec.folder):
        raise ModelError(f"{file} leads outside the spec's folder {spec.folder}; put the file itself inside")
    return str(file.resolve().relative_to(spec.folder))


def _find_external_files(path: Path, digest: str, spec: "ModelSpec", context: RunContext) -> tuple[str, ...]:
    """Names of an ONNX source's external data files, on record by the model file's content."""
    key = {"onnx": digest}
    if (known := context.recall("external-data", key, ExternalFiles)) is not None:
        return known.files
    if path.stat().st_size <= _HERE_BYTES:
        found = _read_external_files(path, spec.folder)
    else:
        job = Job("read model", ReadExternalFiles(path, spec.folder), limits=step_limits(spec, "export"))
        found = context.run_job(context.local, job.name, job)
        context.progress.emit(Finished(job.name))
    context.remember("external-data", key, encode(found), [])
    return found.files


def export(spec: "ModelSpec", context: RunContext) -> Exported:
    """Export to canonical ONNX, freeze the golden set, and measure the parity of framework and ONNX.

    Raises SpecError, with every mistake that the headers of its files show, before anything heavy runs; InputError
    where the model's files change meanwhile, DataError where the spec has frozen another golden set.
    """
    from pipeline.compile.preflight import check_files  # with pydantic, which no worker needs

    try:
        keys = _ExportKeys.of(spec, context)
    except ModelError:
        check_files(spec)  # tells the other mistakes too
        raise
    model, golden = keys.recall(context)
    if model and golden:
        context.progress.emit(Finished("export", "cached"))
    else:
        check_files(spec)
        name = "golden set" if model else "export"
        outcome = context.run_job(context.local, name, _export_job(spec, context, model))
        if keys.reads != _export_reads(spec, context):
            raise InputError("the model's files changed while they were read; nothing was kept: run again")
        model, golden = model or outcome.model, outcome.golden
        if model is None:
            raise StepError("export: no model came of it; run again")
        if outcome.model:
            context.remember("export", keys.model, encode(model), model.blobs)
        context.remember("golden", keys.golden(model.digest), encode(golden), golden.blobs)
        context.progress.emit(Finished(name))
    settle_golden(spec, golden.golden, context)
    return _join(model, golden, keys)


def recorded_export(spec: "ModelSpec", context: RunContext) -> Exported | None:
    """The export that is on record; its golden set is '' where the model alone is. Raises as `settle_golden`."""
    keys = _ExportKeys.of(spec, context)
    model, golden = keys.recall(context)
    if model is None:
        return None
    if golden is not None:
        settle_golden(spec, golden.golden, context)
    return _join(model, golden or FrozenGolden("", None, (), Proof()), keys)


@dataclass(frozen=True)
class _ExportKeys:
    """Keys of the two records of an export. reads: digests of what they are made from."""

    spec: "ModelSpec"
    reads: Json
    model: Json

    @classmethod
    def of(cls, spec: "ModelSpec", context: RunContext) -> "_ExportKeys":
        reads = _export_reads(spec, context)
        return cls(spec, reads, {"source": reads["source"], "shapes": shapes_of(spec), **code_key(*WRITE_MODEL)})

    def golden(self, onnx: str) -> Json:
        """Of the golden set of an exported model. onnx: its digest."""
        golden = self.spec.golden
        return {
            **self.reads,
            "onnx": onnx,
            "golden": golden.model_dump(exclude={"frozen"}) if golden else None,
            **({"states": encode(self.spec.states())} if self.spec.state else {}),
            "shapes": shapes_of(self.spec),
            "limits": limits_of(self.spec, "fp32", "export"),
            **code_key(ExportModel),
        }

    def recall(self, context: RunContext) -> tuple[OnnxModel | None, FrozenGolden | None]:
        """What is on record; a golden set only with its model."""
        model = context.recall("export", self.model, OnnxModel)
        return model, context.recall("golden", self.golden(model.digest), FrozenGolden) if model else None


def _export_reads(spec: "ModelSpec", context: RunContext) -> Json:
    data = digest_of_path(spec.file(spec.golden.data)) if spec.golden else None
    return {"source": source_digests(spec, context), "data": data}


def _join(model: OnnxModel, golden: FrozenGolden, keys: _ExportKeys) -> Exported:
    reads = digest_of([keys.model, keys.golden(model.digest)])
    return Exported(model, golden.golden, golden.proof, golden.notes, golden.inputs, reads, golden.answers)


def _export_job(spec: "ModelSpec", context: RunContext, known: OnnxModel | None) -> Job[ExportOutcome]:
    source, golden = spec.source, spec.golden
    reads = ExportRequest(
        source.kind,
        spec.folder,
        spec.source_file,
        tuple(spec.tensors()),
        tuple(spec.named_dims()),
        tuple(spec.outputs) if spec.outputs else None,
        source.function or "",
        dict(source.arguments),
        source.weights,
        source.opset,
        source.module,
        MOST_EMBEDDED_BYTES,
        spec.states(),
    )
    request = ExportModel(
        reads,
        known.digest if known else None,
        spec.file(golden.data) if golden else None,
        golden.labels if golden else None,
        metrics_of(spec),
        limits_of(spec, "fp32", "export"),
        golden.sequence if golden else None,
    )
    return Job("export", request, context.store.uri, step_limits(spec, "export"))
