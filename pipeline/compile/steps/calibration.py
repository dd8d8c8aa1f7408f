"""Calibration: observing the samples, and searching with them what to quantize.

Which engine of this machine measures what int8 saves.

The steps that read calibration samples: what the tensors hold, and what to quantize.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from builders.backends.shape_profiles import profiles
from builders.execution.jobs import Executor, Job, Needs, ProcessLimits, WorkerContext
from enginery.core.codec import encode
from enginery.core.digest import digest_of, digest_of_file, digest_of_path
from enginery.core.errors import DataError, IntegrityError
from enginery.core.hardware.targets import this_kind, why_no_proof
from enginery.core.types import Backend, BuildRequest, QuantizationScheme, Target
from enginery.registry.store.base import Store, open_store
from enginery.user_code.entry_point import source_files
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch, text_of
from pipeline.compile.steps.engines import USUAL_MEMORY_MIB
from pipeline.compile.steps.keys import code_key, model_shapes, step_limits
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.search.quality import SearchFloor
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, GraphVariant, Json, ModelShapes, Observed, Searched, SearchResult

if TYPE_CHECKING:
    from enginery.arrays import Array
    from enginery.core.types import Tensors
    from pipeline.quantization.ranges import Ranges
    from pipeline.quantization.search.latency import EngineTiming
    from pipeline.quantization.statistics.observations import Observations
    from validation.data.samples import Samples, SampleSource


@dataclass(frozen=True)
class CalibrationSamples:
    """root, data: the spec's folder, and what the spec names there.  digest: of the data when the step was keyed.

    labels: an array that no input takes.
    """

    root: Path
    data: str
    digest: str
    labels: str | None
    shapes: ModelShapes


@dataclass(frozen=True)
class CalibrationMethod:
    """How ranges are chosen, as a spec says it."""

    method: str
    percentile: float | None


@dataclass(frozen=True)
class ObservePart:
    """One streaming pass over a part of the calibration samples. model: digest.  part: its index, and of how many."""

    model: str
    part: tuple[int, int]
    samples: CalibrationSamples

    def run(self, context: WorkerContext) -> Observed:
        """What the samples showed. Raises DataError when the data has changed since the step was keyed."""
        import onnx

        from pipeline.quantization.insertion_points import activations, prepare_model, tensors_to_measure
        from pipeline.quantization.statistics.observe import observe
        from validation.data.overlap import DigestCollector
        from validation.data.samples import Samples

        place = open_store(context.store)
        model = fetch(place, self.model, context.workdir / "model.onnx")
        graph = prepare_model(onnx.load(model))
        everything, needed = activations(graph), tensors_to_measure(graph)
        del graph
        with _open(self.samples) as source:
            index, count = self.part
            span = source.part(index, count) if isinstance(source, Samples) and count > 1 else (0, None)
            noted = DigestCollector(source)
            seen = observe(model, noted, everything, histograms=needed, span=span)
        if seen.dataset != self.samples.digest:
            raise DataError(f"{self.samples.data} changed while it was read; nothing was kept: run again")
        return _observe(place, seen, noted.seen)


@dataclass(frozen=True)
class ObservePartRemotely:
    """The same on a node that may not see the samples."""

    part: ObservePart

    def run(self, context: WorkerContext) -> Observed | None:
        """What the samples showed; None where they are not there."""
        samples = self.part.samples
        there = Path(samples.root, samples.data.partition(":")[0]).exists()
        return self.part.run(context) if there else None


@dataclass(frozen=True)
class MergeParts:
    """Observations of parts of one data set as one, which is what a single pass would have seen."""

    parts: tuple[Observed, ...]

    def run(self, context: WorkerContext) -> Observed:
        """What all the samples showed."""
        from pipeline.quantization.statistics.observations import Observations
        from validation.data.overlap import merge_digests

        place = open_store(context.store)
        blobs = [part.observations for part in self.parts]
        found = [Observations.from_bytes(place.read_blob(digest), digest) for digest in blobs]
        inputs = merge_digests(place.read_blob(part.inputs) for part in self.parts)
        return _observe(place, reduce(Observations.merge, found), inputs)


def _open(samples: CalibrationSamples) -> "AbstractContextManager[SampleSource]":
    from pipeline.quantization.statistics.observe import open_source

    shapes = samples.shapes.inputs, samples.shapes.dims
    return open_source(samples.root, samples.data, samples.digest, *shapes, samples.labels)


def _classes(source: "Samples", samples: CalibrationSamples) -> "Array":
    found = source.column(samples.labels or "")
    if found.dtype.kind not in "iu":
        where = f"{samples.labels!r} of {samples.data}"
        raise DataError(f"calibration.labels: {where} is {found.dtype}; class indices are integers")
    return found


def _observe(place: Store, seen: "Observations", inputs: bytes) -> Observed:
    return Observed(place.put_bytes(seen.to_bytes()), place.put_bytes(inputs), seen.digest, seen.samples)


@dataclass(frozen=True)
class SearchTerms:
    """How int8 is searched, as a spec says it."""

    smoothing: Literal["none", "auto"]
    floor: SearchFloor | None
    overrides: tuple[Override, ...]


@dataclass(frozen=True)
class LatencyProbe:
    """The engine that measures what int8 saves, and the machine that its times hold for; without a request, the reason
    why none of that kind runs here."""

    request: BuildRequest | None = None
    cpu: str = ""
    cores: int = 0
    cannot: str = ""


@dataclass(frozen=True)
class SearchQuantization:
    """Search what to quantize and how, for one kind of int8. model, observations: digests.

    probe: None where nothing is timed.  answer: the output that is judged by labels.
    """

    model: str
    kind: Searched
    observations: str
    calibration: CalibrationMethod
    search: SearchTerms
    probe: LatencyProbe | None
    answer: str | None
    samples: CalibrationSamples

    def run(self, context: WorkerContext) -> SearchResult:
        """What was chosen. Raises DataError for labels that are no classes, InputError for rules that match no node."""
        import onnx

        from pipeline.quantization.insertion_points import prepare_model
        from pipeline.quantization.schemes.overrides import resolve
        from pipeline.quantization.search.search import choose
        from pipeline.quantization.settings.runs import RunLabels, group_runs
        from pipeline.quantization.statistics.observations import Observations
        from pipeline.sources.onnx_model import save_onnx
        from validation.data.samples import Samples

        place, workdir, search = open_store(context.store), context.workdir, self.search
        model = onnx.load(fetch(place, self.model, workdir / "model.onnx"))
        activation = self.kind.activation
        scheme = QuantizationScheme(activation, activation == "uint8", "fp32", self.kind.weight_levels)
        measured = chosen_ranges(place, GraphVariant("int8", scheme), self.observations, self.calibration)
        if measured is None:
            raise IntegrityError("int8 was to be searched without observations; calibrate first")
        overrides = resolve(prepare_model(model), search.overrides) if search.overrides else {}
        shapes = self.samples.shapes.inputs, self.samples.shapes.dims
        with _open(self.samples) as source:
            first = next(group_runs(source.runs(), *shapes))[1] if self.probe else {}
            labels = None
            if self.answer and isinstance(source, Samples):
                labels = RunLabels(self.answer, _classes(source, self.samples))
            with _open_timing(self.probe, first, workdir) as timer:
                runs = group_runs(source.runs(), *shapes)
                told = search.floor, search.smoothing, overrides, timer, labels
                found = choose(model, measured, scheme, runs, *told)
        save_onnx(found.model, workdir / "chosen.onnx")
        cannot = self.probe.cannot if self.probe else ""
        return SearchResult(
            place.put_file(workdir / "chosen.onnx"),
            place.put_bytes(text_of(found.ranges.to_json())),
            place.put_bytes(text_of(encode(found.document(search.floor)))),
            place.put_bytes(Observations(self.model, self.samples.digest, (), found.smoothed).to_bytes()),
            dict(found.left),
            "; ".join(filter(None, [found.summary, f"latency was not measured: {cannot}" if cannot else ""])),
        )


def _open_timing(
    probe: LatencyProbe | None, inputs: "Tensors", workdir: Path
) -> "AbstractContextManager[EngineTiming | None]":
    """The engines that measure what int8 saves, on the first run of the samples; none where there is nothing to run."""
    from pipeline.quantization.search.latency import EngineTiming

    if probe is None or probe.request is None:
        return nullcontext()
    backend = discovery.configure(probe.request.backend, dict(probe.request.options))
    return EngineTiming(backend, probe.request, inputs, workdir)


def chosen_ranges(
    place: Store, flavour: GraphVariant, observations: str | None, calibration: CalibrationMethod | None
) -> "Ranges | None":
    """The ranges of the variant's scheme from the observations; fp8 and casts need the extremes alone."""
    from pipeline.quantization.statistics.methods import MinMax, method, ranges
    from pipeline.quantization.statistics.observations import Observations

    if observations is None or calibration is None:
        return None
    seen = Observations.from_bytes(place.read_blob(observations))
    if flavour.precision != "int8" or flavour.scheme is None:
        return ranges(seen, MinMax(), "int8")
    chosen = method(calibration.method, calibration.percentile)
    return ranges(seen, chosen, flavour.scheme.activation)


def find_latency_probe(kind: Searched, spec: ModelSpec, exported: Exported) -> LatencyProbe | None:
    """What to build and where, for one kind of int8; None when the spec does not ask for measuring.

    On another kind of CPU, or with another number of cores, the times are measured anew.
    """
    if spec.quantization.latency == "ignore":
        return None
    tools = [discovery.configure(name, options) for name, options in spec.backends.items()]
    pairs = [(tool, target) for tool in tools for target in spec.target_list() if tool.serves(target)]
    reasons = []
    for tool, target in pairs:
        scheme = tool.scheme()
        if Searched(scheme.activation, scheme.weight_levels) != kind:
            continue
        request = _request(tool, target, spec, exported)
        reason = tool.refuses(request) or tool.runs(target) or why_no_proof(request)
        if reason is None:
            return LatencyProbe(request, this_kind().name, os.cpu_count() or 1)
        reasons.append(reason)
    return LatencyProbe(cannot=reasons[0] if reasons else f"no target of this spec takes {kind.name}")


def _request(tool: Backend, target: Target, spec: ModelSpec, exported: Exported) -> BuildRequest:
    model = exported.model
    shapes = tuple(profiles(model.inputs, spec.named_dims())) if not target.is_cpu else ()
    options, toolchain = discovery.options_of(tool), discovery.toolchain_of(tool, target)
    return BuildRequest(
        model.digest, "int8", target, tool.name, model.inputs, model.outputs, shapes, options, toolchain
    )


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
