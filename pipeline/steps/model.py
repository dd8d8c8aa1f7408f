"""The step that exports a model and freezes its golden set."""

from builders.digest import digest_of, digest_of_file
from builders.errors import InputError
from builders.jobs import Job
from pipeline.spec.model import ModelSpec, overrides
from pipeline.steps.golden import settle_golden
from pipeline.steps.keys import CHECK_CODE, EXPORT_CODE, metric_of, shapes_of, step_limits
from pipeline.steps.sources import source_digests
from pipeline.values import Exported, Json, OnnxModel, Proof
from pipeline.workshop import Workshop, code_of, versions


def export(spec: ModelSpec, shop: Workshop) -> Exported:
    """Export to canonical ONNX, freeze the golden set, and measure the parity of framework and ONNX.

    Two records, because a new golden value needs no new export; one process, because both need the framework.
    """
    reads = _export_reads(spec, shop)
    model_key = _model_key(spec, reads)
    model = shop.recall("export", model_key)
    if model and (golden := shop.recall("golden", _golden_key(spec, reads, model["onnx"]))):
        shop.progress.finished("export", "cached")
        settle_golden(spec, golden["golden"], shop)
        return _exported(model, golden, model_key, _golden_key(spec, reads, model["onnx"]))
    name = "golden set" if model else "export"
    value = shop.shown(shop.local, name, _export_job(spec, shop, model))
    if reads != _export_reads(spec, shop):
        raise InputError("the model's files changed while they were read; nothing was kept: run again")
    if model is None:
        model = value["model"]
        shop.remember("export", model_key, model, [model["onnx"]])
    golden = value["golden"]
    shop.remember("golden", _golden_key(spec, reads, model["onnx"]), golden, _golden_blobs(golden))
    shop.progress.finished(name, "done")
    settle_golden(spec, golden["golden"], shop)
    return _exported(model, golden, model_key, _golden_key(spec, reads, model["onnx"]))


def _golden_blobs(golden: Json) -> list[str]:
    return [golden[name] for name in ("golden", "inputs") if golden[name]]


def recorded_export(spec: ModelSpec, shop: Workshop) -> Exported | None:
    """The export that is on record; its golden set is '' where the model alone is. Raises as `settle_golden`."""
    reads = _export_reads(spec, shop)
    model_key = _model_key(spec, reads)
    model = shop.recall("export", model_key)
    if model is None:
        return None
    golden_key = _golden_key(spec, reads, model["onnx"])
    golden = shop.recall("golden", golden_key)
    if golden is not None:
        settle_golden(spec, golden["golden"], shop)
    none: Json = {"golden": "", "inputs": None, "notes": (), "checks": (), "metrics": {}}
    return _exported(model, golden or none, model_key, golden_key)


def _exported(model: Json, golden: Json, *read: Json) -> Exported:
    return Exported(
        OnnxModel.from_json(model),
        golden["golden"],
        Proof.from_json(golden),
        tuple(golden["notes"]),
        model["blake3"],
        golden["inputs"],
        digest_of(read),
    )


def _export_reads(spec: ModelSpec, shop: Workshop) -> Json:
    """Content of the files that export and golden set are made from."""
    golden = spec.golden
    data = digest_of_file(spec.file(golden.data)) if golden else None
    return {"source": source_digests(spec, shop), "data": data}


def _model_key(spec: ModelSpec, reads: Json) -> Json:
    return {
        "source": reads["source"],
        "shapes": shapes_of(spec),
        "versions": versions("torch", "onnx", "onnxscript", "onnx-ir"),
        "code": code_of(*EXPORT_CODE),
    }


def _golden_key(spec: ModelSpec, reads: Json, onnx: str) -> Json:
    golden = spec.golden
    return {
        **reads,
        "onnx": onnx,
        "golden": golden.model_dump(exclude={"frozen"}) if golden else None,
        "shapes": shapes_of(spec),
        "limits": dict(overrides(spec, "fp32", "export")),
        "versions": versions("torch", "onnxruntime", "numpy"),
        "code": code_of(*EXPORT_CODE, *CHECK_CODE),
    }


def _export_job(spec: ModelSpec, shop: Workshop, known: Json | None) -> Job:
    golden = spec.golden
    arguments = {
        "store": shop.store.uri,
        "request": _export_request(spec),
        "onnx": known["onnx"] if known else None,
        "data": str(spec.file(golden.data)) if golden else None,
        "labels": golden.labels if golden else None,
        "metric": metric_of(spec),
        "limits": dict(overrides(spec, "fp32", "export")),
    }
    return Job("export", "pipeline.jobs.model:export_model", arguments, step_limits(spec, "export"))


def _export_request(spec: ModelSpec) -> Json:
    source = spec.source
    return {
        "kind": source.kind,
        "root": str(spec.folder),
        "file": source.file,
        "function": source.function,
        "arguments": dict(source.arguments),
        "weights": source.weights,
        "opset": source.opset,
        **shapes_of(spec),
    }
