"""Backends that break one promise each. The suite must catch every one of them."""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx

from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.capabilities import Capabilities
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Engine, Session, Tensors


@dataclass(frozen=True)
class Honest(OnnxRuntime):
    """Breaks nothing: what is complained of in the others is their own doing."""

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        with super().open(engine) as session:
            yield _Session(self, session)

    def answer(self, session: "_Session", inputs: Tensors) -> dict[str, Any]:
        return session.right(inputs)


class _Session(Session):
    """Answers as its backend does with the right answers. state: what a backend keeps from call to call."""

    def __init__(self, backend: Honest, inner: Session) -> None:
        self.backend, self.right, self.inputs, self.outputs = backend, inner.run, inner.inputs, inner.outputs
        self.state: dict[Any, Any] = {}

    def run(self, inputs: Tensors) -> dict[str, Any]:
        return self.backend.answer(self, inputs)


def _moved(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: array + 1 if array.dtype.kind == "f" else array for name, array in answer.items()}


class WrongAnswers(Honest):
    """One number in a thousand, by one in fifty."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        answer = session.right(inputs)
        for array in answer.values():
            if array.dtype == np.float32 and array.size:
                array.reshape(-1)[:: 1 + array.size // 2] *= 1.02
        return answer


class WrongAtOneSize(Honest):
    """Compiled for the largest batch: a smaller one is filled up with the last row, and it is in the sums."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        answer = session.right(inputs)
        return _moved(answer) if any(array.ndim and len(array) == 1 for array in inputs.values()) else answer


class IgnoresShapes(Honest):
    """Cuts or repeats what it is given until it fits."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        sizes = {"n": 4}
        return session.right({spec.name: np.resize(inputs[spec.name], spec.at(sizes)) for spec in session.inputs})


class ConvertsSilently(Honest):
    """Casts to the declared dtype, whatever it loses, and takes no notice of other names."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        return session.right({spec.name: np.asarray(inputs[spec.name], spec.dtype) for spec in session.inputs})


class SharesMemory(Honest):
    """Answers in the same buffer each time, as engines with bound outputs do."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        for name, array in session.right(inputs).items():
            if session.state.setdefault(name, array).shape == array.shape:
                session.state[name][...] = array
            else:
                session.state[name] = array
        return dict(session.state)


class WritesToInputs(Honest):
    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        answer = session.right(inputs)
        for array in inputs.values():
            if array.flags.writeable:
                array[...] = 0
        return answer


class AnswersByAddress(Honest):
    """Knows arrays again by where they lie."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        key = tuple((array.ctypes.data, array.shape) for array in inputs.values() if isinstance(array, np.ndarray))
        if key not in session.state:
            session.state[key] = session.right(inputs)
        return {name: array.copy() for name, array in session.state[key].items()}


class WrongWhenCallsOverlap(Honest):
    """A scratch buffer that two calls share."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        session.state["inside"] = session.state.get("inside", 0) + 1
        try:
            answer = session.right(inputs)
            time.sleep(0.001)
            return _moved(answer) if session.state["inside"] > 1 else answer
        finally:
            session.state["inside"] -= 1


class WrongFromTheSecondThreadOn(Honest):
    """State of the first thread that calls."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        is_own = session.state.setdefault("first", threading.get_ident()) == threading.get_ident()
        return session.right(inputs) if is_own else _moved(session.right(inputs))


class SwapsOutputs(Honest):
    """Sorts outputs by name and hands them out in the model's order."""

    def answer(self, session: _Session, inputs: Tensors) -> dict[str, Any]:
        answer = session.right(inputs)
        return dict(zip(answer, [answer[name] for name in sorted(answer)], strict=True))


class LiesAboutBytes(Honest):
    """Claims equal bytes, and puts what time or chance gave into the engine."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        engine = super().build(request, model, workdir)
        graph = onnx.load(engine.path)
        graph.doc_string = secrets.token_hex(8)
        onnx.save(graph, engine.path)
        return Engine.of_file(self, request, engine.path)


class LiesAboutOutputs(Honest):
    """Claims equal outputs, and chooses weights' last bits by chance, as a tuner chooses kernels."""

    capabilities: ClassVar[Capabilities] = replace(OnnxRuntime.capabilities, determinism="outputs")

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        engine = super().build(request, model, workdir)
        graph = onnx.load(engine.path)
        for tensor in graph.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor)
            if array.dtype == np.float32:
                moved_array = array * (1 + np.float32(1e-6) * np.float32(1 + secrets.randbelow(1000) / 1000))
                tensor.CopyFrom(onnx.numpy_helper.from_array(moved_array, tensor.name))
        onnx.save(graph, engine.path)
        return Engine.of_file(self, request, engine.path)


class FalseDigest(Honest):
    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        engine = super().build(request, model, workdir)
        return Engine(request, engine.path, "0" * 64, engine.size_bytes, engine.suffix)


class LeansOnItsModel(Honest):
    """Its engine is no more than the name of the model's file."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        path = workdir / "engine.link"
        path.write_text(str(model))
        return Engine.of_file(self, request, path)

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        with self.open_part(Path(engine.path.read_text())) as session:
            yield session


class SaysNothing(Honest):
    """Refuses without a reason."""

    def refuses(self, request: BuildRequest) -> str | None:
        return "   "


class SpeaksOfSomethingElse(Honest):
    """Refuses control flow with words that name nothing."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        if any(node.op_type in ("If", "Loop") for node in onnx.load(model).graph.node):
            raise EnginesmithError("compilation failed; try again")
        return super().build(request, model, workdir)


class RefusesThePlain(Honest):
    def refuses(self, request: BuildRequest) -> str | None:
        return f"input {request.inputs[0].name!r} is not to our liking; use another backend"


class Stumbles(Honest):
    """Raises what it runs into, as it is."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        raise KeyError("graph")


class Crashes(Honest):
    """Takes its process down at the second of three graphs."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        if any(node.op_type == "Conv" for node in onnx.load(model).graph.node):
            os.abort()
        return super().build(request, model, workdir)


class Hangs(Honest):
    """Leaves a file where the environment says, and hangs."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        if any(node.op_type == "Conv" for node in onnx.load(model).graph.node):
            import time

            Path(os.environ["HANGS"]).touch()
            time.sleep(600)
        return super().build(request, model, workdir)


class OpensAnything(Honest):
    """Opens other versions' engines."""

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        with self.open_part(engine.path) as session:
            yield session
