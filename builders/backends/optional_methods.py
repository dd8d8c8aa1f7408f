"""Methods that only some backends have: opening parts of an engine, new weights, times of nodes, timing caches.

A backend has these methods if it is an instance: `isinstance(backend, Refitting)`. Standard library only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from enginesmith.core.types import Backend, BuildRequest, Engine, QuantizationScheme, Session, Shape, Target, Tensors

# The type and shape of a tensor in a run: numpy's name of its type, and its shape.
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
    """A backend that can replace an engine's weights without a build.

    The caller makes sure that the models differ in their weights alone (`builders.onnx_graphs.structure`). An engine
    that leaves its weights out (`requirements.Weights`) is opened with the ONNX model that has them (`Engine.weights`).
    """

    def refits(self, request: BuildRequest) -> str | None:
        """Why an engine of this request cannot be refitted; None if it can. Imports no compiler."""

    def refit_needs_gpu(self) -> bool:
        """Whether `refit` loads the engine, and so needs a GPU that runs it."""

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        """The engine of `request` under `workdir`: the kernels of `engine` with the weights of `model`.

        Raises EnginesmithError when the compiler does not accept the weights.
        """


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that the runtime executes, after its own fusions.

    seconds: mean over the runs, without the profiler's overhead if that is known.
    inputs, outputs: types and shapes in the run, including weights; empty if the runtime reports only the time.
    """

    name: str
    op_type: str
    seconds: float
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()


@dataclass(frozen=True)
class RunProfile:
    """Times of the nodes, in the order of their execution.

    runs: number of runs averaged.  seconds: of a whole run, including the profiler's overhead.
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
        """The form of quantized graph that the backend compiles best for a target. Imports no compiler."""


def get_scheme(backend: Backend, target: Target) -> QuantizationScheme:
    """The result of `SchemesByTarget.scheme_for`; `Backend.scheme` for a backend without this method."""
    return backend.scheme_for(target) if isinstance(backend, SchemesByTarget) else backend.scheme


def element_name(element_type: int) -> str:
    """numpy's name of an ONNX element type, or ONNX's own in lower case if numpy has none."""
    from onnx import TensorProto

    return type_name(str(TensorProto.DataType.Name(element_type)).lower())


def type_name(name: str) -> str:
    """numpy's name of an element type. name: ONNX's, in small letters; returned as it is if numpy has no such type."""
    return _TYPES.get(name, name)


@runtime_checkable
class TimingCached(Protocol):
    """A backend whose tuner can use the measurements of earlier builds.

    The caller of `build` puts a cache at WORKDIR/`GIVEN` and finds the grown one at WORKDIR/`GROWN`. A cache makes
    builds faster or engines faster, and neither reproducible: it is no part of a build key.
    """

    def timing_place(self) -> tuple[str, str] | None:
        """The product (GPU or CPU) and compiler version for which a cache of this machine is valid; None if nothing is
        tuned here."""

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """One cache with the measurements of both. Raises EnginesmithError if they cannot be merged."""
