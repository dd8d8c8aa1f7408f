"""Runs a TensorRT engine on this machine's GPU, over `builders.cuda`. Never run on a GPU: no machine here has one.

Tests check every TensorRT name used here against the installed bindings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from builders.cuda import Device, gpus
from builders.errors import DataError, EngineryError
from builders.tensorrt_words import builder_reason
from builders.tensors import check_inputs
from builders.types import BuildRequest, Engine, Session, ShapeProfile, Target, Tensors, TensorSpec


@contextmanager
def open_engine(trt: Any, said: Any, engine: Engine) -> Iterator[Session]:
    """Load `engine` with the module `trt` and its logger `said`, on the first GPU of its capability.

    Raises EngineryError with TensorRT's words when it does not fit, UnavailableError without a driver.
    """
    with Device(_gpu_for(engine.request.target)) as device:
        said.messages.clear()
        runtime = trt.Runtime(said)
        loaded = runtime.deserialize_cuda_engine(engine.path.read_bytes())
        context = loaded and loaded.create_execution_context()
        if context is None:
            raise EngineryError(builder_reason(engine.path.name, engine.request.backend, said.messages))
        yield EngineSession(engine.request, context, device, said)


def _gpu_for(target: Target) -> int:
    fitting = [gpu.index for gpu in gpus() if gpu.compute_capability == target.compute_capability]
    if not fitting:
        raise EngineryError(f"this machine has no {target.sm} GPU; run this on a node that has one")
    return fitting[0]


class EngineSession:
    """A TensorRT execution context with its device buffers."""

    def __init__(self, request: BuildRequest, context: Any, device: Device, said: Any) -> None:
        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._request, self._context, self._device, self._said = request, context, device, said

    def run(self, inputs: Tensors) -> dict[str, np.ndarray[Any, Any]]:
        """Run once. Raises DataError for arrays that fit no profile, EngineryError when the GPU fails."""
        check_inputs(self.inputs, inputs)
        self._said.messages.clear()
        if self._request.profiles:
            chosen = fitting_profile(self._request.profiles, inputs)
            self._must(self._context.set_optimization_profile_async(chosen, self._device.stream))
        for name, array in inputs.items():
            self._must(self._context.set_input_shape(name, array.shape))
            self._must(self._context.set_tensor_address(name, self._device.put(name, np.ascontiguousarray(array))))
        results = {spec.name: self._output(spec) for spec in self.outputs}
        self._must(self._context.execute_async_v3(self._device.stream))
        self._device.wait()
        for name, array in results.items():
            self._device.get(name, array)
        return results

    def listen(self, profiler: Any) -> None:
        """Have TensorRT report the time of each layer to an `IProfiler` from now on."""
        self._context.profiler = profiler

    def used_bytes(self) -> int:
        """Memory of the GPU that is in use, by whomever, as its driver says."""
        return self._device.used_bytes()

    def _output(self, spec: TensorSpec) -> np.ndarray[Any, Any]:
        """A host array of the shape that TensorRT infers, with its device buffer bound."""
        shape = tuple(self._context.get_tensor_shape(spec.name))
        if min(shape, default=0) < 0:
            raise EngineryError(f"output {spec.name!r} has a shape that depends on data, {shape}; use another backend")
        array = np.empty(shape, spec.dtype)
        self._must(self._context.set_tensor_address(spec.name, self._device.buffer(spec.name, array.nbytes)))
        return array

    def _must(self, done: bool) -> None:
        if not done:
            raise EngineryError(builder_reason("the engine", self._request.backend, self._said.messages))


def fitting_profile(profiles: Sequence[ShapeProfile], inputs: Tensors) -> int:
    """Index of the first profile whose ranges hold every input's shape. Raises DataError when there is none."""
    for index, shapes in enumerate(profiles):
        if all(_within(inputs[name].shape, low, high) for name, low, _, high in shapes.inputs if name in inputs):
            return index
    given = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
    ranges = "; ".join(f"{name} {low}..{high}" for shapes in profiles for name, low, _, high in shapes.inputs)
    raise DataError(f"no optimization profile holds {given}; the engine was built for {ranges}; widen dims")


def _within(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> bool:
    return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
