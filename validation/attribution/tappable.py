"""Something that can be tapped: run whole, run with inner tensors given out, and run in segments on given activations.

An ONNX graph is tapped in `onnx_graph`. An engine of another kind takes part once it answers this protocol: TensorRT
would mark inner tensors as outputs and build again, which may change fusions; that is why the bits are compared.
"""

from collections.abc import Mapping, Sequence
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
