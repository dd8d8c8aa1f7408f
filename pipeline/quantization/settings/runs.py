"""Calibration samples as the search wants them: many in a run, most of them to fit settings on, others to judge on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.types import Dim, Tensors, TensorSpec

FITTED, JUDGED = 384, 96

# Number of samples, and the inputs of one run.
Run = tuple[int, Tensors]


def group_runs(ends: Iterable[tuple[int, Tensors]], inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[Run]:
    """Runs of about the batch size that the model is tuned for, from runs of as few samples as it takes.

    ends: the number of samples up to the end of each run, and its inputs. Consecutive runs of equal shape are joined
    where all inputs lead with the same dynamic dim and none has it elsewhere; an unoptimized graph dequantizes its
    weights anew in every run.
    """
    size, held, before, count = _joinable(inputs, dims), list[Tensors](), 0, 0
    for end, tensors in ends:
        if held and (count >= size or _shape(held[0]) != _shape(tensors)):
            yield count, _join(held)
            held, count = [], 0
        held.append(tensors)
        count += end - before
        before = end
    if held:
        yield count, _join(held)


@dataclass(frozen=True)
class ScoredRuns:
    """A run to judge the model on. start, stop: its samples in the data set."""

    inputs: Tensors
    start: int
    stop: int


@dataclass(frozen=True)
class RunLabels:
    """The right answers of all samples, in order. output: whose argmax over the last axis is the answer."""

    output: str
    values: Array

    def of(self, run: ScoredRuns) -> Array:
        """Those of one run, flat."""
        return self.values[run.start : run.stop].reshape(-1)


def divide_runs(runs: Iterable[Run]) -> tuple[list[Run], list[ScoredRuns]]:
    """Runs to fit settings on, and others to judge the model on: every fourth, until there are enough.

    With fewer than four runs, they are the same.
    """
    fitted, judged = list[ScoredRuns](), list[ScoredRuns]()
    counts, start = [0, 0], 0
    for index, (count, inputs) in enumerate(runs):
        run = ScoredRuns(inputs, start, start := start + count)
        if index % 4 == 3 and counts[1] < JUDGED:
            judged.append(run)
            counts[1] += count
        elif counts[0] < FITTED:
            fitted.append(run)
            counts[0] += count
        if counts[0] >= FITTED and counts[1] >= JUDGED:
            break
    return [(run.stop - run.start, run.inputs) for run in fitted], judged or fitted


def _joinable(inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> int:
    """How many samples may go into one run; 1 where runs must stay as they are."""
    leading = {spec.shape[0] if spec.shape else 1 for spec in inputs}
    inner = {size for spec in inputs for size in spec.shape[1:]}
    if len(leading) != 1 or leading & inner:
        return 1
    return next((dim.opt for dim in dims if dim.name in leading), 1)


def _shape(tensors: Tensors) -> Mapping[str, tuple[int, ...]]:
    return {name: values.shape for name, values in tensors.items()}


def _join(held: Sequence[Tensors]) -> Tensors:
    return {name: np.concatenate([tensors[name] for tensors in held]) for name in held[0]} if held[1:] else held[0]
