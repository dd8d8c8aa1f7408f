"""The steps that read calibration samples: what the tensors hold, and what to quantize."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from builders.digest import digest_of, digest_of_file, digest_of_path
from builders.errors import DataError
from builders.jobs import Executor, Job, Needs
from pipeline.closure.code import backend_root
from pipeline.sources.source_files import source_files
from pipeline.spec.model import ModelSpec
from pipeline.steps.engines import USUAL_MEMORY_MIB
from pipeline.steps.keys import CHOOSE, MERGE, OBSERVE, OBSERVE_THERE, code_key, shapes_of, step_limits
from pipeline.steps.race import engine_to_race
from pipeline.values import Exported, Flavour, Json, Searched
from pipeline.workshop import Workshop

Part = tuple[int, int]


def parts_of(spec: ModelSpec, exported: Exported) -> tuple[Part, ...]:
    """The parts (index, of how many) that the calibration samples are observed in.

    None without calibration data, or when the model carries Q/DQ of its own.
    """
    if spec.calibration is None or exported.model.carries_qdq:
        return ()
    return tuple((index, spec.calibration.parts) for index in range(spec.calibration.parts))


def observe(part: Part, spec: ModelSpec, exported: Exported, shop: Workshop) -> Json:
    """Observe every activation over some of the samples: 'observations' (blob), from which all methods choose, and
    'inputs' (blob), by which golden samples are recognized.

    A part that is on record is not observed again, so an interrupted calibration goes on with what it has not seen. One
    part of several is observed where engines are built, on any node that sees the same samples under the same path.
    """
    key: Json = {
        "onnx": exported.model.digest,
        "data": _samples(spec),
        "part": list(part),
        "shapes": shapes_of(spec),
        **code_key(OBSERVE, OBSERVE_THERE),
    }

    def job() -> Job:
        samples = {"root": str(spec.folder), **key["data"], **_inputs(key["shapes"])}
        arguments = {"store": shop.store.uri, "onnx": key["onnx"], "part": key["part"], "samples": samples}
        return Job("calibrate", OBSERVE, arguments, step_limits(spec, "calibration"))

    def spread(local: Executor, name: str, job: Job) -> Json:
        value: Json | None = None
        if shop.executor is not local:
            value = _elsewhere(name, job, shop)
        return shop.shown(local, name, job) if value is None else value

    index, count = part
    name = "calibrate" if count == 1 else f"calibrate {index + 1}/{count}"
    run = spread if count > 1 else None
    return shop.once("calibrate", name, key, job, _blobs, run)


def _elsewhere(name: str, job: Job, shop: Workshop) -> Json | None:
    """What the job gives on a node of the cluster; None where the samples, or what they need, are not to be had."""
    there = replace(job, function=OBSERVE_THERE, needs=Needs(memory_mib=USUAL_MEMORY_MIB))
    try:
        value: Json | None = shop.shown(shop.executor, name, there)
        return value
    except DataError:
        return None  # it is said again here, if it is true


def merge(parts: Sequence[Json], spec: ModelSpec, shop: Workshop) -> Json:
    """The observations of all parts as one, which is what a single pass would have seen."""
    blobs = {"parts": [part["observations"] for part in parts], "inputs": [part["inputs"] for part in parts]}
    key = {**blobs, **code_key(MERGE)}

    def job() -> Job:
        arguments = {"store": shop.store.uri, **blobs}
        return Job("merge", MERGE, arguments, step_limits(spec, "calibration"))

    return shop.once("merge", "merge calibration", key, job, _blobs)


def _blobs(value: Json) -> list[str]:
    return [value["observations"], value["inputs"]]


def choose(kind: Searched, spec: ModelSpec, exported: Exported, ranges: Json | None, shop: Workshop) -> Json:
    """Search what to quantize and how, for one kind of int8: model, ranges and frontier, as blobs."""
    wanted = spec.quantization
    if exported.model.carries_qdq:
        raise DataError("there is nothing to choose: the model carries Q/DQ of its own, and they stay")
    if ranges is None:
        raise DataError("what to quantize is chosen on real samples; add calibration.data")
    race = engine_to_race(kind, spec, exported)
    raced = [backend_root(race["request"]["backend"])] if race and "request" in race else []
    key: Json = {
        "onnx": exported.model.digest,
        **kind._asdict(),
        "seen": ranges["seen"],
        "data": _samples(spec),
        "answer": _answer(spec, exported),
        "calibration": spec.calibration and spec.calibration.model_dump(include={"method", "percentile"}),
        "search": wanted.model_dump(include={"smoothing", "floor", "overrides"}, mode="json"),
        "race": race,
        "shapes": shapes_of(spec),
        **code_key(CHOOSE, *raced),
    }

    def job() -> Job:
        names = ("onnx", "activation", "weight_levels", "calibration", "search", "race", "answer")
        arguments = {name: key[name] for name in names}
        samples = {"root": str(spec.folder), **key["data"], **_inputs(key["shapes"])}
        arguments |= {"store": shop.store.uri, "observations": ranges["observations"], "samples": samples}
        return Job("choose", CHOOSE, arguments, step_limits(spec, "quantization"))

    blobs = ("model", "ranges", "choice", "smoothed")
    return shop.once("choose", f"choose {kind.name}", key, job, lambda v: [v[b] for b in blobs])


def searched(flavours: Iterable[Flavour], spec: ModelSpec, exported: Exported) -> tuple[Searched, ...]:
    """The kinds of int8 that the spec wants searched for these flavours, each once."""
    if not spec.quantization.searches or exported.model.carries_qdq:
        return ()
    return tuple(dict.fromkeys(flavour.searched for flavour in flavours if flavour.searched))


def _samples(spec: ModelSpec) -> Json:
    """What the calibration samples are, and the digest that says so."""
    wanted = spec.calibration
    return {
        "data": wanted and wanted.data,
        "digest": calibration_digest(spec),
        "labels": wanted and wanted.labels,
    }


def _inputs(shapes: Json) -> Json:
    return {name: shapes[name] for name in ("inputs", "dims")}


def _answer(spec: ModelSpec, exported: Exported) -> str | None:
    """The output whose argmax is judged by labels; None where there are none."""
    if spec.calibration is None or spec.calibration.labels is None:
        return None
    metric = spec.golden.metric if spec.golden else None
    return metric.output if metric else exported.model.outputs[0].name


def calibration_digest(spec: ModelSpec) -> str:
    """Of the data, or of the code that generates it; data that this code reads by itself stays unseen."""
    wanted = spec.calibration
    if wanted is None or wanted.function is None:
        return digest_of_path(spec.file(wanted.file if wanted else ""))
    files = source_files(spec.folder, spec.file(wanted.file))
    return digest_of({"function": wanted.function, "files": [digest_of_file(file) for file in files]})
