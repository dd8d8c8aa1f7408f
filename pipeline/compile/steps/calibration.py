"""The step that observes calibration samples: one streaming pass over the data, in parts, merged into statistics."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from builders.execution.jobs import Executor, Job, Needs, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError, digest_of, digest_of_file, digest_of_path
from enginesmith.core.state import State, step_inputs
from enginesmith.registry.store.base import Store, open_store
from enginesmith.user_code.entry_point import source_files
from pipeline.compile.run_context import Work
from pipeline.compile.steps.blobs import MEASURED_BYTES, fetch_graph
from pipeline.compile.steps.engines import USUAL_MEMORY_MIB
from pipeline.compile.steps.keys import code_key, model_shapes, step_limits
from pipeline.values import Exported, GraphVariant, Json, ModelShapes, Observed

if TYPE_CHECKING:
    from pipeline.quantization.ranges import Ranges
    from pipeline.quantization.statistics.observations import Observations
    from pipeline.spec.model import ModelSpec
    from validation.data.samples import SampleSource

Part = tuple[int, int]


@dataclass(frozen=True)
class CalibrationSamples:
    """The place of calibration samples. root: the spec's folder.  data: path in it, from the spec.

    digest: of the data when the step was keyed.  labels: name of an array of class indices, which is no input.
    states: states, for which samples have no arrays.  sequence: name of the array with the sequence number of each
    sample, which is a step; None if all are one sequence.  steps: as in `read_steps`."""

    root: Path
    data: str
    digest: str
    labels: str | None
    shapes: ModelShapes
    states: tuple[State, ...] = ()
    sequence: str | None = None
    steps: tuple[str, str] | None = None


@dataclass(frozen=True)
class CalibrationMethod:
    """How ranges are chosen from statistics, as a spec says it; percentile: of that method only."""

    method: str
    percentile: float | None


@dataclass(frozen=True)
class ObservePart:
    """Observe a part of the calibration samples in one streaming pass. model: digest.  part: index, and of how many."""

    model: str
    part: tuple[int, int]
    samples: CalibrationSamples

    def run(self, context: WorkerContext) -> Observed:
        """Statistics of the samples. Raises DataError if the data has changed since the step's key was computed."""
        from builders.onnx_graphs.outline import load_outline
        from pipeline.quantization.insertion_points import activations, prepare_model, tensors_to_measure
        from pipeline.quantization.statistics.observe import observe as observe_samples
        from validation.data.joined import DigestCollector, SequenceSamples
        from validation.data.samples import Samples

        store = open_store(context.store)
        model = fetch_graph(store, self.model, context.workdir / "model.onnx")
        graph = prepare_model(load_outline(model))
        all_tensors, needed_tensors = activations(graph), tensors_to_measure(graph)
        del graph
        with open_samples(self.samples) as source:
            index, count = self.part
            span = source.part(index, count) if isinstance(source, Samples) and count > 1 else (0, None)
            collector = DigestCollector(source)
            full_source = complete_samples(source, self.samples, model) if self.samples.states else collector
            observations = observe_samples(model, full_source, all_tensors, histograms=needed_tensors, span=span)
            sample_digests = full_source.digests if isinstance(full_source, SequenceSamples) else collector.seen
        if observations.dataset != self.samples.digest:
            raise DataError(f"{self.samples.data} changed while it was read; nothing was kept: run again")
        return _store(store, observations, sample_digests)


@dataclass(frozen=True)
class ObservePartRemotely:
    """`ObservePart` on a node that may not see the samples."""

    part: ObservePart

    def run(self, context: WorkerContext) -> Observed | None:
        """Statistics of the samples; None without samples."""
        samples = self.part.samples
        data_exists = Path(samples.root, samples.data.partition(":")[0]).exists()
        return self.part.run(context) if data_exists else None


@dataclass(frozen=True)
class MergeParts:
    """Merge the observations of the parts of one data set: the result is what a single pass would have given."""

    parts: tuple[Observed, ...]

    def run(self, context: WorkerContext) -> Observed:
        """The observations of all parts together."""
        from pipeline.quantization.statistics.observations import Observations
        from validation.data.joined import merge_digests

        store = open_store(context.store)
        blobs = [part.observations for part in self.parts]
        part_observations = [
            Observations.from_bytes(store.read_blob(digest, MEASURED_BYTES), digest) for digest in blobs
        ]
        inputs = merge_digests(store.read_blob(part.inputs, MEASURED_BYTES) for part in self.parts)
        return _store(store, reduce(Observations.merge, part_observations), inputs)


def open_samples(samples: CalibrationSamples) -> "AbstractContextManager[SampleSource]":
    """The samples, to be read as a stream. Raises DataError for data that does not suit the model's inputs."""
    from pipeline.quantization.statistics.observe import open_source

    shapes = step_inputs(samples.shapes.inputs, samples.states), samples.shapes.dims
    extra_names = [name for name in (samples.labels, samples.sequence, samples.steps and samples.steps[1]) if name]
    return open_source(samples.root, samples.data, samples.digest, *shapes, extra_names)


def complete_samples(source: "SampleSource", samples: CalibrationSamples, model: Path) -> "SampleSource":
    """The samples of `open_samples`; of a model with state, as steps with the states that the ONNX file `model` passes
    on. Raises DataError for an array of sequences that is not there."""
    from builders.reference import ReferenceSession, threads_for
    from enginesmith.streams import Streams
    from validation.data.joined import SequenceSamples, read_order, read_steps
    from validation.data.samples import Samples

    if not samples.states:
        return source
    order = read_order(source, samples.sequence) if isinstance(source, Samples) else None
    steps = read_steps(source, samples.steps, order, samples.shapes.dims) if isinstance(source, Samples) else None
    dim_bounds = {dim.name: (dim.min, dim.max) for dim in samples.shapes.dims}
    session = ReferenceSession(model, threads=threads_for(model, steps=True))
    streams = Streams(session.run, samples.shapes.inputs, samples.states, dim_bounds)
    return SequenceSamples(source, streams, order, steps)


def _store(store: Store, observations: "Observations", inputs: bytes) -> Observed:
    return Observed(
        store.put_bytes(observations.to_bytes()), store.put_bytes(inputs), observations.digest, observations.samples
    )


def chosen_ranges(store: Store, variant: GraphVariant, observations: str, calibration: CalibrationMethod) -> "Ranges":
    """The ranges of the variant's scheme, chosen from the observations (a blob's digest) by the method of the spec.

    For precisions other than int8 the ranges are from minimum to maximum, which is all that fp8 and casts need.
    """
    from pipeline.quantization.statistics.methods import MINMAX, method, ranges
    from pipeline.quantization.statistics.observations import Observations

    observation_set = Observations.from_bytes(store.read_blob(observations, MEASURED_BYTES))
    if variant.precision != "int8" or variant.scheme is None:
        return ranges(observation_set, MINMAX, "int8")
    range_method = method(calibration.method, calibration.percentile)
    return ranges(observation_set, range_method, variant.scheme.activation)


def parts_of(spec: "ModelSpec", export: Exported) -> tuple[Part, ...]:
    """The parts (index, of how many) that the calibration samples are observed in; () without calibration data, or when
    the model carries Q/DQ of its own."""
    if spec.calibration is None or export.model.carries_qdq:
        return ()
    return tuple((index, spec.calibration.parts) for index in range(spec.calibration.parts))


def observe(part: Part, export: Exported, work: Work) -> Observed:
    """Observe every activation over a part of the samples.

    A part that is on record is not observed again, so that an interrupted calibration goes on where it stopped. One
    part of several is observed where engines are built, on any node that sees the same samples under the same path.
    """
    spec, context = work.spec, work.context
    request = ObservePart(export.model.digest, part, calibration_samples(spec))
    key = {**encode(request), "samples": samples_key(request.samples), **code_key(ObservePart, ObservePartRemotely)}
    uri, limits = context.store.uri, step_limits(spec, "calibration")

    def run(local: Executor, name: str, job: Job[Observed]) -> Observed:
        from pipeline.compile.preflight import check_files  # with pydantic, which no worker needs

        check_files(spec)
        if count > 1 and context.executor is not local:
            step_needs = Needs(memory_mib=USUAL_MEMORY_MIB)
            remote_job = Job("calibrate", ObservePartRemotely(request), uri, limits, step_needs)
            with suppress(DataError):  # it is raised again here, if the samples are at fault
                if part_observations := context.run_job(context.executor, name, remote_job):
                    return part_observations
        return context.run_job(local, name, job)

    index, count = part
    name = "calibrate" if count == 1 else f"calibrate {index + 1}/{count}"
    job = Job("calibrate", request, uri, limits)
    return context.once("calibrate", name, key, job, _blobs, run)


def merge(parts: Sequence[Observed], work: Work) -> Observed:
    """The observations of all parts as one: what a single pass would have given."""
    request = MergeParts(tuple(parts))
    key = {**encode(request), **code_key(MergeParts)}
    job = Job("merge", request, work.context.store.uri, step_limits(work.spec, "calibration"))
    return work.context.once("merge", "merge calibration", key, job, _blobs)


def _blobs(ranges: Observed) -> list[str]:
    return [ranges.observations, ranges.inputs]


def calibration_method(spec: "ModelSpec") -> CalibrationMethod | None:
    """How the spec wants ranges to be chosen."""
    calibration = spec.calibration
    return CalibrationMethod(calibration.method, calibration.percentile) if calibration else None


def calibration_samples(spec: "ModelSpec") -> CalibrationSamples:
    """The samples that the spec names, with the digest that they have now."""
    calibration = spec.calibration
    data, labels = (calibration.data, calibration.labels) if calibration else ("", None)
    array_names = (calibration.sequence, calibration.joined) if calibration else ()
    args = calibration_digest(spec), labels, model_shapes(spec), spec.states(), *array_names
    return CalibrationSamples(spec.root_of(data), data, *args)


def samples_key(samples: CalibrationSamples) -> Json:
    """The samples' part of a step's key, independent of their location."""
    return {name: value for name, value in encode(samples).items() if name != "root"}


def calibration_digest(spec: "ModelSpec") -> str:
    """Digest of the data, or of the code that generates it; data that this code reads by itself is not in it."""
    calibration = spec.calibration
    if calibration is None or calibration.function is None:
        return digest_of_path(spec.file(calibration.file if calibration else ""))
    files = source_files(spec.folder, spec.file(calibration.file))
    return digest_of({"function": calibration.function, "files": [digest_of_file(file) for file in files]})
