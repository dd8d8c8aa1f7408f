"""The step export: its request, key, job and result."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import (
    DataError,
    InputError,
    ModelError,
    StepError,
    digest_of,
    digest_of_file,
    digest_of_path,
)
from enginesmith.core.reports.proof import RANDOM_INPUTS, Check
from enginesmith.core.state import step_inputs
from enginesmith.registry.store.base import Store, open_store
from enginesmith.user_code.entry_point import imported_packages, source_files
from pipeline.compile.run_context import RunContext, Work, import_versions
from pipeline.compile.steps.blobs import fetch, fetch_graph, proof_of, put_graph, this_machine
from pipeline.compile.steps.keys import WRITE_MODEL, code_key, metrics_of, shapes_of, step_limits
from pipeline.progress.events import Finished
from pipeline.sources.request import MOST_EMBEDDED_BYTES, ExportRequest
from pipeline.values import Exported, Json, KeptAnswers, LatestGolden, ModelShapes, OnnxModel, Proof
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec
    from validation.data.samples import Samples
    from validation.golden.golden_set import GoldenChange


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
        named_blobs = (self.golden, self.inputs, self.answers and self.answers.blob)
        return [digest for digest in named_blobs if digest]


@dataclass(frozen=True)
class ExportOutcome:
    """Result of an export. model: None if it was recorded."""

    model: OnnxModel | None
    golden: FrozenGolden


@dataclass(frozen=True)
class ExportModel:
    """Export to canonical ONNX, freeze the golden set and compare the two (the export stage).

    known: digest of the exported model if only the golden set is new.  data: file or folder of the golden inputs; None
    for random inputs.  labels, sequence: names of its arrays of right answers, and of each sample's sequence number;
    None if there are none.  steps: as in `read_steps`."""

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
        from builders.onnx_graphs.outline import load_outline
        from builders.onnx_graphs.structure import find_dependences
        from builders.reference import ReferenceSession, threads_for
        from pipeline.sources.export import export as export_source
        from validation.comparison.tasks import unmeasured_checks
        from validation.data.joined import golden_digests, read_order, read_steps, split, window_digests
        from validation.golden.golden_set import GoldenSet

        store, workdir, labels = open_store(context.store), context.workdir, self.labels
        extra_names = [name for name in (labels, self.sequence, self.steps and self.steps[1]) if name]
        samples = _open_golden_samples(self.data, self.source, extra_names) if self.data else None
        column = samples.column(labels) if samples and labels else None
        order = read_order(samples, self.sequence) if samples else None
        steps = read_steps(samples, self.steps, order, self.source.dims) if samples else None
        stored_onnx = fetch_graph(store, self.known, workdir / "known.onnx") if self.known else None
        export_result = export_source(self.source, samples, column, workdir, self.limits, stored_onnx, order, steps)
        golden_cases = GoldenSet.load(export_result.golden)
        drifts = export_result.spreads, export_result.free_running
        proof = Proof(export_result.checks, (), *drifts)
        if self.metrics:
            threads = threads_for(export_result.onnx, bool(self.source.states))
            with ReferenceSession(export_result.onnx, threads=threads, name="the exported model") as session:
                proof = proof_of(export_result.checks, session, golden_cases, self.metrics, "exported model", drifts)
        dependences = find_dependences(load_outline(export_result.onnx).graph)
        random_checks = () if self.data else (Check("export", RANDOM_INPUTS, "", "golden", None, None, True),)
        proof = replace(
            proof, checks=(*proof.checks, *random_checks, *unmeasured_checks(golden_cases, dependences, self.metrics))
        )
        inputs_digest = None
        if samples and self.source.states:
            sequences = (map(itemgetter(1), steps) for steps in split(samples, order))
            inputs_digest = store.put_bytes(window_digests(sequences))
        elif samples:
            case_inputs = (case.inputs for case in golden_cases.of_kind("golden"))
            inputs_digest = store.put_bytes(golden_digests(case_inputs, samples.complete))
        model = (
            None
            if self.known
            else store_model(store, export_result.onnx, ModelShapes(self.source.inputs, self.source.dims))
        )
        answers = KeptAnswers(store.put_file(export_result.answers), this_machine()) if export_result.answers else None
        golden = FrozenGolden(store.put_file(export_result.golden), inputs_digest, export_result.notes, proof, answers)
        return ExportOutcome(model, golden)


def _open_golden_samples(data: Path, request: ExportRequest, extra_names: Sequence[str]) -> "Samples":
    """The golden inputs. Raises DataError, or ModelError where the spec names other inputs than an ONNX source has."""
    from pipeline.sources.canonical import check_names
    from pipeline.sources.onnx_model import load_onnx, specs_of
    from validation.data.samples import Samples

    try:
        return Samples.open(data, step_inputs(request.inputs, request.states), request.dims, extra_names)
    except DataError:
        if request.kind == "onnx":
            path, has_libraries = request.root / request.file, bool(request.libraries)
            model_inputs, _ = specs_of(load_onnx(path, request.root, request.most_embedded_bytes, custom=has_libraries))
            input_names = [spec.name for spec in model_inputs if spec.name not in request.arguments]
            check_names(input_names, [spec.name for spec in request.inputs])
        raise


def store_model(store: Store, path: Path, shapes: ModelShapes) -> OnnxModel:
    """Put the canonical ONNX file `path` into the store: its digests, and the facts that later steps need."""
    from builders.onnx_graphs.bodies import list_libraries
    from builders.onnx_graphs.outline import load_outline
    from pipeline.quantization.graph import tidy
    from pipeline.quantization.insertion_points import count_integer_nodes
    from pipeline.quantization.schemes.qdq import carries_qdq
    from pipeline.quantization.shares import narrow_share, sizes_at
    from pipeline.sources.onnx_model import specs_of

    model = load_outline(path)
    inputs, outputs = specs_of(model)
    stored_graph = put_graph(store, path)
    opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    is_quantized = carries_qdq(model)
    share = narrow_share(tidy(model), (), sizes_at(shapes)) if is_quantized else None
    entries = tuple(library.entry for library in list_libraries(path).libraries)
    details = is_quantized, stored_graph.blob.blake3, count_integer_nodes(model), stored_graph.shards, share, entries
    return OnnxModel(stored_graph.blob.digest, tuple(inputs), tuple(outputs), opset, *details)


# Two records are kept, because a new golden set needs no new export; one process makes both, because both need the
# framework. A new golden set is compared with the previous one: a change is reported. If the spec froze a golden set,
# another one is refused.


def check_frozen(golden: str, work: Work) -> None:
    """Raise DataError if the golden set differs from the spec's frozen one."""
    spec = work.spec
    spec_digest = spec.golden.frozen if spec.golden else None
    if spec_digest is not None and spec_digest != golden:
        raise DataError(
            f"golden.frozen is {spec_digest[:12]}, but the golden set is now {golden[:12]}: "
            f"{told_change(work.context.store, spec_digest, golden)}; put the data and the source back, or accept the "
            f"change: {_format_accept_command(spec, work.context.store)}"
        )


def settle_golden(golden: str, work: Work) -> None:
    """Report how the golden set differs from the previous one, and record it as the latest. Raises as
    `check_frozen`."""
    context = work.context
    check_frozen(golden, work)
    last_digest = latest_golden(work.spec.model, context)
    if last_digest == golden:
        return
    if last_digest is not None:
        change = told_change(context.store, last_digest, golden)
        context.progress.emit(Finished("golden set", reason=change, words=f"changed since the last run: {change}"))
    context.remember("latest-golden", {"model": work.spec.model}, encode(LatestGolden(golden)), [])


def latest_golden(model: str, context: RunContext) -> str | None:
    """Digest of the golden set that this registry last saw for a model."""
    golden_record = context.recall("latest-golden", {"model": model}, LatestGolden)
    return golden_record.golden if golden_record else None


def golden_change(store: Store, before: str, after: str) -> "GoldenChange":
    """The difference between two golden sets of a registry. Raises DataError for a blob that is not a golden set."""
    from validation.golden.golden_set import GoldenSet, change

    with TemporaryDirectory(prefix="enginesmith-golden-") as folder:
        golden_sets = [GoldenSet.load(fetch(store, digest, Path(folder) / digest)) for digest in (before, after)]
        return change(*golden_sets)


def told_change(store: Store, before: str, after: str) -> str:
    """The difference as text; if the older set is no longer in the registry, a text that says this."""
    if not store.has(before):
        return f"{before[:12]} is not in this registry, so the differences are unknown"
    return str(golden_change(store, before, after))


def _format_accept_command(spec: "ModelSpec", store: Store) -> str:
    """The command that accepts a golden set; if the spec is a copy, the commands to run beside the original."""
    registry_args = ["--registry", store.uri.removeprefix("file://")]
    if not spec.is_copy:
        return shlex.join(["enginesmith", "debug", "golden", "accept", spec.address, *registry_args])
    args_text = shlex.join(registry_args)
    return (
        f"enginesmith debug golden accept SPEC {args_text} where the spec of {spec.address} is kept, then enginesmith "
        f"prefect register SPEC {args_text}"
    )


# Protobuf takes up to 90 times a file's size when there is nothing in it but empty nodes: larger files are parsed in a
# process of their own, which has a limit.
_HERE_BYTES = 32 << 20


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
        """The names of the files. Raises ModelError for a file that is no ONNX model, or leads out of the spec's
        folder."""
        return _read_external_files(self.path, self.root)


def _read_external_files(path: Path, root: Path) -> ExternalFiles:
    from pipeline.sources.onnx_model import external_files

    return ExternalFiles(tuple(str(file.relative_to(path.parent)) for file in external_files(path, root)))


def source_digests(spec: "ModelSpec", context: RunContext) -> Mapping[str, Any]:
    """Digests of everything the export reads: the entry point with its local imports, weights, external data; and the
    versions of the packages that the entry point imports. Raises ModelError for a file outside of the spec's folder."""
    source, packages = spec.source, dict[str, str]()
    files = [spec.file(spec.source_file)]
    if source.kind == "torch":
        packages = import_versions(*imported_packages(spec.folder, files[0], source.module))
        files = list(source_files(spec.folder, files[0], source.module))
    digests_by_path = dict[Path, str]()
    if source.kind == "onnx":
        digests_by_path[files[0]] = digest_of_file(files[0])
        external_names = _find_external_files(files[0], digests_by_path[files[0]], spec, context)
        files += [files[0].parent / name for name in external_names]
    files += [spec.file(name) for name in (source.weights, *(library.file for library in source.libraries)) if name]
    names = {
        place_of(file, spec): digests_by_path.get(file) or digest_of_file(file) for file in files if file.is_file()
    }
    return {"spec": source.model_dump(), "files": names, "packages": packages}


def place_of(file: Path, spec: "ModelSpec") -> str:
    """Where a file lies in the spec's folder. Raises ModelError for a link that now leads out of it."""
    if not file.resolve().is_relative_to(spec.folder):
        raise ModelError(f"{file} leads outside the spec's folder {spec.folder}; put the file itself inside")
    return str(file.resolve().relative_to(spec.folder))


def _find_external_files(path: Path, digest: str, spec: "ModelSpec", context: RunContext) -> tuple[str, ...]:
    """Names of an ONNX source's external data files, on record by the model file's content."""
    key = {"onnx": digest}
    if (file_record := context.recall("external-data", key, ExternalFiles)) is not None:
        return file_record.files
    if path.stat().st_size <= _HERE_BYTES:
        file_list = _read_external_files(path, spec.folder)
    else:
        job = Job("read model", ReadExternalFiles(path, spec.folder), limits=step_limits(spec, "export"))
        file_list = context.run_to_end(context.local, job.name, job)
    context.remember("external-data", key, encode(file_list), [])
    return file_list.files


def export(work: Work) -> Exported:
    """Export to canonical ONNX, freeze the golden set, and measure the parity of framework and ONNX.

    Raises SpecError, with every mistake that the headers of its files show, before anything heavy runs; InputError
    where the model's files change meanwhile, DataError where the spec has frozen another golden set, StepError if the
    job returned no model.
    """
    spec, context = work.spec, work.context
    from pipeline.compile.preflight import check_files  # with pydantic, which no worker needs

    try:
        keys = _ExportKeys.of(work)
    except ModelError:
        check_files(spec)  # reports the other mistakes too
        raise
    model, golden = keys.recall(context)
    if model and golden:
        context.progress.emit(Finished("export", "cached"))
    else:
        check_files(spec)
        name = "golden set" if model else "export"
        outcome = context.run_job(context.local, name, _export_job(work, model))
        if keys.reads != _export_reads(work):
            raise InputError("the model's files changed while they were read; nothing was kept: run again")
        model, golden = model or outcome.model, outcome.golden
        if model is None:
            raise StepError("export: it produced no model; run again")
        if outcome.model:
            context.remember("export", keys.model, encode(model), model.blobs)
        context.remember("golden", keys.golden(model.digest), encode(golden), golden.blobs)
        context.progress.emit(Finished(name))
    settle_golden(golden.golden, work)
    return _join(model, golden, keys)


def recorded_export(work: Work) -> Exported | None:
    """The export that is on record; its golden set is '' where the model alone is. Raises as `check_frozen`."""
    keys = _ExportKeys.of(work)
    model, golden = keys.recall(work.context)
    if model is None:
        return None
    if golden is not None:
        check_frozen(golden.golden, work)
    return _join(model, golden or FrozenGolden("", None, (), Proof()), keys)


@dataclass(frozen=True)
class _ExportKeys:
    """Keys of the two records of an export. reads: digests of what they are made from."""

    spec: "ModelSpec"
    reads: Json
    model: Json

    @classmethod
    def of(cls, work: Work) -> "_ExportKeys":
        reads = _export_reads(work)
        return cls(
            work.spec, reads, {"source": reads["source"], "shapes": shapes_of(work.spec), **code_key(*WRITE_MODEL)}
        )

    def golden(self, onnx: str) -> Json:
        """The key of the golden set of an exported model. onnx: digest of that model."""
        golden = self.spec.golden
        return {
            **self.reads,
            "onnx": onnx,
            "golden": golden.model_dump(exclude={"frozen"}) if golden else None,
            **({"states": encode(self.spec.states())} if self.spec.state else {}),
            "shapes": self.model["shapes"],
            "limits": self.spec.validation.limits_for("fp32", "export"),
            **code_key(ExportModel),
        }

    def recall(self, context: RunContext) -> tuple[OnnxModel | None, FrozenGolden | None]:
        """The recorded results; a golden set only with its model."""
        model = context.recall("export", self.model, OnnxModel)
        return model, context.recall("golden", self.golden(model.digest), FrozenGolden) if model else None


def _export_reads(work: Work) -> Json:
    spec = work.spec
    data_digest = digest_of_path(spec.file(spec.golden.data)) if spec.golden else None
    return {"source": source_digests(spec, work.context), "data": data_digest}


def _join(model: OnnxModel, golden: FrozenGolden, keys: _ExportKeys) -> Exported:
    reads_digest = digest_of([keys.model, keys.golden(model.digest)])
    return Exported(model, golden.golden, golden.proof, golden.notes, golden.inputs, reads_digest, golden.answers)


def _export_job(work: Work, stored_model: OnnxModel | None) -> Job[ExportOutcome]:
    spec = work.spec
    source, golden = spec.source, spec.golden
    export_request = ExportRequest(
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
        tuple((library.file, library.cuda) for library in source.libraries),
    )
    request = ExportModel(
        export_request,
        stored_model.digest if stored_model else None,
        spec.file(golden.data) if golden else None,
        golden.labels if golden else None,
        metrics_of(spec),
        spec.validation.limits_for("fp32", "export"),
        golden.sequence if golden else None,
        golden.joined if golden else None,
    )
    return Job("export", request, work.context.store.uri, step_limits(spec, "export"))
