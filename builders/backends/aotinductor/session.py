"""Runs an AOTInductor package. Its code checks nothing, so every input is checked before it is called."""

import json
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from builders.onnx_ops.torch_arrays import to_array, to_tensor
from enginesmith.arrays import InputCheck
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.types import Engine, Session, Tensors, TensorSpec, Untyped


class PackageSession(Session):
    """A package opened on the CPU, or on the first GPU. Raises EnginesmithError when it cannot be loaded."""

    def __init__(self, engine: Engine, model_name: str, faults: str) -> None:
        self.inputs: Sequence[TensorSpec] = engine.request.inputs
        self.outputs: Sequence[TensorSpec] = engine.request.outputs
        self._name = engine.path.name
        self._accepts = InputCheck(engine.request.inputs, engine.request.profiles)
        self._device = torch.device("cpu" if engine.request.target.is_cpu else "cuda")
        try:
            # The loader itself: torch's function around it would read, and unpickle, programs beside the code.
            self._model: Untyped = torch._C._aoti.AOTIModelPackageLoader(str(engine.path), model_name, False, 1, -1)
        except (RuntimeError, ValueError) as error:
            raise EnginesmithError(f"{self._name} cannot be loaded: {error}; build it again") from error
        self._faults: list[str] = json.loads(self._model.get_metadata().get(faults, "[]"))

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """Run once. Raises DataError for arrays that the engine was not built for, EnginesmithError when it fails."""
        if self._model is None:
            raise EnginesmithError(f"{self._name}: the session is closed; open it again")
        self._accepts(inputs)
        try:
            results = self._model.boxed_run(self._place(inputs))
        except RuntimeError as error:
            raise EnginesmithError(f"{self._name} failed while running: {error}") from error
        sound_flags: list[bool] = results.pop().tolist() if self._faults else []
        for fault, is_sound in zip(self._faults, sound_flags, strict=True):
            if not is_sound:  # an index out of range or a division by zero: the results are of other numbers
                raise DataError(f"{fault}: the model has no result for these inputs")
        output_arrays = {spec.name: to_array(tensor) for spec, tensor in zip(self.outputs, results, strict=True)}
        # An output that is an input would change with the caller's array.
        shared_names = {
            name for name, array in output_arrays.items() if any(np.may_share_memory(array, x) for x in inputs.values())
        }
        return {name: array.copy() if name in shared_names else array for name, array in output_arrays.items()}

    def _place(self, inputs: Tensors) -> list[torch.Tensor]:
        """The inputs as tensors on the device, in the package's order."""
        tensors = [_share_as_tensor(inputs[spec.name]) for spec in self.inputs]
        return tensors if self._device.type == "cpu" else [tensor.to(self._device) for tensor in tensors]

    def prepare_call(self, inputs: Tensors) -> Callable[[], object]:
        """A function that calls the package on tensors of `inputs`, which were put on its device before."""
        self.run(inputs)
        tensors = self._place(inputs)

        def call() -> object:
            outputs = self._model.boxed_run(list(tensors))
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            return outputs

        return call

    def close(self) -> None:
        """Unload the package."""
        self._model = None


def _share_as_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor; without a copy if it is C-contiguous and of a boolean, integer or floating dtype."""
    if array.dtype.kind not in "biuf" or not array.flags.c_contiguous:
        return to_tensor(array)
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # takes longer than all else here
        warnings.simplefilter("ignore")  # that an array which must not be written could be: it is only read
        return torch.from_numpy(array)
