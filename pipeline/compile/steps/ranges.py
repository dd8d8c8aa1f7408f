"""The steps that read calibration samples: what the tensors hold, and what to quantize."""

from collections.abc import Iterable, Sequence

from builders.execution.jobs import Executor, Job, Needs, ProcessLimits
from enginery.core.codec import encode
from enginery.core.digest import digest_of, digest_of_file, digest_of_path
from enginery.core.errors import DataError
from enginery.user_code.source_files import source_files
from pipeline.compile.closure.code import backend_root
from pipeline.compile.jobs.ranges import (
    CalibrationMethod,
    CalibrationSamples,
    MergeParts,
    ObservePart,
    ObservePartRemotely,
    SearchQuantization,
    SearchTerms,
)
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import USUAL_MEMORY_MIB
from pipeline.compile.steps.keys import code_key, model_shapes, step_limits
from pipeline.compile.steps.latency_probe import find_latency_probe
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.search.floor import SearchFloor
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, GraphVariant, Json, Observed, Searched, SearchResult

Part = tuple[int, int]


def parts_of(spec: ModelSpec, exported: Exported) -> tuple[Part, ...]:
    """The parts (index, of how many) that the calibration samples are observed in.

    None without calibration data, or when the model carries Q/DQ of its own.
    """
    if spec.calibration is None or exported.model.carries_qdq:
        return ()
    return tuple((index, spec.calibration.parts) for index in range(spec.calibration.parts))


def observe(part: Part, spec: ModelSpec, exported: Exported, context: RunContext) -> Observed:
    """Observe every activation over some of the samples.

    A part that is on record is not observed again, so an interrupted calibration goes on with what it has not seen. One
    part of several is observed where engines are built, on any node that sees the same samples under the same path.
    """
    request = ObservePart(exported.model.digest, part, _samples(spec))
    key = {
        **encode(request),
        "samples": _without_place(request.samples),
        **code_key(ObservePart, ObservePartRemotely),
    }

    def spread(local: Executor, name: str, job: Job[Observed]) -> Observed:
        found = None if context.executor is local else _observe_remotely(name, request, job.limits, context)
        return found or context.run_job(local, name, job)

    index, count = part
    name = "calibrate" if count == 1 else f"calibrate {index + 1}/{count}"
    job = Job("calibrate", request, context.store.uri, step_limits(spec, "calibration"))
    return context.once("calibrate", name, key, job, _blobs, spread if count > 1 else None)


def _observe_remotely(name: str, part: ObservePart, limits: ProcessLimits, context: RunContext) -> Observed | None:
    """What a node of the cluster observes; None where the samples, or what they need, are not to be had."""
    needed = Needs(memory_mib=USUAL_MEMORY_MIB)
    try:
        return context.run_job(
            context.executor, name, Job("calibrate", ObservePartRemotely(part), context.store.uri, limits, needed)
        )
    except DataError:
        return None  # it is said again here, if it is true


def merge(parts: Sequence[Observed], spec: ModelSpec, context: RunContext) -> Observed:
    """The observations of all parts as one, which is what a single pass would have seen."""
    request = MergeParts(tuple(parts))
    key = {**encode(request), **code_key(MergeParts)}
    job = Job("merge", request, context.store.uri, step_limits(spec, "calibration"))
    return context.once("merge", "merge calibration", key, job, _blobs)


def _blobs(found: Observed) -> list[str]:
    return [found.observations, found.inputs]


def choose(
    kind: Searched, spec: ModelSpec, exported: Exported, ranges: Observed | None, context: RunContext
) -> SearchResult:
    """Search what to quantize and how, for one kind of int8."""
    if exported.model.carries_qdq:
        raise DataError("there is nothing to choose: the model carries Q/DQ of its own, and they stay")
    method = calibration_method(spec)
    if ranges is None or method is None:
        raise DataError("what to quantize is chosen on real samples; add calibration.data")
    probe = find_latency_probe(kind, spec, exported)
    raced = [backend_root(probe.request.backend)] if probe and probe.request else []
    request = SearchQuantization(
        exported.model.digest,
        kind,
        ranges.observations,
        method,
        _search_terms(spec),
        probe,
        _answer(spec, exported),
        _samples(spec),
    )
    key = {
        **encode(request),
        "observations": ranges.seen,
        "samples": _without_place(request.samples),
        **code_key(SearchQuantization, *raced),
    }
    job = Job("choose", request, context.store.uri, step_limits(spec, "quantization"))
    return context.once("choose", f"choose {kind.name}", key, job, lambda v: [v.model, v.ranges, v.choice, v.smoothed])


def _search_terms(spec: ModelSpec) -> SearchTerms:
    wanted = spec.quantization
    floor = SearchFloor(**wanted.floor.model_dump()) if wanted.floor else None
    return SearchTerms(wanted.smoothing, floor, node_overrides(spec))


def node_overrides(spec: ModelSpec) -> tuple[Override, ...]:
    """The spec's `quantization.overrides`."""
    return tuple(Override(item.match, item.precision) for item in spec.quantization.overrides)


def calibration_method(spec: ModelSpec) -> CalibrationMethod | None:
    """How the spec wants ranges to be chosen."""
    wanted = spec.calibration
    return CalibrationMethod(wanted.method, wanted.percentile) if wanted else None


def find_searched_kinds(flavours: Iterable[GraphVariant], spec: ModelSpec, exported: Exported) -> tuple[Searched, ...]:
    """The kinds of int8 that the spec wants searched for these graph variants, each once."""
    if not spec.quantization.searches or exported.model.carries_qdq:
        return ()
    return tuple(dict.fromkeys(flavour.searched for flavour in flavours if flavour.searched))


def _samples(spec: ModelSpec) -> CalibrationSamples:
    wanted = spec.calibration
    data, labels = (wanted.data, wanted.labels) if wanted else ("", None)
    return CalibrationSamples(spec.folder, data, calibration_digest(spec), labels, model_shapes(spec))


def _without_place(samples: CalibrationSamples) -> Json:
    """The samples as they enter a key: wherever they are."""
    return {name: value for name, value in encode(samples).items() if name != "root"}


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
