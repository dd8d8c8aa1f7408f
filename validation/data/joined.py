"""Steps of several samples, the overlap of golden and calibration samples, and sequences."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.proof import OVERLAP, Check
from enginesmith.core.state import grown_axes
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.streams import Streams
from validation.data.samples import Samples, SampleSource

# A step may have several consecutive samples, joined along one dim, such as the prompt of a decoder.

Run = tuple[int, dict[str, Array]]
# The name of an array beside a sequence's inputs: whether a step begins at each sample, bool [samples].
BEGINS = "step begins"


@dataclass(frozen=True)
class Steps:
    """Which samples form each step. begins: whether a step begins at the sample, bool [samples].  dim: the dim along
    which the samples of a step are joined.  inputs: the inputs of a step, without states."""

    begins: Array
    dim: str
    inputs: tuple[TensorSpec, ...]

    @property
    def firsts(self) -> Array:
        """The index of the first sample of each step."""
        return np.flatnonzero(self.begins)


@dataclass(frozen=True)
class _Reading:
    """A source that reads from another source, whose name and digest it has."""

    samples: SampleSource

    @property
    def name(self) -> str:
        """See `SampleSource`."""
        return self.samples.name

    @property
    def digest(self) -> str:
        """See `SampleSource`."""
        return self.samples.digest


@dataclass(frozen=True)
class JoinedSteps(_Reading):
    """A source whose runs are steps, each joined from one or more samples of another source; runs count as steps."""

    steps: Steps

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[Run]:
        """See `SampleSource`. Raises DataError as `single_samples` and `join`."""
        ends = np.append(self.steps.firsts, len(self.steps.begins))
        end_step = len(ends) - 1 if stop is None else min(stop, len(ends) - 1)
        runs, group, index = single_samples(self.samples, int(ends[start]), int(ends[end_step])), list[Tensors](), start
        for end, inputs in runs:
            group.append(inputs)
            if end == ends[index + 1]:
                index += 1
                yield index, join(group, self.steps.dim, self.steps.inputs)
                group.clear()


def single_samples(source: SampleSource, start: int = 0, stop: int | None = None) -> Iterator[Run]:
    """The runs of a source. Raises DataError for a run of several samples, because it is not one step."""
    previous_end = start
    for end, inputs in source.runs(start, stop):
        if end != previous_end + 1:
            raise DataError(
                f"{source.name}: a step has {end - previous_end} samples, since the model takes no fewer at once; "
                "store one complete input per entry of a new axis 0, in every array"
            )
        previous_end = end
        yield end, inputs


def join(samples: Sequence[Tensors], dim: str, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """One step's inputs: an input with `dim` is joined along it, any other input must be equal in all samples. Raises
    DataError if it is not."""
    first_sample, *other_samples = samples
    arrays = dict(first_sample)
    for spec in inputs if other_samples else ():
        step_arrays = [sample[spec.name] for sample in samples]
        if dim in spec.shape:
            arrays[spec.name] = np.concatenate(step_arrays, spec.shape.index(dim))
        elif not all(np.array_equal(step_array, step_arrays[0]) for step_array in step_arrays):
            raise DataError(
                f"samples of one step differ in input {spec.name!r}, which has no dim {dim!r} to join them along; "
                "give them the same values, or give the steps different numbers"
            )
    return arrays


class GrownInputs:
    """The inputs of one sequence that cover earlier steps too, such as an attention mask over `past + tokens`: each
    step's part is appended to the earlier parts. specs: the inputs without states."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._axes, self._held = list(grown_axes(specs)), dict[str, Array]()

    def take(self, step: Tensors) -> dict[str, Array]:
        """The inputs of the next step, with the grown inputs in full."""
        step_arrays = dict(step)
        for name, axis in self._axes:
            history = [self._held[name]] if name in self._held else []
            step_arrays[name] = self._held[name] = np.concatenate([*history, step[name]], axis)
        return step_arrays


def read_steps(
    samples: Samples, steps: tuple[str, str] | None, order: Array | None, dims: Sequence[Dim]
) -> Steps | None:
    """The division into steps: consecutive samples of one sequence with the same number in an array are one step.

    steps: the dim, and the array's name; None if each sample is a step.  order: as in `SequenceSamples`. Raises
    DataError without that array, for an array without one number per sample, and for a step of a size outside the dim.
    """
    if steps is None:
        return None
    name, step_numbers = steps[1], samples.column(steps[1])
    if step_numbers.ndim != 1:
        raise DataError(f"{samples.name}: {name!r} has shape {step_numbers.shape}; store a number for each sample")
    begin_flags = np.append(True, step_numbers[1:] != step_numbers[:-1])
    if order is not None:
        begin_flags[1:] |= order[1:] != order[:-1]
    sequence_steps = Steps(begin_flags, steps[0], samples.inputs)
    dim = next(dim for dim in dims if dim.name == steps[0])
    spec = next(spec for spec in sequence_steps.inputs if dim.name in spec.shape)
    axis = spec.shape.index(dim.name)
    width = samples.arrays[spec.name].shape[axis + 1 if samples.complete else axis]
    sizes = np.diff(np.append(sequence_steps.firsts, len(sequence_steps.begins))) * width
    for start, size in zip(sequence_steps.firsts, sizes, strict=True):
        if size not in dim.sizes:
            raise DataError(
                f"{samples.name}: the step from sample {start}, number {samples.column(name)[start]} of {name!r}, has "
                f"{dim.name}={size}, outside {dim.words}; divide it into several steps, or widen dims.{dim.name}"
            )
    return sequence_steps


# Overlap of golden and calibration samples: errors on samples that determined the scales are too small.

# The greatest share of golden samples that may be calibration samples too. Data that repeats itself has a few; beyond
# a half, most measured errors are on samples that determined the scales.
LARGEST = 0.5

# The number of consecutive steps that count as one sample of a model with state.
WINDOW = 8

_DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class DigestCollector(_Reading):
    """A source that collects the digest of every run that is read from it, and of each row of the run."""

    _seen: set[bytes] = field(default_factory=set, init=False, repr=False)

    @property
    def seen(self) -> bytes:
        """The digests of the samples read so far, without duplicates, sorted and joined."""
        return b"".join(sorted(self._seen))

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, dict[str, Array]]]:
        """See `SampleSource`."""
        is_whole = isinstance(self.samples, Samples) and self.samples.complete
        for end, inputs in self.samples.runs(start, stop):
            self._seen.update((_digest(inputs), *_digests([inputs], is_whole)))
            yield end, inputs


def golden_digests(groups: Iterable[Tensors], complete: bool) -> bytes:
    """The digests of the golden samples, in order and joined. complete: a group is one sample; else each row is one."""
    return b"".join(_digests(groups, complete))


def window_digests(sequences: Iterable[Iterable[Tensors]]) -> bytes:
    """The digests of the steps of sequences, in order and joined. Each digest also covers up to `WINDOW` - 1 earlier
    steps, because a single step, such as one token, is in many sequences."""
    digests = list[bytes]()
    for sequence in sequences:
        window = deque[bytes](maxlen=WINDOW)
        for inputs in sequence:
            window.append(_digest(inputs))
            digests.append(hashlib.sha256(b"".join(window)).digest()[:_DIGEST_BYTES])
    return b"".join(digests)


def merge_digests(parts: Iterable[bytes]) -> bytes:
    """The `DigestCollector.seen` of all parts together."""
    return b"".join(sorted(set().union(*map(_split, parts))))


def overlap_check(golden: bytes, calibration: bytes) -> Check:
    """The check of the share of golden samples that are calibration samples too. Arguments: joined digests."""
    calibration_digests, samples = set(_split(calibration)), _split(golden)
    count = sum(sample in calibration_digests for sample in samples)
    share = count / max(len(samples), 1)
    count_text = "all" if share == 1 else count or "none"
    text = f"{count_text} of the {len(samples)} golden samples are calibration samples too"
    advice = ", and scales fit those best: the errors say little about other samples; give golden.data other ones"
    is_within = share <= LARGEST
    return Check("quantization", OVERLAP, "", "golden", share, LARGEST, is_within, text if is_within else text + advice)


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + _DIGEST_BYTES] for start in range(0, len(digests), _DIGEST_BYTES)]


def _digests(groups: Iterable[Tensors], complete: bool) -> Iterator[bytes]:
    for inputs in groups:
        lengths = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
        row_count = lengths.pop() if len(lengths) == 1 and not complete else 0
        if row_count == 0:
            yield _digest(inputs)
        for row in range(row_count):
            yield _digest({name: array[row : row + 1] for name, array in inputs.items()})


def _digest(inputs: Tensors) -> bytes:
    hasher = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        hasher.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.digest()[:_DIGEST_BYTES]


# Samples of a model with state: steps, in order, each with the states that the model returned in the step before.
#
# Every later run of the model (calibration, golden cases) is then an ordinary run, on inputs as in production.

# The most rows of a group of steps if the batch's opt is 1.
MOST_ROWS = 16


@dataclass(frozen=True)
class SequenceSamples(_Reading):
    """Samples as steps with complete inputs; runs count as steps. streams: runs the model, for one pass at a time.

    order: the number of each sample's sequence; None for a single sequence.  steps: the division into steps; None if
    each sample is a step.
    """

    streams: Streams
    order: Array | None = None
    steps: Steps | None = None

    @property
    def digests(self) -> bytes:
        """The digests of all samples, without duplicates, sorted and joined."""
        sequences = ((inputs for _, inputs in steps) for steps in split(self.samples, self.order))
        return merge_digests([window_digests(sequences)])

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[Run]:
        """See `SampleSource`. The model runs all steps, for the states; only steps from `start` on are yielded."""
        samples, order = self.samples, self.order
        if self.steps:
            samples = JoinedSteps(samples, self.steps)
            order = None if order is None else order[self.steps.firsts]
        for sequence in split(samples, order, stop):
            yield from ((end, inputs) for end, inputs in roll_out(sequence, self.streams) if end > start)


def read_order(samples: Samples, name: str | None) -> Array | None:
    """The array `name`, the number of the sequence of each step, [steps]; None if `name` is None. Raises DataError for
    a missing array, another shape, and a sequence whose steps are not consecutive."""
    if name is None:
        return None
    order = samples.column(name)
    if order.ndim != 1:
        raise DataError(f"{samples.name}: array {name!r} has the shape {order.shape}; store one number for each step")
    starts = np.append(0, np.flatnonzero(order[1:] != order[:-1]) + 1)
    sequence_numbers, counts = np.unique(order[starts], return_counts=True)
    if (counts > 1).any():
        sequence_number = sequence_numbers[counts > 1][0]
        repeat_starts = starts[order[starts] == sequence_number][:2]
        raise DataError(
            f"{samples.name}: {name!r} has {sequence_number} from step {repeat_starts[0]} and again from "
            f"step {repeat_starts[1]}, after other sequences; store the steps of a sequence next to each other, or "
            "give the sequences different numbers"
        )
    return order


def split(steps: SampleSource, order: Array | None, stop: int | None = None) -> Iterator[Iterator[Run]]:
    """The steps of each sequence, without states. The caller must read a sequence to its end before the next.

    order: as in `SequenceSamples`.  stop: number of steps to read; None: all. Raises DataError for a run of several
    samples: it is not one step."""
    runs, pending_runs = single_samples(steps, 0, stop), list[Run]()

    def read(first_run: Run) -> Iterator[Run]:
        yield first_run
        for end, inputs in runs:
            if order is not None and order[end - 1] != order[end - 2]:
                pending_runs.append((end, inputs))
                return
            yield end, inputs

    pending_runs.extend([first_run] if (first_run := next(runs, None)) else [])
    while pending_runs:
        yield read(pending_runs.pop())


def roll_out(steps: Iterable[Run], streams: Streams) -> Iterator[Run]:
    """The steps of one sequence, each with the states after the steps before it. The model does not run the last."""
    streams.reset()
    step_arrays, grown_inputs = dict[str, Array](), GrownInputs(streams.inputs)
    for end, inputs in steps:
        if step_arrays:
            streams.run(step_arrays)
        step_arrays = grown_inputs.take(inputs)
        yield end, streams.complete(step_arrays)


def stack(
    runs: Iterable[Tensors], specs: Sequence[TensorSpec], dims: Sequence[Dim]
) -> tuple[list[dict[str, Array]], list[list[int]]]:
    """Groups of complete steps of equal shapes, each step a row, and the indices of each group's steps among the runs.
    The states of a step are among its inputs; therefore steps of any sequences can run in one batch. A group has the
    batch's opt size, or if opt is 1 the batch's max, up to MOST_ROWS rows. If an input has no batch, or the least batch
    is not 1, each step is a group. Groups of several shapes, as with a growing cache, are reordered: the first n groups
    are spread over all (van der Corput, 1935), because honest rounding is measured on the first groups.
    """
    batch, steps = _batch_axes(specs, dims), list(runs)
    places_by_shape = dict[tuple[tuple[int, ...], ...], list[int]]()
    for index, step in enumerate(steps):
        places_by_shape.setdefault(tuple(step[spec.name].shape for spec in specs), []).append(index)
    groups = [chunk for indices in places_by_shape.values() for chunk in _parts(indices, steps[indices[0]], batch)]
    if len(places_by_shape) > 1:
        groups = [group for _, group in sorted(enumerate(groups), key=lambda numbered: f"{numbered[0]:032b}"[::-1])]
    batches = [_join([steps[index] for index in group], batch) for group in groups]
    return batches, groups


def number_steps(count: int, order: Array | None) -> Array:
    """The index of each step in its sequence, int [count]. order: as in `SequenceSamples`."""
    if order is None:
        return np.arange(count)
    starts = np.flatnonzero(np.append(True, order[1:] != order[:-1]))
    return np.arange(count) - np.repeat(starts, np.diff(np.append(starts, count)))


def _batch_axes(specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> tuple[int, dict[str, int]] | None:
    """(rows of a group, the batch's axis in each input); None if an input has no batch or the least batch is not 1."""
    names = {dim.name: dim for dim in dims if dim.min == 1}
    lead_dim = next((spec.shape[0] for spec in specs if spec.shape and spec.shape[0] in names), None)
    if lead_dim is None or not all(spec.shape.count(lead_dim) == 1 for spec in specs):
        return None
    dim = names[str(lead_dim)]
    return dim.opt if dim.opt > 1 else min(dim.max, MOST_ROWS), {
        spec.name: spec.shape.index(lead_dim) for spec in specs
    }


def _parts(places: list[int], step: Tensors, batch: tuple[int, dict[str, int]] | None) -> Iterator[list[int]]:
    """The indices of steps of equal shapes, in groups. step: one of these steps, which may have several rows."""
    size = 1
    if batch:
        name, axis = next(iter(batch[1].items()))
        size = max(batch[0] // max(step[name].shape[axis], 1), 1)
    yield from (places[start : start + size] for start in range(0, len(places), size))


def _join(group: Sequence[Tensors], batch: tuple[int, dict[str, int]] | None) -> dict[str, Array]:
    if batch is None or len(group) == 1:
        return dict(group[0])
    return {name: np.concatenate([step[name] for step in group], axis) for name, axis in batch[1].items()}
