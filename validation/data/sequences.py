"""Samples of a model with state: steps, in order, each completed with what the model gave in the step before.

So every run of the model that follows (calibration, golden cases) is an ordinary one, of inputs that it meets in use.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.streams import Streams
from validation.data.joined import GrownInputs, JoinedSteps, Run, Steps, single_samples
from validation.data.overlap import merge_digests, window_digests
from validation.data.samples import Samples, SampleSource

# Of a group of steps, where the batch's opt is 1.
MOST_ROWS = 16


@dataclass(frozen=True)
class SequenceSamples:
    """Samples as steps with complete inputs. streams: over the model that gives the states; one pass at a time.

    order: for each sample which sequence it is of; None where all are of one.  steps: which samples are one step; None
    where each is. Runs are counted in steps.
    """

    samples: SampleSource
    streams: Streams
    order: Array | None = None
    steps: Steps | None = None

    @property
    def name(self) -> str:
        """See `SampleSource`."""
        return self.samples.name

    @property
    def digest(self) -> str:
        """See `SampleSource`."""
        return self.samples.digest

    @property
    def digests(self) -> bytes:
        """The digests of all samples, each once, sorted and joined."""
        return merge_digests(
            [window_digests((inputs for _, inputs in steps) for steps in split(self.samples, self.order))]
        )

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[Run]:
        """See `SampleSource`: steps from the first one on are run, those from `start` on are given."""
        samples, order = self.samples, self.order
        if self.steps:
            samples = JoinedSteps(samples, self.steps)
            order = None if order is None else order[self.steps.firsts]
        for sequence in split(samples, order, stop):
            yield from ((end, inputs) for end, inputs in roll_out(sequence, self.streams) if end > start)


def read_order(samples: Samples, name: str | None) -> Array | None:
    """The array that says which sequence each step is of; None without its name. Raises DataError where there is none,
    or not one number for each step, and for a sequence whose steps are not one behind the other."""
    if name is None:
        return None
    order = samples.column(name)
    if order.ndim != 1:
        raise DataError(f"{samples.name}: array {name!r} has the shape {order.shape}; store one number for each step")
    begun = np.append(0, np.flatnonzero(order[1:] != order[:-1]) + 1)
    found, counts = np.unique(order[begun], return_counts=True)
    if (counts > 1).any():
        again = found[counts > 1][0]
        places = begun[order[begun] == again][:2]
        raise DataError(
            f"{samples.name}: {name!r} has {again} from step {places[0]} and again from step {places[1]}, behind other "
            "sequences; store the steps of a sequence one behind the other, or number the sequences apart"
        )
    return order


def split(steps: SampleSource, order: Array | None, stop: int | None = None) -> Iterator[Iterator[Run]]:
    """The steps of each sequence, without states; each is to be read before the next.

    order: as in `SequenceSamples`.  stop: the steps before it alone. Raises DataError for a run of several samples, as
    they are not one step.
    """
    runs, ahead = single_samples(steps, 0, stop), list[Run]()

    def read(first: Run) -> Iterator[Run]:
        yield first
        for end, inputs in runs:
            if order is not None and order[end - 1] != order[end - 2]:
                ahead.append((end, inputs))
                return
            yield end, inputs

    ahead.extend([first] if (first := next(runs, None)) else [])
    while ahead:
        yield read(ahead.pop())


def roll_out(steps: Iterable[Run], streams: Streams) -> Iterator[Run]:
    """The steps of one sequence, each with the states that those before it left. The last is not run."""
    streams.reset()
    held, grown = dict[str, Array](), GrownInputs(streams.inputs)
    for end, inputs in steps:
        if held:
            streams.run(held)
        held = grown.take(inputs)
        yield end, streams.complete(held)


def stack(
    runs: Iterable[Tensors], specs: Sequence[TensorSpec], dims: Sequence[Dim]
) -> tuple[list[dict[str, Array]], list[list[int]]]:
    """Complete steps in groups of equal shapes, each step a row: the states of a step are among its inputs, so that
    steps of one sequence, and of several, can be run side by side. And the places of each group's steps among
    the runs.

    A group has the batch's opt, or where that is 1 as many as it may have up to MOST_ROWS; steps of a model without a
    batch in all of its inputs are groups of their own. Groups of several shapes, as of a cache that grows, are in an
    order of which each beginning is spread over all of them (van der Corput, 1935): honest rounding is measured on the
    first ones.
    """
    batch, steps = _batch_axes(specs, dims), list(runs)
    alike = dict[tuple[tuple[int, ...], ...], list[int]]()
    for at, step in enumerate(steps):
        alike.setdefault(tuple(step[spec.name].shape for spec in specs), []).append(at)
    groups = [part for places in alike.values() for part in _parts(places, steps[places[0]], batch)]
    if len(alike) > 1:
        groups = [group for _, group in sorted(enumerate(groups), key=lambda item: f"{item[0]:032b}"[::-1])]
    joined = [_join([steps[at] for at in group], batch) for group in groups]
    return joined, groups


def number_steps(count: int, order: Array | None) -> Array:
    """The place [count] of each step in its sequence. order: as in `SequenceSamples`."""
    if order is None:
        return np.arange(count)
    begun = np.flatnonzero(np.append(True, order[1:] != order[:-1]))
    return np.arange(count) - np.repeat(begun, np.diff(np.append(begun, count)))


def _batch_axes(specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> tuple[int, dict[str, int]] | None:
    """(rows of a group, the batch's axis in each input), where every input has one and the least batch is 1."""
    names = {dim.name: dim for dim in dims if dim.min == 1}
    first = next((spec.shape[0] for spec in specs if spec.shape and spec.shape[0] in names), None)
    if first is None or not all(spec.shape.count(first) == 1 for spec in specs):
        return None
    dim = names[str(first)]
    return dim.opt if dim.opt > 1 else min(dim.max, MOST_ROWS), {spec.name: spec.shape.index(first) for spec in specs}


def _parts(places: list[int], step: Tensors, batch: tuple[int, dict[str, int]] | None) -> Iterator[list[int]]:
    """The places of alike steps, in groups. step: one of them, which may have several rows itself."""
    size = 1
    if batch:
        name, axis = next(iter(batch[1].items()))
        size = max(batch[0] // max(step[name].shape[axis], 1), 1)
    yield from (places[start : start + size] for start in range(0, len(places), size))


def _join(group: Sequence[Tensors], batch: tuple[int, dict[str, int]] | None) -> dict[str, Array]:
    if batch is None or len(group) == 1:
        return dict(group[0])
    return {name: np.concatenate([step[name] for step in group], axis) for name, axis in batch[1].items()}
