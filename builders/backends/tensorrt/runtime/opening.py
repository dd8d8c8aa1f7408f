"""How an engine is to be opened: what its options say of running it."""

from collections.abc import Callable
from dataclasses import dataclass

from enginery.core.untyped import Untyped


def _prepare_nothing(_runtime: Untyped) -> None:
    """Nothing to prepare."""


@dataclass(frozen=True)
class Opening:
    """How an engine is to be opened. gpu: index of the GPU.

    streamed_budget_bytes: of streamed weights, how much the GPU keeps; 0 is TensorRT's choice, None for an engine that
    does not stream.  cuda_graphs: replay a graph for each shape.  own_graphs: TensorRT-RTX's own way to do that.
    host_code: whether the engine brings code for the host (version compatible ones do).  stripped: whether its weights
    come from the ONNX model.  prepare: what to do with the runtime before the engine is loaded (plugins).
    """

    gpu: int
    streamed_budget_bytes: int | None = None
    cuda_graphs: bool = False
    own_graphs: bool = False
    host_code: bool = False
    stripped: bool = False
    prepare: Callable[[Untyped], None] = _prepare_nothing
