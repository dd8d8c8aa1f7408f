"""Models with state over the sessions of a backend: streams answer as the model itself does, each by itself."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from builders.backends.compatibility import check_compatible
from builders.reference import ReferenceSession
from enginery.core.errors import EngineryError
from enginery.core.hardware.targets import parse_targets
from enginery.core.types import Session
from enginery.streams import Streams
from pipeline.sources.canonical import canonical
from pipeline.sources.onnx_model import load_onnx, save_onnx, specs_of
from pipeline.spec.model import ModelSpec, load_spec
from tests.conformance.trial import backend_of, fresh, request_for
from tests.stateful import CACHED, RECURRENT, write_stateful

# Of float32 kernels over 8 steps of these graphs, whose answers are about 1.
TOLERANCE = 1e-4


def behave(backend: str, target: str, workdir: Path) -> dict[str, list[str]]:
    """What is wrong with the streams over each model's engine; a refused model has its reason after 'refused: '."""
    return {
        spec["model"]: list(_complaints(spec, backend, target, workdir / spec["model"])) for spec in (RECURRENT, CACHED)
    }


def _complaints(given: Mapping[str, Any], backend: str, target: str, workdir: Path) -> Iterator[str]:
    tool, (hardware,) = backend_of(backend), parse_targets(target)
    spec = load_spec(write_stateful(workdir / "project", dict(given)))
    path = fresh(workdir / "canonical") / "model.onnx"
    save_onnx(canonical(load_onnx(spec.file("model.onnx"), spec.folder), spec.tensors()), path)
    request = request_for(tool, hardware, (path, *specs_of(load_onnx(path, path.parent))), spec.named_dims(), "fp32")
    if reason := tool.refuses(request):
        yield f"refused: {reason}"
        return
    try:
        engine = tool.build(request, path, fresh(workdir / "engine"))
    except EngineryError as error:
        yield f"refused: {error}"
        return
    if tool.runs(hardware):
        return
    check_compatible(tool, engine)
    with ReferenceSession(path) as expected, tool.open(engine) as actual:
        yield from _compare(spec, expected, actual)


def _compare(spec: ModelSpec, expected: Session, actual: Session) -> Iterator[str]:
    """Three streams side by side, one of which begins anew and one of which ends, against each alone."""
    ends = {dim.name: (dim.min, dim.max) for dim in spec.named_dims()}
    together = Streams(actual.run, actual.inputs, spec.states(), ends)
    alone = [Streams(expected.run, expected.inputs, spec.states(), ends) for _ in range(3)]
    rng, shape = np.random.default_rng(0), spec.inputs["x"].shape[1:]
    for step in range(8):
        if step == 3 and spec.model == "recurrent":  # rows of a cache that grows have one length
            together.reset([1])
            alone[1].reset()
        if step == 5:
            together.keep([2, 0])
            alone = [alone[2], alone[0]]
        rows = rng.normal(size=(len(alone), *shape)).astype(np.float32)
        answer = together.run({"x": rows})
        for place, stream in enumerate(alone):
            wanted = stream.run({"x": rows[place : place + 1]})["y"]
            if not np.allclose(answer["y"][place : place + 1], wanted, atol=TOLERANCE):
                yield f"step {step}, stream {place}: off by {np.abs(answer['y'][place] - wanted).max():.2g}"
