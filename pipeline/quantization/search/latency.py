"""Measures the time that int8 saves: a paired benchmark of the whole model, with one group in int8 and in float.

In a round, each of the two engines runs once; the order changes from round to round. Whole models are timed, not single
nodes, because the cost of a group depends on its neighbours: a convolution between two integer ones needs no
conversions, alone it needs two. A slow moment of the machine affects both sides of a round, so the result is the median
of the differences within rounds.

Int8 pays for a group if it saves at least `MARGIN` of the model's time. Rounds are measured until the median is
`CERTAINTY` standard errors away from that, or until `ROUNDS`. A loss counts only after `PATIENCE` rounds, and only if
the fastest runs of both sides confirm it: on a busy machine one side can be slow for many rounds, but hardly in its
fastest one. An undecided group stays in int8.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Protocol, Self

import onnx
from onnx import ModelProto

from enginesmith.core.text import format_plain
from enginesmith.core.types import Backend, BuildRequest, Session, Tensors

MARGIN = 0.002
CERTAINTY = 3.0
FEWEST, PATIENCE, ROUNDS = 5, 20, 60
# Standard error of a median over the median absolute deviation, for n normal values: 1.2533 * 1.4826 / sqrt(n).
_ERROR_OF_MEDIAN = 1.2533 * 1.4826


class PairedRounds(Protocol):
    """Runs two models as engines, round by round: yields milliseconds of (first, second), without end."""

    def __call__(self, int8_model: ModelProto, float_model: ModelProto) -> Iterator[tuple[float, float]]:
        """Raises EnginesmithError when an engine cannot be built or run."""
        ...


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the whole model with one group in int8 and in float. saving_ms: median of the differences.

    error_ms: its standard error.  best_saving_ms: the difference of the fastest runs.
    int8_ms, float_ms: medians.  rounds: number of timed pairs.  margin: the least saving, as a share of the time.
    """

    int8_ms: float
    float_ms: float
    saving_ms: float
    error_ms: float
    best_saving_ms: float
    rounds: int
    margin: float = MARGIN

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, float]], margin: float = MARGIN) -> "Timing":
        """From (int8, float) milliseconds of each round."""
        savings = [float_time - int8_time for int8_time, float_time in rounds]
        saving = statistics.median(savings)
        deviation = statistics.median(abs(value - saving) for value in savings)
        error = _ERROR_OF_MEDIAN * deviation / math.sqrt(len(savings))
        int8_ms, plain_ms = (statistics.median(times_ms) for times_ms in zip(*rounds, strict=True))
        best_times = [min(times_ms) for times_ms in zip(*rounds, strict=True)]
        return cls(int8_ms, plain_ms, saving, error, best_times[1] - best_times[0], len(rounds), margin)

    @property
    def lost(self) -> bool:
        """Whether int8 surely saves less than `margin`, so that the group is left in float."""
        is_certain = self.margin * self.float_ms - self.saving_ms > CERTAINTY * self.error_ms
        return is_certain and self.rounds >= PATIENCE and self.best_saving_ms < self.margin * self.float_ms

    @property
    def won(self) -> bool:
        """Whether int8 surely saves at least `margin`."""
        return self.saving_ms - self.margin * self.float_ms > CERTAINTY * self.error_ms

    def describe(self, narrow: str, wide: str) -> str:
        """Why the group is left in float. narrow, wide: the group's formats on the two sides; '' for floats."""
        wide_text, narrow_text = format_plain(self.float_ms), format_plain(self.int8_ms)
        without_text = f"in {wide}" if wide else "without"
        return f"{narrow} is not faster here: the model takes {narrow_text} ms with it, {wide_text} ms {without_text}"


def benchmark_until_decided(rounds: Iterable[tuple[float, float]], margin: float = MARGIN) -> Timing:
    """Timing of two engines from rounds of (int8, float) in ms, until the result is certain, at most `ROUNDS`."""
    round_times: list[tuple[float, float]] = []
    for pair in itertools.islice(rounds, ROUNDS):
        round_times.append(pair)
        timing = Timing.of(round_times, margin)
        if timing.lost or (timing.won and len(round_times) >= FEWEST):
            break
    return timing


@dataclass
class EngineTiming:
    """`PairedRounds` in wall-clock time, with engines that a backend builds of the two graphs on this machine.

    A context manager: it keeps the engines of the last pair open. request: of the build, except the model.
    inputs: of one run; some backends take only shapes within the request's profiles.
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

    def __call__(self, int8_model: ModelProto, float_model: ModelProto) -> Iterator[tuple[float, float]]:
        """Build both, run each once to warm up, then yield milliseconds; the order changes from round to round."""
        self._close_all_but(int8_model, float_model)
        sessions = [self._open_engine(model) for model in (int8_model, float_model)]
        for session in sessions:
            session.run({spec.name: self.inputs[spec.name] for spec in session.inputs})
        for order in itertools.cycle([(0, 1), (1, 0)]):
            times = {index: self._time_ms(sessions[index]) for index in order}
            yield times[0], times[1]

    def _open_engine(self, model: ModelProto) -> Session:
        for open_model, session, _ in self._open:
            if open_model is model:
                return session
        with ExitStack() as resources:
            folder = Path(resources.enter_context(TemporaryDirectory(dir=self.workdir)))
            onnx.save(model, folder / "graph.onnx")
            engine = self.backend.build(self.request, folder / "graph.onnx", folder)
            session = resources.enter_context(self.backend.open(engine))
            self._open.append((model, session, resources.pop_all()))
        return session

    def _close_all_but(self, *models: ModelProto) -> None:
        for entry in list(self._open):
            if not any(entry[0] is model for model in models):
                self._open.remove(entry)
                entry[2].close()

    def _time_ms(self, session: Session) -> float:
        start_s = time.perf_counter()
        session.run({spec.name: self.inputs[spec.name] for spec in session.inputs})
        return (time.perf_counter() - start_s) * 1e3
