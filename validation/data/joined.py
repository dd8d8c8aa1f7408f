"""Steps of several samples, as a decoder reads its prompt: samples that follow each other, joined along one dim."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.state import grown_axes
from enginesmith.core.types import Dim, Tensors, TensorSpec
from validation.data.samples import Samples, SampleSource

Run = tuple[int, dict[str, Array]]
# Beside the inputs of a sequence's samples: whether a step begins at each, bool [samples].
BEGINS = "step begins"


@dataclass(frozen=True)
class Steps:
    """Which samples are one step. begins: whether one begins at each, bool [samples].  dim: what they are joined along.

    inputs: of a step, that a caller gives.
    """

    begins: Array
    dim: str
    inputs: tuple[TensorSpec, ...]

    @property
    def firsts(self) -> Array:
        """The place of the first sample of each step."""
        return np.flatnonzero(self.begins)

    def join(self, samples: Sequence[Tensors]) -> dict[str, Array]:
        """One step of its samples. Raises DataError where they differ in an input without the dim."""
        return join(samples, self.dim, self.inputs)


@dataclass(frozen=True)
class JoinedSteps:
    """A source whose runs are steps of one or more samples of another; they are counted in steps."""

    samples: SampleSource
    steps: Steps

    @property
    def name(self) -> str:
        """See `SampleSource`."""
        return self.samples.name

    @property
    def digest(self) -> str:
        """See `SampleSource`."""
        return self.samples.digest

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[Run]:
        """See `SampleSource`. Raises DataError as `single_samples` and `Steps.join`."""
        ends = np.append(self.steps.firsts, len(self.steps.begins))
        last = len(ends) - 1 if stop is None else min(stop, len(ends) - 1)
        runs, group, at = single_samples(self.samples, int(ends[start]), int(ends[last])), list[Tensors](), start
        for end, inputs in runs:
            group.append(inputs)
            if end == ends[at + 1]:
                at += 1
                yield at, self.steps.join(group)
                group.clear()


def single_samples(source: SampleSource, start: int = 0, stop: int | None = None) -> Iterator[Run]:
    """The runs of a source. Raises DataError for one of several samples, as they are not one step."""
    before = start
    for end, inputs in source.runs(start, stop):
        if end != before + 1:
            raise DataError(
                f"{source.name}: a step has {end - before} samples, since the model takes no fewer at once; store "
                "one complete input per entry of a new axis 0, in every array"
            )
        before = end
        yield end, inputs


def join(samples: Sequence[Tensors], dim: str, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """One step's inputs: those with the dim joined along it, the others as all samples have them. Raises DataError
    where these differ."""
    first, *others = samples
    found = dict(first)
    for spec in inputs if others else ():
        parts = [sample[spec.name] for sample in samples]
        if dim in spec.shape:
            found[spec.name] = np.concatenate(parts, spec.shape.index(dim))
        elif not all(np.array_equal(part, parts[0]) for part in parts):
            raise DataError(
                f"samples of one step differ in input {spec.name!r}, which has no dim {dim!r} to join them along; "
                "give them the same, or number the steps apart"
            )
    return found


class GrownInputs:
    """Inputs that cover what states hold too, as an attention mask over `past + tokens`: what each step adds is joined
    to that of the steps before it. given: the inputs of a model without its states. For one sequence."""

    def __init__(self, given: Sequence[TensorSpec]) -> None:
        self._axes, self._held = list(grown_axes(given)), dict[str, Array]()

    def take(self, step: Tensors) -> dict[str, Array]:
        """The whole inputs of the next step."""
        found = dict(step)
        for name, axis in self._axes:
            before = [self._held[name]] if name in self._held else []
            found[name] = self._held[name] = np.concatenate([*before, step[name]], axis)
        return found


def read_steps(
    samples: Samples, steps: tuple[str, str] | None, order: Array | None, dims: Sequence[Dim]
) -> Steps | None:
    """Which samples are one step: those behind each other, of one sequence, for which an array has the same number.

    steps: the dim, and the array's name; None where each sample is a step.  order: as in `SequenceSamples`. Raises
    DataError without that array, or for one that has not one number for each sample, and for a step that is larger than
    the dim allows.
    """
    if steps is None:
        return None
    name, numbers = steps[1], samples.column(steps[1])
    if numbers.ndim != 1:
        raise DataError(f"{samples.name}: array {name!r} has the shape {numbers.shape}; store one number a sample")
    begins = np.append(True, numbers[1:] != numbers[:-1])
    if order is not None:
        begins[1:] |= order[1:] != order[:-1]
    found = Steps(begins, steps[0], samples.inputs)
    dim = next(dim for dim in dims if dim.name == steps[0])
    _check_sizes(samples, found, dim, name)
    return found


def _check_sizes(samples: Samples, steps: Steps, dim: Dim, name: str) -> None:
    spec = next(spec for spec in steps.inputs if dim.name in spec.shape)
    axis = spec.shape.index(dim.name)
    width = samples.arrays[spec.name].shape[axis + 1 if samples.complete else axis]
    sizes = np.diff(np.append(steps.firsts, len(steps.begins))) * width
    for first, size in zip(steps.firsts, sizes, strict=True):
        if size not in dim.sizes:
            raise DataError(
                f"{samples.name}: the step from sample {first}, number {samples.column(name)[first]} of {name!r}, has "
                f"{dim.name}={size}, outside {dim.words}; divide it into several steps, or widen dims.{dim.name}"
            )
