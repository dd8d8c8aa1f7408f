"""The steps that read calibration samples: what the tensors hold, and what to quantize."""

from collections.abc import Iterable

from builders.digest import digest_of, digest_of_file, digest_of_path
from builders.errors import DataError
from builders.types import Job
from pipeline.sources.source_files import source_files
from pipeline.spec.model import ModelSpec
from pipeline.steps.keys import MEASURING, OBSERVATION_CODE, STEP_LIMITS, shapes_of
from pipeline.values import Activation, Exported, Flavour, Json
from pipeline.workshop import Workshop, code_of, versions


def calibrate(spec: ModelSpec, exported: Exported, shop: Workshop) -> Json | None:
    """Observe every activation over the calibration samples: 'observations' (blob), from which all methods choose.

    None without calibration data, or when the model carries Q/DQ of its own.
    """
    if spec.calibration is None or exported.model.carries_qdq:
        return None
    key: Json = {
        "onnx": exported.model.digest,
        "data": _calibration_digest(spec),
        "shapes": shapes_of(spec),
        "versions": versions(*MEASURING),
        "code": code_of(*OBSERVATION_CODE),
    }

    def job() -> Job:
        shapes = {name: key["shapes"][name] for name in ("inputs", "dims")}
        data = {"root": str(spec.folder), "data": spec.calibration and spec.calibration.data, "digest": key["data"]}
        arguments = {"store": shop.store.uri, "onnx": exported.model.digest, **data, **shapes}
        return Job("calibrate", "pipeline.jobs.ranges:calibrate", arguments, STEP_LIMITS)

    return shop.once("calibrate", "calibrate", key, job, lambda value: [value["observations"]])


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
        "shapes": shapes_of(spec),
        "versions": versions(*MEASURING),
        "code": code_of(*OBSERVATION_CODE),
    }

    def job() -> Job:
        arguments = {name: key[name] for name in ("onnx", "activation", "calibration", "search")}
        shapes = {name: key["shapes"][name] for name in ("inputs", "dims")}
        data = {"root": str(spec.folder), "data": spec.calibration and spec.calibration.data, "digest": key["data"]}
        arguments |= {"store": shop.store.uri, "observations": ranges["observations"], **data, **shapes}
        return Job("choose", "pipeline.jobs.ranges:choose", arguments, STEP_LIMITS)

    blobs = ("model", "ranges", "choice")
    return shop.once("choose", f"choose int8 ({activation} activations)", key, job, lambda v: [v[b] for b in blobs])


def searched(flavours: Iterable[Flavour], spec: ModelSpec, exported: Exported) -> tuple[Activation, ...]:
    """The kinds of int8 that the spec wants searched for these flavours, each once."""
    if not spec.quantization.searches or exported.model.carries_qdq:
        return ()
    found = [flavour.scheme.activation for flavour in flavours if flavour.scheme and flavour.precision == "int8"]
    return tuple(dict.fromkeys(found))


def _calibration_digest(spec: ModelSpec) -> str:
    """Of the data, or of the code that generates it; data that this code reads by itself stays unseen."""
    wanted = spec.calibration
    if wanted is None or wanted.function is None:
        return digest_of_path(spec.file(wanted.file if wanted else ""))
    files = source_files(spec.folder, spec.file(wanted.file))
    return digest_of({"function": wanted.function, "files": [digest_of_file(file) for file in files]})
