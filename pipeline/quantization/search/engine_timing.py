"""Races two graphs as the engines that a backend makes of them, on real inputs, on this machine."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import onnx
from onnx import ModelProto

from enginery.core.types import Backend, BuildRequest, Session, Tensors


@dataclass
class EngineTiming:
    """The `latency.PairedRounds` in wall-clock time. A context manager: it keeps the engines of the last pair open.

    request: what is built, but for the model.  inputs: of one run; some backends take only shapes within the request's
    profiles.
    """

    backend: Backend
    request: BuildRequest
    inputs: Tensors
    workdir: Path
    _open: list[tuple[ModelProto, Session, ExitStack]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close_all_but()

    def __call__(self, first: ModelProto, second: ModelProto) -> Iterator[tuple[float, float]]:
        """Build both, run each once to warm up, then yield milliseconds, the order changing from round to round."""
        self._close_all_but(first, second)
        sessions = [self._opened(model) for model in (first, second)]
        for session in sessions:
            session.run(self._fed(session))
        turn = False
        while True:
            order = (1, 0) if turn else (0, 1)
            times = {index: self._milliseconds(sessions[index]) for index in order}
            yield times[0], times[1]
            turn = not turn

    def _opened(self, model: ModelProto) -> Session:
        for known, session, _ in self._open:
            if known is model:
                return session
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=self.workdir)))
            onnx.save(model, folder / "graph.onnx")
            engine = self.backend.build(self.request, folder / "graph.onnx", folder)
            session = stack.enter_context(self.backend.open(engine))
            self._open.append((model, session, stack.pop_all()))
        return session

    def _close_all_but(self, *kept: ModelProto) -> None:
        for item in list(self._open):
            if not any(item[0] is model for model in kept):
                self._open.remove(item)
                item[2].close()

    def _milliseconds(self, session: Session) -> float:
        inputs = self._fed(session)
        start = time.perf_counter()
        session.run(inputs)
        return (time.perf_counter() - start) * 1e3

    def _fed(self, session: Session) -> Tensors:
        return {spec.name: self.inputs[spec.name] for spec in session.inputs}
