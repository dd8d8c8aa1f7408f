"""What a runtime tells about one run from the inside: the time of each node, and the shapes that it saw there.

A backend that can tell has the methods of `Profiling` besides those of `Backend`. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from enginery.core.types import Backend, Engine, Shape, Tensors

# A tensor as it was seen: numpy's name of its type, and its shape.
TensorType = tuple[str, Shape]
_TYPES = {"float": "float32", "double": "float64"}  # ONNX's names that differ from numpy's


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that the runtime executes, after its own fusions.

    seconds: mean of a run, without what the profiler adds to it where that is known.
    inputs, outputs: as they were seen, weights included; empty where the runtime says only the time.
    """

    name: str
    op_type: str
    seconds: float
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()


@dataclass(frozen=True)
class RunProfile:
    """The nodes of one run in the order of their execution.

    runs: that the times are means of.  seconds: of a whole run under the profiler, which itself takes time.
    """

    nodes: Sequence[NodeTime]
    runs: int
    seconds: float


class Profiling(Protocol):
    """A backend that can time the nodes of its engines (`Capabilities.times_nodes`)."""

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:
        """Open the engine with the runtime's profiler and run it so often. Raises as `Backend.open` and `run` do."""
        ...


def get_profiling(backend: Backend) -> Profiling | None:
    """The backend, where it times nodes; else None."""
    return cast("Profiling", backend) if backend.capabilities.times_nodes else None


def element_name(element_type: int) -> str:
    """numpy's name of an ONNX element type, or ONNX's own in small letters where numpy has none."""
    from onnx import TensorProto

    return type_name(str(TensorProto.DataType.Name(element_type)).lower())


def type_name(name: str) -> str:
    """numpy's name for ONNX's name of an element type, which is in small letters; that itself where numpy has none."""
    return _TYPES.get(name, name)
