"""Methods that only some backends have: opening parts of an engine, new weights, times of nodes, timing caches.

A backend has what the methods in its class say: `isinstance(backend, Refitting)`. Standard library only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from enginesmith.core.types import Backend, BuildRequest, Engine, QuantizationScheme, Session, Shape, Target, Tensors

# A tensor as it was seen: numpy's name of its type, and its shape.
TensorType = tuple[str, Shape]
_TYPES = {"float": "float32", "double": "float64"}  # ONNX's names that differ from numpy's
GIVEN = "timing.cache"
GROWN = "timing.grown"


@runtime_checkable
class PartOpening(Protocol):
    """A backend whose engines are ONNX graphs."""

    def open_part(self, path: Path, *, as_written: bool = False) -> AbstractContextManager[Session]:
        """A session of the ONNX file `path`, with the options and threads of this backend's engines.

        as_written: run the graph without optimization. Raises ModelError when the file cannot be read.
        """


@runtime_checkable
class Refitting(Protocol):
    """A backend that gives an engine other weights without a build.

    The caller makes sure that the models differ in their weights alone (`builders.onnx_graphs.structure`). An engine
    that leaves its weights out (`requirements.Weights`) is opened with the ONNX model that has them (`Engine.weights`).
    """

    def refits(self, request: BuildRequest) -> str | None:
        """Why an engine of this request takes no other weights; None when it does. Imports no compiler."""

    def refit_needs_gpu(self) -> bool:
        """Whether `refit` loads the engine, and so needs a GPU that runs it."""

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        """The engine of `request` under `workdir`: the kernels of `engine` with the weights of `model`.

        Raises EnginesmithError when the compiler does not take them.
        """


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that the runtime executes, after its own fusions.

    seconds: mean over the runs, without what the profiler adds to it where that is known.
    inputs, outputs: types and shapes in the run, of weights too; empty where the runtime tells only the time.
    """

    name: str
    op_type: str
    seconds: float
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()


@dataclass(frozen=True)
class RunProfile:
    """The nodes in the order of their execution.

    runs: number of runs that the times are means of.  seconds: of a whole run, with the time that the profiler takes.
    """

    nodes: Sequence[NodeTime]
    runs: int
    seconds: float


@runtime_checkable
class Profiling(Protocol):
    """A backend that can time the nodes of its engines."""

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:
        """The times of the engine's nodes over `runs` runs.

        inputs: of each run, by name.  workdir: an empty folder.
        Raises as `Backend.open` and `Session.run` do.
        """


@runtime_checkable
class SchemesByTarget(Protocol):
    """A backend whose quantized graphs depend on the target."""

    def scheme_for(self, target: Target) -> QuantizationScheme:
        """The form of quantized graph that it compiles best for a target. Imports no compiler."""


def get_scheme(backend: Backend, target: Target) -> QuantizationScheme:
    """The result of `SchemesByTarget.scheme_for`; `Backend.scheme` for a backend without this method."""
    return backend.scheme_for(target) if isinstance(backend, SchemesByTarget) else backend.scheme


def element_name(element_type: int) -> str:
    """numpy's name of an ONNX element type, or ONNX's own in small letters where numpy has none."""
    from onnx import TensorProto

    return type_name(str(TensorProto.DataType.Name(element_type)).lower())


def type_name(name: str) -> str:
    """numpy's name for ONNX's name of an element type, which is in small letters; that itself where numpy has none."""
    return _TYPES.get(name, name)


@runtime_checkable
class TimingCached(Protocol):
    """A backend whose tuner takes what it measured in earlier builds.

    The caller of `build` puts a cache at WORKDIR/`GIVEN` and finds the grown one at WORKDIR/`GROWN`. A cache makes
    builds quicker or engines faster, and neither reproducible: it is no part of a build key.
    """

    def timing_place(self) -> tuple[str, str] | None:
        """Product (GPU or CPU) and compiler's version that a cache from here is good for; None without tuning."""

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """One cache with what both know. Raises EnginesmithError when they do not go together."""
