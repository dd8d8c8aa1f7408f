"""The step that exports a model and freezes its golden set."""

from builders.execution.jobs import Job
from enginery.core.codec import encode
from enginery.core.digest import digest_of, digest_of_file
from enginery.core.errors import InputError, StepError
from pipeline.compile.jobs.model import ExportedModel, ExportModel, ExportOutcome, FrozenGolden
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.golden import settle_golden
from pipeline.compile.steps.keys import WRITE_MODEL, code_key, limits_of, metric_of, shapes_of, step_limits
from pipeline.compile.steps.sources import source_digests
from pipeline.progress.events import Finished
from pipeline.sources.request import ExportRequest
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Json, OnnxModel, Proof


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
