"""The steps on the driver's side: what each one reads (its key), and the job that does it when the key is new.

Every function here is plain: tests call it directly, the in-process runner calls it, a Prefect task wraps it.
"""

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from builders import backends
from builders.cuda import gpus
from builders.digest import digest_of, digest_of_file, digest_of_path
from builders.errors import (
    DataError,
    EngineryError,
    InputError,
    IntegrityError,
    ModelError,
    StepError,
    UnavailableError,
)
from builders.onnxruntime import cpu_kind
from builders.types import CALIBRATED, BuildFailure, BuildRequest, Job, Limits, tensor_from_json
from pipeline.sources.source_files import imported_packages, source_files
from pipeline.spec import ModelSpec, overrides
from pipeline.values import Activation, Built, Exported, Flavour, Graph, Json, OnnxModel, Proof, Unit
from pipeline.verdict import Judged, make_report, now
from pipeline.workshop import Workshop, code_of, import_versions, versions

# Nearly all of this machine's memory: a runaway step must not take the machine with it.
EXPORT_LIMITS = Limits(
    timeout_s=3600, memory_mib=int(0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20
)
# The code that does each step. These steps run again when it changes; an engine does not, and its key leaves it out.
EXPORT_CODE = ("pipeline.jobs", "pipeline.export", "pipeline.sources")
QUANTIZATION_CODE = ("pipeline.jobs", "pipeline.quantization", "pipeline.sources")
CHECK_CODE = ("builders", "validation", *QUANTIZATION_CODE)
OBSERVATION_CODE = (*QUANTIZATION_CODE, "validation")
# What rewrites graphs, emulates their arithmetic and measures them.
MEASURING = ("onnx", "onnxruntime", "numpy", "ml_dtypes")


def export(spec: ModelSpec, shop: Workshop) -> Exported:
    """Export to canonical ONNX, freeze the golden set, and measure the parity of framework and ONNX.

    Two records, because a new golden value needs no new export; one process, because both need the framework.
    """
    reads = _export_reads(spec, shop)
    model_key = {
        "source": reads["source"],
        "shapes": _shapes(spec),
        "versions": versions("torch", "onnx", "onnxscript", "onnx-ir"),
        "code": code_of(*EXPORT_CODE),
    }
    model = shop.recall("export", model_key)
    if model and (golden := shop.recall("golden", _golden_key(spec, reads, model["onnx"]))):
        shop.progress.finished("export", "cached")
        return _exported(model, golden)
    name = "golden set" if model else "export"
    value = shop.shown(shop.local, name, _export_job(spec, shop, model))
    if reads != _export_reads(spec, shop):
        raise InputError("the model's files changed while they were read; nothing was kept: run again")
    if model is None:
        model = value["model"]
        shop.remember("export", model_key, model, [model["onnx"]])
    golden = value["golden"]
    shop.remember("golden", _golden_key(spec, reads, model["onnx"]), golden, [golden["golden"]])
    shop.progress.finished(name, "done")
    return _exported(model, golden)


def _exported(model: Json, golden: Json) -> Exported:
    return Exported(OnnxModel.from_json(model), golden["golden"], Proof.from_json(golden), tuple(golden["notes"]))


def _export_reads(spec: ModelSpec, shop: Workshop) -> Json:
    """Content of the files that export and golden set are made from."""
    golden = spec.golden
    data = digest_of_file(spec.file(golden.data)) if golden else None
    return {"source": _source_digests(spec, shop), "data": data}


def _golden_key(spec: ModelSpec, reads: Json, onnx: str) -> Json:
    golden = spec.golden
    return {
        **reads,
        "onnx": onnx,
        "golden": golden.model_dump() if golden else None,
        "shapes": _shapes(spec),
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
        "metric": _metric(spec),
        "limits": dict(overrides(spec, "fp32", "export")),
    }
    return Job("export", "pipeline.jobs:export_model", arguments, EXPORT_LIMITS)


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
        **_shapes(spec),
    }


def choose(activation: Activation, spec: ModelSpec, exported: Exported, ranges: Json | None, shop: Workshop) -> Json:
    """Search what to quantize and how, for int8 with one kind of activation: model, ranges and frontier, as blobs."""
    wanted = spec.quantization
    if ranges is None or exported.model.carries_qdq:
        raise DataError("there is nothing to choose: the model carries Q/DQ of its own, or calibration.data is missing")
    key: Json = {
        "onnx": exported.model.digest,
        "activation": activation,
        "seen": ranges["seen"],
        "data": _calibration_digest(spec),
        "calibration": spec.calibration and spec.calibration.model_dump(include={"method", "percentile"}),
        "search": wanted.model_dump(include={"smoothing", "floor", "overrides"}, mode="json"),
        "shapes": _shapes(spec),
        "versions": versions(*MEASURING),
        "code": code_of(*OBSERVATION_CODE),
    }

    def job() -> Job:
        arguments = {name: key[name] for name in ("onnx", "activation", "calibration", "search")}
        shapes = {name: key["shapes"][name] for name in ("inputs", "dims")}
        data = {"root": str(spec.folder), "data": spec.calibration and spec.calibration.data, "digest": key["data"]}
        arguments |= {"store": shop.store.uri, "observations": ranges["observations"], **data, **shapes}
        return Job("choose", "pipeline.jobs:choose", arguments, EXPORT_LIMITS)

    blobs = ("model", "ranges", "choice")
    return shop.once("choose", f"choose int8 ({activation} activations)", key, job, lambda v: [v[b] for b in blobs])


def searched(flavours: Iterable[Flavour], spec: ModelSpec, exported: Exported) -> tuple[Activation, ...]:
    """The kinds of int8 that the spec wants searched for these flavours, each once."""
    if not spec.quantization.searches or exported.model.carries_qdq:
        return ()
    found = [flavour.scheme.activation for flavour in flavours if flavour.scheme and flavour.precision == "int8"]
    return tuple(dict.fromkeys(found))


def quantize(
    flavour: Flavour,
    spec: ModelSpec,
    exported: Exported,
    ranges: Json | None,
    choices: Mapping[str, Json],
    shop: Workshop,
) -> Graph:
    """Write the model in one flavour and measure what that cost (the quantization joint).

    choices: what `choose` gave, by kind of activation.
    """
    model = exported.model
    if flavour.precision == "fp32" or model.carries_qdq:
        return Graph(flavour, model.digest, model.inputs, model.outputs, proof=Proof(metrics=exported.proof.metrics))
    if flavour.precision in CALIBRATED and ranges is None:
        raise DataError(
            f"{flavour.precision} needs real samples, and the model carries no Q/DQ of its own; add calibration.data"
        )
    key = {
        "onnx": model.digest,
        "flavour": asdict(flavour),
        "seen": ranges and ranges["seen"],
        "calibration": spec.calibration and spec.calibration.model_dump(include={"method", "percentile"}),
        "overrides": [item.model_dump() for item in spec.quantization.overrides],
        "choice": _choice(flavour, choices),
        "versions": versions(*MEASURING),
        "code": code_of(*QUANTIZATION_CODE),
    }

    def job() -> Job:
        arguments = {name: key[name] for name in ("onnx", "flavour", "calibration", "overrides", "choice")}
        arguments["observations"] = ranges and ranges["observations"]
        return Job("quantize", "pipeline.jobs:quantize", {"store": shop.store.uri, **arguments}, EXPORT_LIMITS)

    value = shop.once("quantize", f"write {flavour.name}", key, job, _graph_blobs)
    inputs, outputs = (tuple(map(tensor_from_json, value[name])) for name in ("inputs", "outputs"))
    graph = Graph(flavour, value["model"], inputs, outputs, value["scales"], tuple(value["notes"]))
    return replace(graph, proof=_check_graph(spec, exported, graph, shop))


def _choice(flavour: Flavour, choices: Mapping[str, Json]) -> Json | None:
    return choices.get(flavour.scheme.activation) if flavour.precision == "int8" and flavour.scheme else None


def _graph_blobs(value: Json) -> list[str]:
    return [digest for digest in (value["model"], value["ranges"]) if digest]


def calibrate(spec: ModelSpec, exported: Exported, shop: Workshop) -> Json | None:
    """Observe every activation over the calibration samples: 'observations' (blob), from which all methods choose.

    None without calibration data, or when the model carries Q/DQ of its own.
    """
    if spec.calibration is None or exported.model.carries_qdq:
        return None
    key: Json = {
        "onnx": exported.model.digest,
        "data": _calibration_digest(spec),
        "shapes": _shapes(spec),
        "versions": versions(*MEASURING),
        "code": code_of(*OBSERVATION_CODE),
    }

    def job() -> Job:
        shapes = {name: key["shapes"][name] for name in ("inputs", "dims")}
        data = {"root": str(spec.folder), "data": spec.calibration and spec.calibration.data, "digest": key["data"]}
        arguments = {"store": shop.store.uri, "onnx": exported.model.digest, **data, **shapes}
        return Job("calibrate", "pipeline.jobs:calibrate", arguments, EXPORT_LIMITS)

    return shop.once("calibrate", "calibrate", key, job, lambda value: [value["observations"]])


def _calibration_digest(spec: ModelSpec) -> str:
    """Of the data, or of the code that generates it; data that this code reads by itself stays unseen."""
    wanted = spec.calibration
    if wanted is None or wanted.function is None:
        return digest_of_path(spec.file(wanted.file if wanted else ""))
    files = source_files(spec.folder, spec.file(wanted.file))
    return digest_of({"function": wanted.function, "files": [digest_of_file(file) for file in files]})


def _check_graph(spec: ModelSpec, exported: Exported, graph: Graph, shop: Workshop) -> Proof:
    precision = graph.flavour.precision
    key = {
        "reference": exported.model.digest,
        "graph": graph.model,
        "golden": exported.golden,
        "precision": precision,
        "limits": dict(overrides(spec, precision, "quantization")),
        "metric": _metric(spec),
        "versions": versions(*MEASURING),
        "code": code_of(*CHECK_CODE),
    }

    def job() -> Job:
        arguments = {name: value for name, value in key.items() if name not in ("versions", "code")}
        return Job("check graph", "pipeline.jobs:check_graph", {"store": shop.store.uri, **arguments}, EXPORT_LIMITS)

    return Proof.from_json(shop.once("check-graph", f"check {graph.flavour.name}", key, job, lambda _: []))


def build(unit: Unit, spec: ModelSpec, shop: Workshop) -> Built:
    """Compile one unit in a process of its own; whatever happens to it, the other units go on."""
    if unit.action == "cached" and (known := recall_engine(unit.request, shop)):
        shop.progress.finished(unit.name, "cached")
        return Built(unit, **known, cached=True)
    try:
        value = shop.shown(shop.executor, unit.name, _build_job(unit, spec, shop))
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        return Built(unit, failure=_failure(unit, spec, shop, error))
    shop.progress.finished(unit.name, f"built in {value['seconds']:.1f} s")
    return Built(unit, **_engine_fields(value))


def _failure(unit: Unit, spec: ModelSpec, shop: Workshop, error: EngineryError) -> BuildFailure:
    kind, log = (error.kind, error.log) if isinstance(error, StepError) else ("error", "")
    if kind == "cancelled":
        raise error
    shop.progress.finished(unit.name, f"failed: {str(error).splitlines()[0]}")
    return BuildFailure(unit.name, kind, str(error), log, reproduce(unit, spec, shop.store.uri))


def _build_job(unit: Unit, spec: ModelSpec, shop: Workshop) -> Job:
    limits = Limits(spec.build.timeout_s, spec.build.memory_mib)
    arguments = {"store": shop.store.uri, "request": unit.request.to_json()}
    return Job(unit.name, "pipeline.jobs:build_engine", arguments, limits, needs(unit.request))


def reproduce(unit: Unit, spec: ModelSpec, registry: str) -> str:
    """The command that builds this unit alone, from the steps that are on record in `registry`."""
    request = unit.request
    words = ("enginery", "build", str(spec.path), "--registry", registry, "--targets", request.target.name)
    return shlex.join([*words, "--precisions", request.precision, "--backends", request.backend])


def needs(request: BuildRequest) -> dict[str, str]:
    """Node labels that suit a unit: a GPU generation's own nodes, any node for the CPU."""
    return {} if request.target.is_cpu else {"enginery/sm": request.target.sm}


def recall_engine(request: BuildRequest, shop: Workshop) -> Json | None:
    """The engine on record for a build key, as fields of `Built`."""
    value = shop.recall("build", {"build": request.key})
    return None if value is None else _engine_fields(value)


def _engine_fields(value: Json) -> Json:
    fields = {name: value[name] for name in ("digest", "size_bytes", "suffix", "seconds")}
    return {**fields, "notes": tuple(value["notes"])}


def validate(built: Built, spec: ModelSpec, exported: Exported, shop: Workshop) -> Judged:
    """Put a unit's three joints side by side and reach a verdict; an engine that cannot run here stays unproven."""
    if built.failure:
        return Judged(built)
    request = built.unit.request
    cannot_run = backends.configure(request.backend, dict(request.options)).runs(request.target)
    proofs = [exported.proof, built.unit.graph.proof]
    proofs += [] if cannot_run else [try_to_prove(built, spec, exported.golden, shop)]
    judged = Judged(built, make_report(built, exported.golden, proofs, cannot_run), proofs[-1].metrics)
    shop.progress.finished(f"verdict on {built.unit.name}", f"{judged.verdict}: {judged.reason}")
    return judged


CRASHED = {
    "joint": "engine",
    "name": "runs",
    "output": "",
    "case": "all",
    "value": None,
    "limit": None,
    "passed": False,
}


def try_to_prove(built: Built, spec: ModelSpec, golden: str, shop: Workshop, afresh: bool = False) -> Proof:
    """`prove_engine`, where an engine that cannot be opened or run has failed, and stops nobody else.

    Raises UnavailableError and IntegrityError, which say nothing about the engine, and StepError when cancelled.
    """
    try:
        return prove_engine(built, spec, golden, shop, afresh)
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        return Proof(({**CRASHED, "note": str(error)},))


def prove_engine(built: Built, spec: ModelSpec, golden: str, shop: Workshop, afresh: bool = False) -> Proof:
    """Run an engine against the graph it was built from. afresh: also when the same proof is on record."""
    request = built.unit.request
    arguments = {
        "engine": built.digest,
        "golden": golden,
        "limits": dict(overrides(spec, request.precision, "engine")),
        "metric": _metric(spec),
    }
    key = {
        **arguments,
        "request": request.key,
        "machine": _machine(request),
        "versions": versions(*MEASURING),
        "code": code_of(*CHECK_CODE),
        **({"at": now()} if afresh else {}),
    }

    def job() -> Job:
        limits = Limits(spec.build.timeout_s, spec.build.memory_mib)
        known = {"store": shop.store.uri, "request": request.to_json(), "suffix": built.suffix}
        return Job(f"prove {built.unit.name}", "pipeline.jobs:check_engine", {**known, **arguments}, limits)

    return Proof.from_json(shop.once("check-engine", f"prove {built.unit.name}", key, job, lambda _: []))


def _machine(request: BuildRequest) -> list[str]:
    """What a proof depends on of the machine that it was made on."""
    return [cpu_kind()] if request.target.is_cpu else sorted({gpu.name for gpu in gpus()})


def _metric(spec: ModelSpec) -> Json | None:
    return spec.golden.metric.model_dump() if spec.golden and spec.golden.metric else None


def _shapes(spec: ModelSpec) -> Json:
    return {
        "inputs": [asdict(tensor) for tensor in spec.tensors()],
        "outputs": list(spec.outputs) if spec.outputs else None,
        "dims": [asdict(dim) for dim in spec.named_dims()],
    }


def _source_digests(spec: ModelSpec, shop: Workshop) -> Mapping[str, Any]:
    """Content of everything the export reads: the entry point with its local imports, weights, external data; and the
    versions of the packages that the entry point imports."""
    source, packages = spec.source, dict[str, str]()
    files = [spec.file(source.file)]
    if source.kind == "torch":
        packages = import_versions(*imported_packages(spec.folder, files[0]))
        files = list(source_files(spec.folder, files[0]))
    if source.kind == "onnx":
        files += [files[0].parent / name for name in _external_data(spec, shop)]
    if source.weights:
        files.append(spec.file(source.weights))
    names = {_place(file, spec): digest_of_file(file) for file in files if file.is_file()}
    return {"spec": source.model_dump(), "files": names, "packages": packages}


def _place(file: Path, spec: ModelSpec) -> str:
    """Where a file lies in the spec's folder. Raises ModelError for a link that has come to lead out of it."""
    if not file.resolve().is_relative_to(spec.folder):
        raise ModelError(f"{file} leads outside the spec's folder {spec.folder}; put the file itself inside")
    return str(file.resolve().relative_to(spec.folder))


def _external_data(spec: ModelSpec, shop: Workshop) -> list[str]:
    """Names of an ONNX source's external data files, remembered by the model file's content."""
    path = spec.file(spec.source.file)
    key = {"onnx": digest_of_file(path)}
    if (known := shop.recall("external-data", key)) is None:
        from pipeline.sources.onnx_model import external_files

        known = {"files": [str(item.relative_to(path.parent)) for item in external_files(path, spec.folder)]}
        shop.remember("external-data", key, known, [])
    names: list[str] = known["files"]
    return names
