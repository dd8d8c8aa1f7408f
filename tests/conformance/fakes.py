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
from enginesmith.core.errors import EnginesmithError, digest_of_file
from enginesmith.core.types import BuildRequest, Engine, Session, Tensors


@dataclass(frozen=True)
class Honest(OnnxRuntime):
    """Breaks nothing: what is complained of in the others is their own doing."""

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """The engine behind `_Session`."""
        with super().open(engine) as session:
            yield self.wrapped(session)

    def wrapped(self, session: Session) -> Session:
        return session


class _Session(Session):
    """Hands everything on."""

    def __init__(self, inner: Session) -> None:
        self.inner, self.inputs, self.outputs = inner, inner.inputs, inner.outputs

    def run(self, inputs: Tensors) -> dict[str, Any]:
        return self.inner.run(inputs)


class WrongAnswers(Honest):
    class wrapped(_Session):
        def run(self, inputs: Tensors) -> dict[str, Any]:
            """One number in a thousand, by one in fifty."""
            answer = super().run(inputs)
            for array in answer.values():
                if array.dtype == np.float32 and array.size:
                    array.reshape(-1)[:: 1 + array.size // 2] *= 1.02
            return answer


class WrongAtOneSize(Honest):
    class wrapped(_Session):
        def run(self, inputs: Tensors) -> dict[str, Any]:
            """Compiled for the largest batch: a smaller one is filled up with the last row, and it is in the sums."""
            if any(array.ndim and len(array) == 1 for array in inputs.values()):
                return {
                    name: array + 1 if array.dtype.kind == "f" else array for name, array in super().run(inputs).items()
                }
            return super().run(inputs)


class IgnoresShapes(Honest):
    class wrapped(_Session):
        def run(self, inputs: Tensors) -> dict[str, Any]:
            """Cuts or repeats what it is given until it fits."""
            sizes = {"n": 4}
            return super().run({spec.name: np.resize(inputs[spec.name], spec.at(sizes)) for spec in self.inputs})


class ConvertsSilently(Honest):
    class wrapped(_Session):
        def run(self, inputs: Tensors) -> dict[str, Any]:
            """Casts to the declared dtype, whatever it loses, and takes no notice of other names."""
            return super().run({spec.name: np.asarray(inputs[spec.name], spec.dtype) for spec in self.inputs})


class SharesMemory(Honest):
    class wrapped(_Session):
        def __init__(self, inner: Session) -> None:
            super().__init__(inner)
            self._buffers: dict[str, Any] = {}

        def run(self, inputs: Tensors) -> dict[str, Any]:
            """Answers in the same buffer each time, as engines with bound outputs do."""
            for name, array in super().run(inputs).items():
                old = self._buffers.get(name)
                if old is None or old.shape != array.shape:
                    self._buffers[name] = array
                else:
                    old[...] = array
            return dict(self._buffers)


class WritesToInputs(Honest):
    class wrapped(_Session):
        def run(self, inputs: Tensors) -> dict[str, Any]:
            answer = super().run(inputs)
            for array in inputs.values():
                if array.flags.writeable:
                    array[...] = 0
            return answer


class AnswersByAddress(Honest):
    class wrapped(_Session):
        def __init__(self, inner: Session) -> None:
            super().__init__(inner)
            self._known: dict[tuple[object, ...], dict[str, Any]] = {}

        def run(self, inputs: Tensors) -> dict[str, Any]:
            """Knows arrays again by where they lie."""
            key = tuple((array.ctypes.data, array.shape) for array in inputs.values() if isinstance(array, np.ndarray))
            if key not in self._known:
                self._known[key] = super().run(inputs)
            return {name: array.copy() for name, array in self._known[key].items()}


class WrongWhenCallsOverlap(Honest):
    class wrapped(_Session):
        def __init__(self, inner: Session) -> None:
            super().__init__(inner)
            self._inside = 0

        def run(self, inputs: Tensors) -> dict[str, Any]:
            """A scratch buffer that two calls share."""
            self._inside += 1
            try:
                answer = super().run(inputs)
                time.sleep(0.001)
                return {name: array + 1 for name, array in answer.items()} if self._inside > 1 else answer
            finally:
                self._inside -= 1


class WrongFromTheSecondThreadOn(Honest):
    class wrapped(_Session):
        def __init__(self, inner: Session) -> None:
            super().__init__(inner)
            self._first: int | None = None

        def run(self, inputs: Tensors) -> dict[str, Any]:
            """State of the first thread that calls."""
            self._first = self._first or threading.get_ident()
            answer = super().run(inputs)
            own = self._first == threading.get_ident()
            return answer if own else {name: array + 1 for name, array in answer.items()}


class SwapsOutputs(Honest):
    class wrapped(_Session):
        def run(self, inputs: Tensors) -> dict[str, Any]:
            """Sorts outputs by name and hands them out in the model's order."""
            answer = super().run(inputs)
            return dict(zip(answer, [answer[name] for name in sorted(answer)], strict=True))


class LiesAboutBytes(Honest):
    """Claims equal bytes, and puts what time or chance gave into the engine."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        made = super().build(request, model, workdir)
        graph = onnx.load(made.path)
        graph.doc_string = secrets.token_hex(8)
        onnx.save(graph, made.path)
        return Engine(request, made.path, digest_of_file(made.path), made.path.stat().st_size, made.suffix)


class LiesAboutOutputs(Honest):
    """Claims equal outputs, and chooses weights' last bits by chance, as a tuner chooses kernels."""

    capabilities: ClassVar[Capabilities] = replace(OnnxRuntime.capabilities, determinism="outputs")

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        made = super().build(request, model, workdir)
        graph = onnx.load(made.path)
        for tensor in graph.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor)
            if array.dtype == np.float32:
                moved = array * (1 + np.float32(1e-6) * np.float32(1 + secrets.randbelow(1000) / 1000))
                tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
        onnx.save(graph, made.path)
        return Engine(request, made.path, digest_of_file(made.path), made.path.stat().st_size, made.suffix)


class FalseDigest(Honest):
    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        made = super().build(request, model, workdir)
        return Engine(request, made.path, "0" * 64, made.size_bytes, made.suffix)


class LeansOnItsModel(Honest):
    """Its engine is no more than the name of the model's file."""

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        path = workdir / "engine.link"
        path.write_text(str(model))
        return Engine(request, path, digest_of_file(path), path.stat().st_size, ".link")

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
