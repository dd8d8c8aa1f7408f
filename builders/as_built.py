"""Builds engines of graphs with int8 states, and opens them as engines of the model, whose states are float32."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.onnx_graphs.bodies import list_libraries
from enginesmith.core.state import with_int8_states
from enginesmith.core.types import Backend, BuildRequest, Engine, QuantizedState, Session, Tensors, TensorSpec

if TYPE_CHECKING:
    import numpy as np


def build_engine(backend: Backend, request: BuildRequest, model: Path, workdir: Path) -> Engine:
    """The engine that `backend.build` builds for a request. The request's quantized states are int8 inputs and outputs
    of its graph. Operator libraries that the backend can load are added to the engine's requirements.

    workdir: a folder for the build's files.
    Raises as `backend.build` does.
    """
    entries = backend.capabilities.library_entries
    libraries = tuple(library for library in list_libraries(model).libraries if library.entry in entries)
    if not request.quantized_states:
        engine = backend.build(request, model, workdir)
        return replace(engine, requires=(*engine.requires, *libraries))
    whole_path = model.with_name("whole.onnx")
    write_as_built(model, request, whole_path)
    engine = backend.build(with_int8_states(request), whole_path, workdir)
    return replace(engine, request=request, requires=(*engine.requires, *libraries))


def write_as_built(model: Path, request: BuildRequest, path: Path) -> None:
    """Write the graph `model` to `path`, in the same folder, with the int8 states that the compiler gets."""
    from builders.onnx_graphs import quantized_states
    from builders.onnx_graphs.outline import write_graph
    from builders.onnx_graphs.weights import load_graph

    graph = load_graph(model)
    quantized_states.with_int8_states(graph, request.quantized_states)
    write_graph(graph, path)


def call_as_built(engine: Engine, inputs: Tensors) -> tuple[Engine, Tensors]:
    """The engine as the compiler built it, with int8 states, and the model's `inputs` with int8 states."""
    request = engine.request
    return replace(engine, request=with_int8_states(request)), store_states(request.quantized_states, inputs)


def store_states(states: Sequence[QuantizedState], inputs: Tensors) -> Tensors:
    """The inputs with these float32 states rounded to int8 as ONNX's QuantizeLinear does; other states stay."""
    import numpy as np

    quantized_inputs = dict(inputs)
    for state in states:
        value = quantized_inputs.get(state.input)
        if value is not None and value.dtype == np.float32:
            with np.errstate(invalid="ignore"):  # no int8 value means NaN
                steps = np.rint(value / np.float32(state.scale))
                quantized_inputs[state.input] = np.clip(steps, -128, 127).astype(np.int8)
    return quantized_inputs


class WithFloatStates(Session):
    """A session with the model's float32 states, around the session of an engine whose states are int8."""

    def __init__(self, session: Session, states: Sequence[QuantizedState]) -> None:
        self._whole, self._states = session, states
        state_inputs, state_outputs = {state.input for state in states}, {state.output for state in states}
        self.inputs: Sequence[TensorSpec] = _as_float(session.inputs, state_inputs)
        self.outputs: Sequence[TensorSpec] = _as_float(session.outputs, state_outputs)

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """The model's outputs, states in float32. Raises as the engine's session does."""
        import numpy as np

        outputs = self._whole.run(store_states(self._states, inputs))
        return outputs | {state.output: outputs[state.output] * np.float32(state.scale) for state in self._states}

    def prepare_call(self, inputs: Tensors) -> Callable[[], object] | None:
        """As `Session.prepare_call`; the states are rounded to int8 before the call."""
        return self._whole.prepare_call(store_states(self._states, inputs))

    def used_bytes(self) -> int | None:
        """As `Session.used_bytes`."""
        return self._whole.used_bytes()

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float] | None:
        """As `Session.device_seconds`."""
        return self._whole.device_seconds(store_states(self._states, inputs), runs)


def _as_float(specs: Sequence[TensorSpec], names: set[str]) -> list[TensorSpec]:
    return [replace(spec, dtype="float32") if spec.name in names else spec for spec in specs]
