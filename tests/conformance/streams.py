"""Models with state over the sessions of a backend: streams answer as the model itself does, each by itself."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from builders.as_built import build_engine
from builders.backends.discovery import open_engine
from builders.onnx_graphs.quantized_states import quantize_states
from builders.reference import ReferenceSession
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.state import with_int8_states
from enginesmith.core.types import QuantizedState, Session
from enginesmith.streams import Streams
from pipeline.sources.canonical import canonical
from pipeline.sources.onnx_model import load_onnx, save_onnx, specs_of
from pipeline.spec.model import ModelSpec, load_spec
from tests.conformance.trial import backend_of, fresh, request_for
from tests.stateful import CACHED, RECURRENT, write_stateful

# Of float32 kernels over 8 steps of these graphs, whose answers are about 1.
TOLERANCE = 1e-4
# Of states of int8: a value near a tie may be a whole step off, of which these graphs have none with these inputs.
SCALE = float(np.float32(0.02))


def behave(backend: str, target: str, workdir: Path) -> dict[str, list[str]]:
    """What is wrong with the streams over each model's engine; a refused model has its reason after 'refused: '."""
    entries = {}
    for spec in (RECURRENT, CACHED):
        for name, dtype in ((spec["model"], None), (f"{spec['model']}, int8", "int8")):
            entries[name] = list(_complaints(spec, backend, target, workdir / name, dtype))
    return entries


def _complaints(parts: Mapping[str, Any], backend: str, target: str, workdir: Path, dtype: str | None) -> Iterator[str]:
    """dtype: of the states between calls; None where it is the model's."""
    tool, (hardware,) = backend_of(backend), parse_targets(target)
    spec = load_spec(write_stateful(workdir / "project", dict(parts)))
    path = fresh(workdir / "canonical") / "model.onnx"
    model = canonical(load_onnx(spec.file("model.onnx"), spec.folder), spec.tensors())
    states = [QuantizedState(state.input, state.output, SCALE) for state in spec.states()] if dtype else []
    quantize_states(model, states)
    save_onnx(model, path)
    request = request_for(tool, hardware, (path, *specs_of(load_onnx(path, path.parent))), spec.named_dims(), "fp32")
    request = replace(request, quantized_states=tuple(states))
    if reason := tool.refuses(with_int8_states(request)):
        yield f"refused: {reason}"
        return
    try:
        engine = build_engine(tool, request, path, fresh(workdir / "engine"))
    except EnginesmithError as error:
        yield f"refused: {error}"
        return
    if tool.runs(hardware):
        return
    with ReferenceSession(path) as expected, open_engine(engine) as actual:
        yield from _compare(spec, expected, actual)


def _compare(spec: ModelSpec, expected: Session, actual: Session) -> Iterator[str]:
    """Three streams side by side, one of which begins anew and one of which ends, against each alone."""
    end_mins = {dim.name: (dim.min, dim.max) for dim in spec.named_dims()}
    joint_streams = Streams(actual.run, actual.inputs, spec.states(), end_mins)
    single_streams = [Streams(expected.run, expected.inputs, spec.states(), end_mins) for _ in range(3)]
    rng, shape = np.random.default_rng(0), spec.inputs["x"].shape[1:]
    for step in range(8):
        if step == 3 and spec.model == "recurrent":  # rows of a cache that grows have one length
            joint_streams.reset([1])
            single_streams[1].reset()
        if step == 5:
            joint_streams.keep([2, 0])
            single_streams = [single_streams[2], single_streams[0]]
        rows = rng.normal(size=(len(single_streams), *shape)).astype(np.float32)
        answer = joint_streams.run({"x": rows})
        for place, stream in enumerate(single_streams):
            expected_row = stream.run({"x": rows[place : place + 1]})["y"]
            if not np.allclose(answer["y"][place : place + 1], expected_row, atol=TOLERANCE):
                yield f"step {step}, stream {place}: off by {np.abs(answer['y'][place] - expected_row).max():.2g}"
