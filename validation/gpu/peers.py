"""PyTorch as the peer of engines: the same graph run by PyTorch itself, op by op or through torch.compile.

`builders.onnx_torch` turns the graph into an exported program, so that PyTorch runs no interpreter in between.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.arrays import Array, InputCheck
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Session, Tensors, TensorSpec
from validation.gpu.results import seconds_of

if TYPE_CHECKING:
    import torch

    Recorded = tuple[torch.cuda.CUDAGraph, list[torch.Tensor], tuple[torch.Tensor, ...]]
    Module = Callable[..., tuple[torch.Tensor, ...]]

Peer = Literal["eager", "eager-graph", "compile", "compile-autotune"]
# How PyTorch runs the graph; the second replays its kernels as one CUDA graph, the others are modes of torch.compile.
PEERS: Mapping[str, str] = {
    "eager": "PyTorch, op by op",
    "eager-graph": "PyTorch, op by op, as a CUDA graph",
    "compile": "torch.compile",
    "compile-autotune": "torch.compile, max-autotune",
}
_MODES = {"compile": "default", "compile-autotune": "max-autotune"}


class TorchSession(Session):
    """A module on a device as a session: arrays in, arrays out, copies included."""

    def __init__(self, request: BuildRequest, module: "Module", device: str) -> None:
        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._module, self._device, self._check = module, device, InputCheck(request.inputs)

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Run once. Raises DataError for wrong arrays."""
        import torch

        self._check(inputs)
        with torch.no_grad():
            tensors = self._module(*self._place(inputs))
        return {spec.name: np.asarray(value.cpu().numpy()) for spec, value in zip(self.outputs, tensors, strict=True)}

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float]:
        """Seconds of each of `runs` runs, copies left out."""
        import torch

        tensors = self._place(inputs)
        with torch.no_grad():
            return seconds_of(lambda: self._module(*tensors), self._device, runs)

    def _place(self, inputs: Tensors) -> "list[torch.Tensor]":
        import torch

        return [torch.from_numpy(np.array(inputs[spec.name], order="C")).to(self._device) for spec in self.inputs]


def make_peer(peer: Peer, model: Path, request: BuildRequest, device: str) -> "Module":
    """The graph as a callable of PyTorch, which compiles at its first call for each shape.

    peer: the way that PyTorch runs it.  request: shapes and precision.  device: as torch names it.
    Raises EnginesmithError with torch's message where PyTorch cannot run it.
    """
    import torch

    from builders.onnx_torch import to_program

    try:
        module = to_program(model, request).module().to(device)
        if peer == "eager-graph":
            return _Replayed(module)
        if peer in _MODES:
            # Compiled for each size, as where speed matters; with dynamic sizes max-autotune leaves CUDA graphs out.
            return torch.compile(module, mode=_MODES[peer], dynamic=False)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EnginesmithError(f"{PEERS[peer]} does not take {model.name}: {reason}") from error
    return module


class _Replayed:
    """A module whose kernels are recorded once for each shape and replayed as a CUDA graph.

    A graph has fixed addresses of inputs and outputs, so that copies to and from there are part of a run.
    """

    def __init__(self, module: "Module") -> None:
        self._module = module
        self._recorded: dict[object, Recorded] = {}

    def __call__(self, *inputs: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        key = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs)
        graph, recorded_inputs, results = self._recorded[key]
        for recorded_input, tensor in zip(recorded_inputs, inputs, strict=True):
            recorded_input.copy_(tensor)
        graph.replay()
        return results

    def _record(self, inputs: "tuple[torch.Tensor, ...]") -> "Recorded":
        import torch

        copies = [tensor.clone() for tensor in inputs]
        queue = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        queue.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(queue):  # libraries allocate and tune on their first calls, which a graph may not hold
            for _ in range(3):
                self._module(*copies)
        torch.cuda.current_stream().wait_stream(queue)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = tuple(self._module(*copies))
        return graph, copies, results
