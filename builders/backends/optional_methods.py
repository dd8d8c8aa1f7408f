"""Opening a part of an engine, or a graph of one's own, as a backend opens its engines. Standard library only.

New weights for an engine, without a build: what a backend that can do that offers.

A backend whose engines leave their weights out says so (`Weights`); whoever opens such an engine gives the ONNX model
with the weights along (`Engine.weights`). Standard library only.

What a runtime tells about one run from the inside: the time of each node, and the shapes that it saw there.

A backend that can tell has the methods of `Profiling` besides those of `Backend`. Standard library only.

What a tuner has measured, given to the next build on a machine of that kind.

Such a cache makes builds quicker or better and not reproducible: it is no part of a build key. Whoever builds puts one
at WORKDIR/`GIVEN` and finds the grown one at WORKDIR/`GROWN`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from enginery.core.types import Backend, BuildRequest, Engine, Session, Shape, Tensors


class PartOpening(Protocol):
    """A backend whose engines are ONNX graphs (`Capabilities.opens_parts`)."""

    def open_part(self, path: Path, *, as_written: bool = False) -> AbstractContextManager[Session]:
        """A session of the ONNX file `path`, with the options and threads of this backend's engines.

        as_written: run the graph without optimization. Raises ModelError when the file cannot be read.
        """
        ...


def opening_parts(backend: Backend) -> PartOpening | None:
    """The backend, where it opens parts of its engines; else None."""
    return cast("PartOpening", backend) if backend.capabilities.opens_parts else None


class Refitting(Protocol):
    """A backend that can give an engine other weights (`Capabilities.refits`). Whether a model differs in its weights
    alone is asked before (`builders.onnx_graphs.structure`)."""

    def refits(self, request: BuildRequest) -> str | None:
        """Why an engine of this request takes no other weights; None when it does. Imports no compiler."""
        ...

    def refit_needs_gpu(self) -> bool:
        """Whether `refit` loads the engine, and so needs a GPU that runs it."""
        ...

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        """The engine of `request` under `workdir`: the kernels of `engine` with the weights of `model`.

        Raises EngineryError when the compiler does not take them.
        """
        ...


def get_refitting(backend: Backend) -> Refitting | None:
    """The backend, where it gives engines other weights; else None."""
    return cast("Refitting", backend) if backend.capabilities.refits else None


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


GIVEN = "timing.cache"
GROWN = "timing.grown"


class TimingCached(Protocol):
    """A backend that can be given what its tuner measured before (`Capabilities.timing_cache`)."""

    def timing_place(self) -> tuple[str, str] | None:
        """The product (a GPU's, or a CPU's where CPUs are tuned for) and the compiler's version that a cache from here
        is good for; None where nothing is tuned."""
        ...

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """One cache with what both know. Raises EngineryError when they do not go together."""
        ...


def timing_cached(backend: Backend) -> TimingCached | None:
    """The backend, where it takes a timing cache; else None."""
    return cast("TimingCached", backend) if backend.capabilities.timing_cache else None
