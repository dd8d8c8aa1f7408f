"""Calibration: observing the samples, and searching with them what to quantize."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from enginery.core.codec import encode
from enginery.core.errors import DataError, IntegrityError
from enginery.core.types import BuildRequest, QuantizationScheme
from enginery.registry.store.base import Store, open_store
from pipeline.compile.jobs.blobs import fetch, text_of
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.search.floor import SearchFloor
from pipeline.values import GraphVariant, ModelShapes, Observed, Searched, SearchResult

if TYPE_CHECKING:
    from enginery.arrays.arrays import Array
    from enginery.core.types import Tensors
    from pipeline.quantization.ranges import Ranges
    from pipeline.quantization.search.engine_timing import EngineTiming
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

        from pipeline.quantization.insertion.insertion_points import activations, prepare_model
        from pipeline.quantization.insertion.placement import tensors_to_measure
        from pipeline.quantization.statistics.observe import observe
        from validation.data.overlap import Noted
        from validation.data.samples import Samples

        place = open_store(context.store)
        model = fetch(place, self.model, context.workdir / "model.onnx")
        graph = prepare_model(onnx.load(model))
        everything, needed = activations(graph), tensors_to_measure(graph)
        del graph
        with _open(self.samples) as source:
            index, count = self.part
            span = source.part(index, count) if isinstance(source, Samples) and count > 1 else (0, None)
            noted = Noted(source)
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
    from pipeline.quantization.statistics.sources import open_source

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

        from pipeline.quantization.insertion.insertion_points import prepare_model
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
    from pipeline.quantization.search.engine_timing import EngineTiming

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
