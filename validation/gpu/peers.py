"""PyTorch for comparison with engines: it runs the same graph, op by op or through torch.compile.

`builders.onnx_torch` converts the graph to an exported program: no interpreter slows PyTorch down.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from builders.backends.request_checks import FunctionSession
from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Tensors
from validation.gpu.results import seconds_of

if TYPE_CHECKING:
    import torch

    Module = Callable[..., tuple[torch.Tensor, ...]]

Peer = Literal["eager", "compile", "compile-autotune"]
# How PyTorch runs the graph: by itself, or in a mode of torch.compile.
PEERS: Mapping[str, str] = {
    "eager": "PyTorch, op by op",
    "compile": "torch.compile",
    "compile-autotune": "torch.compile, max-autotune",
}
_MODES = {"compile": "default", "compile-autotune": "max-autotune"}


class TorchSession(FunctionSession):
    """A module on a device as a session: arrays in, arrays out, copies included."""

    def __init__(self, request: BuildRequest, module: "Module", device: str) -> None:
        super().__init__(request, "PyTorch", self._call)
        self._module, self._device = module, device

    def _call(self, arrays: list[Array]) -> list[Array]:
        import torch

        with torch.no_grad():
            tensors = self._module(*self._place(arrays))
        return [np.asarray(value.cpu().numpy()) for value in tensors]

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float]:
        """Seconds of each of `runs` runs, copies left out."""
        import torch

        tensors = self._place([inputs[spec.name] for spec in self.inputs])
        with torch.no_grad():
            return seconds_of(lambda: self._module(*tensors), self._device, runs)

    def _place(self, arrays: list[Array]) -> "list[torch.Tensor]":
        import torch

        return [torch.from_numpy(np.array(array, order="C")).to(self._device) for array in arrays]


def make_peer(peer: Peer, model: Path, request: BuildRequest, device: str) -> "Module":
    """The graph as a callable of PyTorch; in a mode of torch.compile, its first call for each shape compiles.

    peer: how PyTorch runs the graph.  request: shapes and precision.  device: as torch names it.
    Raises EnginesmithError with torch's message if PyTorch cannot run the graph.
    """
    import torch

    from builders.onnx_torch import to_program

    try:
        module = to_program(model, request).module().to(device)
        if peer in _MODES:
            # Compiled for each size, for the best speed; with dynamic sizes max-autotune does not use CUDA graphs.
            return torch.compile(module, mode=_MODES[peer], dynamic=False)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EnginesmithError(f"{PEERS[peer]} cannot run {model.name}: {reason}") from error
    return module
