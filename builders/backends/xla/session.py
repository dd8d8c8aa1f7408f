"""Runs an XLA engine: compiled for each exact size, on the CPU or on a GPU of its capability. Never run on a GPU."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import jax
import jax.export
import ml_dtypes
import numpy as np

from builders.backends.xla.file import read_engine
from enginesmith.arrays import InputCheck
from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.core.types import Engine, Session, Shape, Target, Tensors, TensorSpec, Untyped


class XlaSession(Session):
    """An engine with its weights on the device, and an executable for each combination of input shapes.

    most_compiled: combinations that stay compiled. Raises IntegrityError for damage, EnginesmithError when XLA fails.
    """

    def __init__(self, engine: Engine, most_compiled: int) -> None:
        request = engine.request
        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._name, self._kept = engine.path.name, most_compiled
        self._check = InputCheck(request.inputs, request.profiles)
        self._device = _device(request.target)
        file = read_engine(engine.path)
        try:
            self._program: Untyped = jax.jit(jax.export.deserialize(bytearray(file.program)).call)
        except Exception as error:  # FlatBuffers and StableHLO raise many classes for one reason: damage
            raise IntegrityError(
                f"{self._name} holds no program that this jax reads: {error}; build it again"
            ) from error
        with jax.enable_x64(True):
            self._weights: Untyped = [jax.device_put(array, self._device) for array in file.weights]
        self._compiled: OrderedDict[tuple[Shape, ...], Untyped] = OrderedDict()
        self._lock = threading.Lock()
        for shapes in tuned_shapes(engine):
            self._executable(shapes)

    def close(self) -> None:
        """Free the device's memory; `run` refuses from now on."""
        self._weights = None
        self._compiled.clear()

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """Run once; for shapes that it was not run with before, XLA compiles first.

        Raises DataError for names, dtypes or shapes that the profiles lack, EnginesmithError after it was closed.
        """
        if self._weights is None:
            raise EnginesmithError(f"{self._name}: the session is closed; open it again")
        self._check(inputs)
        host_inputs = [np.asarray(inputs[spec.name], order="C") for spec in self.inputs]
        executable = self._executable(tuple(array.shape for array in host_inputs))
        with jax.enable_x64(True):
            device_inputs = [jax.device_put(array, self._device) for array in host_inputs]
            device_outputs = executable(self._weights, device_inputs)
        return {spec.name: np.array(array) for spec, array in zip(self.outputs, device_outputs, strict=True)}

    def _executable(self, shapes: tuple[Shape, ...]) -> Untyped:
        """The program compiled for these input shapes; one that was compiled before is used again."""
        with self._lock:
            if cached_executable := self._compiled.get(shapes):
                self._compiled.move_to_end(shapes)
                return cached_executable
        placement = jax.sharding.SingleDeviceSharding(self._device)
        dtypes = [ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype for spec in self.inputs]
        input_structs = [
            jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=placement)
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        try:
            with jax.enable_x64(True):  # without the lock, so that other threads can run compiled functions
                executable = self._program.lower(self._weights, input_structs).compile()
        except Exception as error:  # XLA and JAX raise different classes
            message = str(error).strip().splitlines()[0]
            raise EnginesmithError(
                f"{self._name}: XLA cannot compile it for {shapes}: {message}; build it again"
            ) from error
        with self._lock:
            self._compiled[shapes] = executable
            if len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return executable


def tuned_shapes(engine: Engine) -> list[tuple[Shape, ...]]:
    """The shapes of all inputs that profiles are tuned for, each combination once; without dynamic dims the model's."""
    request = engine.request
    if not request.profiles:
        return [tuple(tuple(int(size) for size in spec.shape) for spec in request.inputs)]
    best_shapes = []
    for profile in request.profiles:
        shapes = {name: shape for name, _, shape, _ in profile.inputs}
        best_shapes.append(tuple(shapes[spec.name] for spec in request.inputs))
    return list(dict.fromkeys(best_shapes))


def _device(target: Target) -> Untyped:
    if target.is_cpu:
        return jax.devices("cpu")[0]
    capability = "{}.{}".format(*(target.compute_capability or ()))
    devices = [device for device in jax.devices("cuda") if str(getattr(device, "compute_capability", "")) == capability]
    if not devices:
        raise EnginesmithError(f"jax sees no {target.sm} GPU here; check CUDA_VISIBLE_DEVICES and JAX_PLATFORMS")
    return devices[0]
