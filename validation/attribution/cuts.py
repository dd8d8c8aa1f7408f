"""Where to cut two models of one function: at tensors that both have under one name.

A segment is what a model computes between cuts. The candidate runs it on the reference's activations, so that its error
is its own. Rewrites (Q/DQ, casts, fusions) keep the names of the tensors between them, and what they replaced is inside
of a segment.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass


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
        own = [step for step in self.steps if step.op_type not in ADDED]
        weighted = [step for step in own if step.op_type in (*WEIGHTED, *RECURRENT)]
        return (weighted or own or [*self.steps])[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the steps that no rewrite added; of all, where all were added."""
        own = tuple(step.name for step in self.steps if step.op_type not in ADDED)
        return own or tuple(step.name for step in self.steps)


def list_shared(reference: Sequence[GraphStep], candidate: Sequence[GraphStep]) -> list[str]:
    """The names of tensors that nodes of both compute, in the reference's order.

    A weight that a rewrite converts is none of them: it is part of the segment that reads it.
    """
    known = {name for step in candidate for name in step.makes}
    activations = (step for step in reference if step.reads or step.op_type not in ADDED)
    return [name for step in activations for name in step.makes if name in known]


def exclude_joined(tensors: Sequence[str], steps: Sequence[GraphStep]) -> list[str]:
    """The tensors without those between a node with weights and its only reader, if a runtime would fuse the two."""
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
    """The segment of each target tensor, given all cuts."""
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
    """At most `most` of the tensors, evenly spaced."""
    if len(tensors) <= most:
        return [*tensors]
    return [tensors[(index + 1) * len(tensors) // (most + 1)] for index in range(most)]


def windows(found: Sequence[GraphSegment], size: Mapping[str, int], most: int) -> Iterator[list[GraphSegment]]:
    """Groups of consecutive segments, at least one in each, whose targets and boundaries hold up to `most` bytes.

    size: bytes of each tensor by name.
    """
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
