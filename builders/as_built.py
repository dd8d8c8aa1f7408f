"""Engines of graphs with a sampler behind them or with states of int8: how they are built, and opened as engines of the
model alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core.sampling import as_built, sampling_inputs, sampling_outputs
from enginesmith.core.types import Backend, BuildRequest, Engine, QuantizedState, Sampling, Session, Tensors, TensorSpec

if TYPE_CHECKING:
    import numpy as np


def build_engine(backend: Backend, request: BuildRequest, model: Path, workdir: Path) -> Engine:
    """What `backend.build` gives for a request, with states of int8 and a sampler behind the model where it has these.
    Raises as that."""
    if as_built(request) is request:
        return backend.build(request, model, workdir)
    whole = model.with_name("whole.onnx")
    write_as_built(model, request, whole)
    return replace(backend.build(as_built(request), whole, workdir), request=request)


def write_as_built(model: Path, request: BuildRequest, path: Path) -> None:
    """Write the graph `model` as a compiler gets it to `path`, in the same folder. Raises as `append_sampler`."""
    import onnx

    from builders.onnx_graphs.quantized_states import with_int8_states
    from builders.onnx_graphs.sampler import append_sampler
    from builders.onnx_graphs.shards import save_graph
    from builders.onnx_graphs.weights import has_external, load_graph

    graph = load_graph(model)
    with_int8_states(graph, request.quantized_states)
    if request.sampling:
        append_sampler(graph, request.sampling)
    if has_external(graph):
        save_graph(graph, path)
    else:
        onnx.save(graph, path)


def call_as_built(engine: Engine, inputs: Tensors) -> tuple[Engine, Tensors]:
    """An engine as its compiler made it, and the inputs of its model as it takes them: with those of its sampler."""
    request = engine.request
    inputs = store_states(request.quantized_states, inputs)
    inputs = complete(request.sampling, inputs) if request.sampling else inputs
    return replace(engine, request=as_built(request)), inputs


def complete(sampling: Sampling, inputs: Tensors) -> Tensors:
    """The inputs of a model with those that make its sampler take the likeliest token."""
    from enginesmith.sampling import first_inputs

    ids = inputs.get(sampling.ids)
    return inputs if ids is None or ids.ndim == 0 else {**first_inputs(sampling, len(ids)), **inputs}


def store_states(states: Sequence[QuantizedState], inputs: Tensors) -> Tensors:
    """The inputs with these states as int8, as ONNX QuantizeLinear has it; states that are no float32 stay."""
    import numpy as np

    found = dict(inputs)
    for state in states:
        value = found.get(state.input)
        if value is not None and value.dtype == np.float32:
            with np.errstate(invalid="ignore"):  # no number has no place among 256
                found[state.input] = np.clip(np.rint(value / np.float32(state.scale)), -128, 127).astype(np.int8)
    return found


class WithFloatStates(Session):
    """An engine with states of int8 as a session of the model, which has them as float32."""

    def __init__(self, session: Session, states: Sequence[QuantizedState]) -> None:
        self._whole, self._states = session, states
        taken, given = {state.input for state in states}, {state.output for state in states}
        self.inputs: Sequence[TensorSpec] = _as_float(session.inputs, taken)
        self.outputs: Sequence[TensorSpec] = _as_float(session.outputs, given)

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """The model's outputs. Raises as the session."""
        found = self._whole.run(store_states(self._states, inputs))
        return found | {state.output: found[state.output] * _scale(state) for state in self._states}

    def prepare_call(self, inputs: Tensors) -> Callable[[], object] | None:
        """As `Session.prepare_call`, with the states as int8 already."""
        return self._whole.prepare_call(store_states(self._states, inputs))

    def used_bytes(self) -> int | None:
        """As `Session.used_bytes`."""
        return self._whole.used_bytes()

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float] | None:
        """As `Session.device_seconds`."""
        return self._whole.device_seconds(store_states(self._states, inputs), runs)


def _as_float(specs: Sequence[TensorSpec], names: set[str]) -> list[TensorSpec]:
    return [replace(spec, dtype="float32") if spec.name in names else spec for spec in specs]


def _scale(state: QuantizedState) -> "np.float32":
    import numpy as np

    return np.float32(state.scale)


class WithoutSampler(Session):
    """An engine with a sampler as a session of the model alone: the sampler is given what takes the likeliest token,
    and its outputs are left out. whole: the session with both."""

    def __init__(self, session: Session, sampling: Sampling) -> None:
        self.whole, self.sampling = session, sampling
        added = {spec.name for spec in sampling_inputs(sampling, 1)}
        unseen = {spec.name for spec in sampling_outputs(sampling, 1)}
        self.inputs: Sequence[TensorSpec] = [spec for spec in session.inputs if spec.name not in added]
        self.outputs: Sequence[TensorSpec] = [spec for spec in session.outputs if spec.name not in unseen]

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """The model's own outputs. Raises as the session."""
        found = self.whole.run(complete(self.sampling, inputs))
        return {spec.name: found[spec.name] for spec in self.outputs}

    def prepare_call(self, inputs: Tensors) -> Callable[[], object] | None:
        """As `Session.prepare_call`."""
        return self.whole.prepare_call(complete(self.sampling, inputs))

    def used_bytes(self) -> int | None:
        """As `Session.used_bytes`."""
        return self.whole.used_bytes()

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float] | None:
        """As `Session.device_seconds`."""
        return self.whole.device_seconds(complete(self.sampling, inputs), runs)
