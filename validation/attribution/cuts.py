"""Cuts a graph, and reduces it to a small one that shows the same fault."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

# Where to cut two models of one function: at tensors that both have under one name.
#
# A segment is what a model computes between cuts. The candidate runs it on the reference's activations, so that its
# error is its own. Rewrites (Q/DQ, casts, fusions) keep the names of the tensors between them, and what they replaced
# is inside of a segment.


@dataclass(frozen=True)
class GraphStep:
    """One node. reads, makes: names of its input tensors without constants, and of its outputs.

    zero: the zero point of a node that quantizes; None for other nodes, and where it differs by channel.
    """

    name: str
    op_type: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    zero: float | None = None


WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
RECURRENT = ("GRU", "LSTM", "RNN")
# Operators that a runtime fuses into the kernel before them.
JOINED = ("Add", "Clip", "HardSigmoid", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Sum", "Tanh")
# Operators that a rewrite adds between the nodes of the model.
ADDED = ("Cast", "QuantizeLinear", "DequantizeLinear", "Identity")


@dataclass(frozen=True)
class GraphSegment:
    """The steps that compute the tensor `target` from the tensors `boundary`: cuts and inputs of the model."""

    target: str
    boundary: tuple[str, ...]
    steps: tuple[GraphStep, ...]

    @property
    def main(self) -> GraphStep:
        """The step that names the segment: the last one with weights, else the last one that no rewrite added."""
        graph_steps = [step for step in self.steps if step.op_type not in ADDED]
        weighted_steps = [step for step in graph_steps if step.op_type in (*WEIGHTED, *RECURRENT)]
        return (weighted_steps or graph_steps or [*self.steps])[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the steps that no rewrite added; of all, where all were added."""
        graph_names = tuple(step.name for step in self.steps if step.op_type not in ADDED)
        return graph_names or tuple(step.name for step in self.steps)


def list_shared(reference: Sequence[GraphStep], candidate: Sequence[GraphStep]) -> list[str]:
    """The names of tensors that nodes of both compute, in the reference's order.

    A weight that a rewrite converts is none of them: it is part of the segment that reads it.
    """
    candidate_names = {name for step in candidate for name in step.makes}
    activation_steps = (step for step in reference if step.reads or step.op_type not in ADDED)
    return [name for step in activation_steps for name in step.makes if name in candidate_names]


def exclude_joined(tensors: Sequence[str], steps: Sequence[GraphStep]) -> list[str]:
    """The tensors without those between a node with weights and its only reader, if a runtime would fuse the two."""
    readers: dict[str, list[GraphStep]] = {}
    for step in steps:
        for name in step.reads:
            readers.setdefault(name, []).append(step)
    producers = {name: step for step in steps for name in step.makes}

    def inside(name: str) -> bool:
        consumers = readers.get(name, [])
        is_weighted = any(kind in producers[name].op_type for kind in WEIGHTED)
        return is_weighted and len(consumers) == 1 and consumers[0].op_type in JOINED

    return [name for name in tensors if not inside(name)]


def segments(steps: Sequence[GraphStep], cuts: Collection[str], targets: Sequence[str]) -> Iterator[GraphSegment]:
    """The segment of each target tensor, given all cuts."""
    producer_indices = {name: index for index, step in enumerate(steps) for name in step.makes}
    for target in targets:
        step_indices, boundary, pending = set[int](), list[str](), [target]
        while pending:
            index = producer_indices[pending.pop()]
            if index in step_indices:
                continue
            step_indices.add(index)
            for name in steps[index].reads:
                if name in cuts or name not in producer_indices:
                    boundary.append(name)
                else:
                    pending.append(name)
        yield GraphSegment(target, tuple(sorted(set(boundary))), tuple(steps[index] for index in sorted(step_indices)))


def spread(tensors: Sequence[str], limit: int) -> list[str]:
    """At most `limit` of the tensors, evenly spaced."""
    if len(tensors) <= limit:
        return [*tensors]
    return [tensors[(index + 1) * len(tensors) // (limit + 1)] for index in range(limit)]


def windows(segments: Sequence[GraphSegment], size: Mapping[str, int], limit: int) -> Iterator[list[GraphSegment]]:
    """Groups of consecutive segments, at least one in each, whose targets and boundaries hold up to `limit` bytes.

    size: bytes of each tensor by name.
    """
    window: list[GraphSegment] = []
    window_tensors: set[str] = set()
    for segment in segments:
        grown_tensors = window_tensors | {segment.target, *segment.boundary}
        if window and sum(size.get(name, 0) for name in grown_tensors) > limit:
            yield window
            window, grown_tensors = [], {segment.target, *segment.boundary}
        window.append(segment)
        window_tensors = grown_tensors
    if window:
        yield window


# Delta debugging: a small subset of items for which a test still passes.
#
# ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (IEEE Transactions on Software
# Engineering 28(2), 2002): try each of n subsets, then each complement, then twice as many subsets. The result is
# 1-minimal: without any one of its items the test fails. It need not be the smallest of all such sets.

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reduction(Generic[Item]):
    """The subset found. items: None where not even all items pass.  runs: how often the test was run.

    minimal: whether each item was shown to be needed.  spent: whether the runs or the time were over first.
    """

    items: tuple[Item, ...] | None
    runs: int
    minimal: bool
    spent: bool = False


class _Spent(Exception):  # noqa: N818 - no error: it ends the search
    """No run of the test is left."""


def reduce(
    items: Sequence[Item],
    passes: Callable[[Sequence[Item]], bool],
    most_runs: int,
    stop: Callable[[], bool] = lambda: False,
) -> Reduction[Item]:
    """A 1-minimal subset of `items` for which `passes` holds. items: the likeliest first, each once.

    The empty set is known to fail. The first 1, 2, 4, ... items are tried before the search, so that a good order saves
    most of its runs; the same subset is tested once. After `most_runs` runs, or once `stop` returns true, the result is
    the smallest set so far.
    """
    outcomes: dict[tuple[int, ...], bool] = {}

    def test(chosen_indices: Sequence[int]) -> bool:
        key = tuple(sorted(chosen_indices))
        if key not in outcomes:
            if len(outcomes) >= most_runs or stop():
                raise _Spent
            outcomes[key] = passes([items[index] for index in key])
        return outcomes[key]

    indices: list[int] | None = None
    is_minimal, is_spent, chunk_count = False, False, 2
    try:
        indices = _first_that_passes(len(items), test)
        while indices and len(indices) > 1:
            chunk_count = min(chunk_count, len(indices))
            if smaller_split := _smaller(indices, chunk_count, test):
                indices, chunk_count = smaller_split
            elif chunk_count == len(indices):
                break
            else:
                chunk_count *= 2
        is_minimal = indices is not None
    except _Spent:
        is_spent = True
    return Reduction(
        None if indices is None else tuple(items[index] for index in indices), len(outcomes), is_minimal, is_spent
    )


def _first_that_passes(count: int, test: Callable[[Sequence[int]], bool]) -> list[int] | None:
    length = 1
    while length < count:
        if test(range(length)):
            return [*range(length)]
        length *= 2
    return [*range(count)] if count and test(range(count)) else None


def _smaller(picks: Sequence[int], parts: int, test: Callable[[Sequence[int]], bool]) -> tuple[list[int], int] | None:
    """A part of `picks`, or the rest without one, that passes, with the number of parts to go on with."""
    bounds = [index * len(picks) // parts for index in range(parts + 1)]
    subsets = [picks[low:high] for low, high in pairwise(bounds)]
    for subset in subsets:
        if test(subset):
            return [*subset], 2
    for subset in subsets if parts > 2 else ():
        other_indices = [index for index in picks if index not in subset]
        if test(other_indices):
            return other_indices, max(parts - 1, 2)
    return None
