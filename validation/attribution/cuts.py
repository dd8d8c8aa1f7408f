"""Something that can be tapped: run whole, run with inner tensors given out, and run in segments on given activations.

An ONNX graph is tapped in `onnx_graph`. An engine of another kind takes part once it answers this protocol: TensorRT
would mark inner tensors as outputs and build again, which may change fusions; that is why the bits are compared.

Where to cut two models of one function: at tensors that both have under one name.

A segment is what a model computes between cuts. The candidate runs it on the reference's activations, so that its error
is its own. Rewrites (Q/DQ, casts, fusions) leave the names of the tensors between them in place, and what they replaced
falls inside a segment.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from enginery.core.types import Session, Tensors, TensorSpec


@dataclass(frozen=True)
class GraphStep:
    """One node. reads, makes: names of tensors, constants left out of `reads`.

    zero: of a node that quantizes, the integer that stands for 0; None for others, and where it differs by channel.
    """

    name: str
    op_type: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    zero: float | None = None


class Tappable(Protocol):
    """A model whose inner tensors can be seen and set.

    steps: its nodes in an order in which they can run.  outputs: names.  fuses: whether its runtime joins nodes when it
    runs, so that a tap between two of them may change what they compute.
    """

    steps: Sequence[GraphStep]
    outputs: Sequence[str]
    fuses: bool

    def whole(self) -> AbstractContextManager[Session]:
        """The thing itself, untouched."""
        ...

    def open_tapped(self, tensors: Sequence[str], whole: bool) -> AbstractContextManager[Session]:
        """Gives these tensors out. whole: beside all outputs; else what they do not need is left out."""
        ...

    def shapes(self, tensors: Sequence[str], inputs: Tensors) -> Mapping[str, tuple[int, ...]]:
        """The shapes that these tensors have in a run on `inputs`, without giving them out."""
        ...

    def open_segment(self, tensors: Sequence[str], given: Mapping[str, TensorSpec]) -> AbstractContextManager[Session]:
        """Cut at `given`, which become inputs: each of `tensors`, given or not, is computed from those before it."""
        ...


WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
RECURRENT = ("GRU", "LSTM", "RNN")
# What a runtime lets the kernel before it do.
JOINED = ("Add", "Clip", "HardSigmoid", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Sum", "Tanh")
# What a rewrite adds between the nodes of the model.
ADDED = ("Cast", "QuantizeLinear", "DequantizeLinear", "Identity")


@dataclass(frozen=True)
class GraphSegment:
    """The steps behind `target`, back to `boundary`: cuts and inputs of the model."""

    target: str
    boundary: tuple[str, ...]
    steps: tuple[GraphStep, ...]

    @property
    def main(self) -> GraphStep:
        """The step that the segment is named after: the last with weights, else the last that is the model's own."""
        own = [step for step in self.steps if step.op_type not in ADDED]
        weighted = [step for step in own if step.op_type in (*WEIGHTED, *RECURRENT)]
        return (weighted or own or [*self.steps])[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's own nodes; of all, where there are only casts and the like."""
        own = tuple(step.name for step in self.steps if step.op_type not in ADDED)
        return own or tuple(step.name for step in self.steps)


def list_shared(reference: Sequence[GraphStep], candidate: Sequence[GraphStep]) -> list[str]:
    """The tensors that a node of both makes, in the reference's order; a weight that a rewrite converts is none: it
    belongs to its reader."""
    known = {name for step in candidate for name in step.makes}
    activations = (step for step in reference if step.reads or step.op_type not in ADDED)
    return [name for step in activations for name in step.makes if name in known]


def exclude_joined(tensors: Sequence[str], steps: Sequence[GraphStep]) -> list[str]:
    """Without those between a kernel with weights and the one node that reads it, if a runtime would join the two."""
    readers: dict[str, list[GraphStep]] = {}
    for step in steps:
        for name in step.reads:
            readers.setdefault(name, []).append(step)
    maker = {name: step for step in steps for name in step.makes}

    def inside(name: str) -> bool:
        found = readers.get(name, [])
        heavy = any(kind in maker[name].op_type for kind in WEIGHTED)
        return heavy and len(found) == 1 and found[0].op_type in JOINED

    return [name for name in tensors if not inside(name)]


def segments(steps: Sequence[GraphStep], cuts: Collection[str], targets: Sequence[str]) -> Iterator[GraphSegment]:
    """The segment of each target, for these cuts."""
    maker = {name: index for index, step in enumerate(steps) for name in step.makes}
    for target in targets:
        chosen, boundary, waiting = set[int](), list[str](), [target]
        while waiting:
            index = maker[waiting.pop()]
            if index in chosen:
                continue
            chosen.add(index)
            for name in steps[index].reads:
                if name in cuts or name not in maker:
                    boundary.append(name)
                else:
                    waiting.append(name)
        yield GraphSegment(target, tuple(sorted(set(boundary))), tuple(steps[index] for index in sorted(chosen)))


def spread(tensors: Sequence[str], most: int) -> list[str]:
    """At most so many, evenly."""
    if len(tensors) <= most:
        return [*tensors]
    return [tensors[(index + 1) * len(tensors) // (most + 1)] for index in range(most)]


def windows(found: Sequence[GraphSegment], size: Mapping[str, int], most: int) -> Iterator[list[GraphSegment]]:
    """Consecutive segments whose targets and boundaries together stay below `most` bytes, but at least one."""
    window: list[GraphSegment] = []
    held: set[str] = set()
    for segment in found:
        grown = held | {segment.target, *segment.boundary}
        if window and sum(size.get(name, 0) for name in grown) > most:
            yield window
            window, grown = [], {segment.target, *segment.boundary}
        window.append(segment)
        held = grown
    if window:
        yield window
