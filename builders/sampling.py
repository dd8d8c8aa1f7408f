"""Engines of graphs with a sampler: how they are built, and opened as engines of the model alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginery.core.sampling import as_built, sampling_inputs, sampling_outputs
from enginery.core.types import Backend, BuildRequest, Engine, Sampling, Session, Tensors, TensorSpec

if TYPE_CHECKING:
    import numpy as np


def build_engine(backend: Backend, request: BuildRequest, model: Path, workdir: Path) -> Engine:
    """What `backend.build` gives for a request, with its sampler behind the model where it has one. Raises as that."""
    if request.sampling is None:
        return backend.build(request, model, workdir)
    sampled = model.with_name("sampled.onnx")
    write_sampled(model, request.sampling, sampled)
    return replace(backend.build(as_built(request), sampled, workdir), request=request)


def write_sampled(model: Path, sampling: Sampling, path: Path) -> None:
    """Write the graph `model` with a sampler behind it to `path`, in the same folder. Raises as `append_sampler`."""
    import onnx

    from builders.onnx_graphs.sampler import append_sampler
    from builders.onnx_graphs.shards import save_graph
    from builders.onnx_graphs.weights import has_external, load_graph

    graph = load_graph(model)
    append_sampler(graph, sampling)
    if has_external(graph):
        save_graph(graph, path)
    else:
        onnx.save(graph, path)


def with_sampler(engine: Engine, inputs: Tensors) -> tuple[Engine, Tensors]:
    """An engine as its compiler made it, and the inputs of its model with those of its sampler, where it has one."""
    sampling = engine.request.sampling
    if sampling is None:
        return engine, inputs
    return replace(engine, request=as_built(engine.request)), complete(sampling, inputs)


def complete(sampling: Sampling, inputs: Tensors) -> Tensors:
    """The inputs of a model with those that make its sampler take the likeliest token."""
    from enginery.sampling import first_inputs

    ids = inputs.get(sampling.ids)
    return inputs if ids is None or ids.ndim == 0 else {**first_inputs(sampling, len(ids)), **inputs}


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
