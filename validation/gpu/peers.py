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

    Module = Callable[..., tuple[torch.Tensor, ...]]

Peer = Literal["eager", "compile", "compile-autotune"]
# How PyTorch runs the graph: by itself, or in a mode of torch.compile.
PEERS: Mapping[str, str] = {
    "eager": "PyTorch, op by op",
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
        if peer in _MODES:
            # Compiled for each size, as where speed matters; with dynamic sizes max-autotune leaves CUDA graphs out.
            return torch.compile(module, mode=_MODES[peer], dynamic=False)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EnginesmithError(f"{PEERS[peer]} does not take {model.name}: {reason}") from error
    return module
