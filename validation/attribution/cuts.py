"""Cuts a graph, and reduces it to a small one that shows the same fault."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

# Two models of one function are cut at the tensors that have the same name in both.
#
# A segment is the part of a model between cuts. The candidate runs each segment on the reference's activations, which
# excludes errors of earlier segments. Rewrites (Q/DQ, casts, fusions) keep the names of the tensors around them; the
# replaced nodes are inside a segment.


@dataclass(frozen=True)
class GraphStep:
    """One node. reads, makes: names of its input tensors without constants, and of its outputs.

    zero: the zero point of a QuantizeLinear; None for other nodes, and where the zero point differs by channel.
    by_row: False for a Softmax that may be over another axis than the last, and for an Expand, Reshape, Squeeze or
    Unsqueeze that may change the last axis.
    """

    name: str
    op_type: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    zero: float | None = None
    by_row: bool = True


WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
RECURRENT = ("GRU", "LSTM", "RNN")
# Operators that a runtime fuses into the kernel before them.
JOINED = ("Add", "Clip", "HardSigmoid", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Sum", "Tanh")
# Operators that a rewrite adds between the nodes of the model.
ADDED = ("Cast", "QuantizeLinear", "DequantizeLinear", "Identity")
# Operators that add a mask to attention scores, or convert mask or scores without changing differences of elements.
MASKING = ("Add", "Cast", "Expand", "Identity", "Reshape", "Squeeze", "Sum", "Unsqueeze", "Where")


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
        """Names of the steps that no rewrite added; if a rewrite added all steps, the names of all."""
        graph_names = tuple(step.name for step in self.steps if step.op_type not in ADDED)
        return graph_names or tuple(step.name for step in self.steps)


def list_shared(reference: Sequence[GraphStep], candidate: Sequence[GraphStep]) -> list[str]:
    """The names of the tensors that both models compute, in the reference's order.

    Weights that a rewrite converts are left out: they are part of the segment that reads them.
    """
    candidate_names = {name for step in candidate for name in step.makes}
    activation_steps = (step for step in reference if step.reads or step.op_type not in ADDED)
    return [name for step in activation_steps for name in step.makes if name in candidate_names]


def list_scores(steps: Sequence[GraphStep], outputs: Sequence[str]) -> set[str]:
    """Names of tensors, except `outputs`, that only Softmaxes read, also through MASKING operators. steps: in order."""
    scores, others = set[str](), set(outputs)
    for step in reversed(steps):
        leads = step.op_type in MASKING and scores.issuperset(step.makes) and others.isdisjoint(step.makes)
        (scores if step.by_row and (leads or step.op_type == "Softmax") else others).update(step.reads)
    return scores - others


def exclude_joined(tensors: Sequence[str], steps: Sequence[GraphStep]) -> list[str]:
    """The tensors, except those between a node with weights and a single reader that a runtime fuses into it."""
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
    """The segment that ends at each target tensor. cuts: names of all tensors at which the model is cut."""
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
    """Groups of consecutive segments whose targets and boundaries have up to `limit` bytes, or of one larger segment.

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
# 1-minimal: the test fails if any one item is removed. It need not be the smallest of all such sets.

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reduction(Generic[Item]):
    """The smallest subset found that passes. items: None if none passed.  runs: number of runs of the test.

    minimal: whether the subset is 1-minimal.  spent: whether the search stopped for lack of runs or time.
    """

    items: tuple[Item, ...] | None
    runs: int
    minimal: bool
    spent: bool = False


class _Spent(Exception):  # noqa: N818 - no error: it ends the search
    """The search has used all its runs, or its time."""


def reduce(
    items: Sequence[Item],
    passes: Callable[[Sequence[Item]], bool],
    most_runs: int,
    stop: Callable[[], bool] = lambda: False,
) -> Reduction[Item]:
    """A 1-minimal subset of `items` for which `passes` holds. items: without duplicates, the likeliest first.

    The empty set must fail. The first 1, 2, 4, ... items are tried before the search; a good order then saves most
    runs. No subset is tested twice. After `most_runs` runs, or once `stop` returns true, the result is the smallest
    subset so far.
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
    """(a part of `picks`, or all parts but one, that passes; the number of parts for the next split); None if none."""
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
