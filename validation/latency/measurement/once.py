"""Resident memory of this process: now, and at its peak since it was last asked to forget it (proc(5)).

What one process measures of one engine: how long it loads, what it holds in memory, and its runs at each size.
"""

import json
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from enginery.arrays import Array
from enginery.core.codec import decode, encode
from enginery.core.types import Session, Tensors
from validation.latency.measurement.buckets import BucketInputs
from validation.latency.measurement.loop import latencies, time_call

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """What this process holds in memory now; 0 where the system does not say."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The most that it held since `forget_peak`, or since it was started."""
    return _field("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> bool:
    """Let the peak count from now on; False where the system refuses, and the peak stays that of the whole life."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


Opens = Callable[[], AbstractContextManager[Session]]
# Of a bucket, timed by the device's events besides those timed by the clock here.
DEVICE_RUNS = 30
# Of a bucket's time, for the runtime's own calls; the rest is for `Session.run`.
RUNTIME_SHARE = 0.4
# Stretches that a size's time is made of, in turn with the other sizes: what disturbs the machine for a moment then
# disturbs some of a size's runs, and not all of them.
PASSES = 4


@dataclass(frozen=True)
class SizeFigures:
    """One size in one process. first_s: the first run of all, which is in no series.  Else as in `BucketLatency`."""

    first_s: float
    memory_bytes: int
    device_bytes: int | None = None
    device_s: float | None = None


@dataclass(frozen=True)
class ProcessFigures:
    """One process. import_s: None where the runtime is imported with the engine's opening.  Else as in
    `EngineLatency`."""

    import_s: float | None
    load_s: float
    loaded_bytes: int
    memory_resettable: bool
    sizes: tuple[SizeFigures, ...]


@dataclass(frozen=True, eq=False)
class Series:
    """Seconds of each run at one size, in order. session: of `Session.run`.  runtime: of the runtime's own call; None
    where the session does not give it."""

    session: Array
    runtime: Array | None


@dataclass(frozen=True, eq=False)
class ProcessMeasurement:
    """What one process measured: its figures, and the series of each size."""

    figures: ProcessFigures
    series: Sequence[Series]

    def save(self, folder: Path) -> None:
        """Write it into `folder`."""
        from safetensors.numpy import save_file

        named = {f"session{index}": item.session for index, item in enumerate(self.series)}
        named |= {f"runtime{index}": item.runtime for index, item in enumerate(self.series) if item.runtime is not None}
        save_file(named, folder / "series.safetensors")
        (folder / "figures.json").write_text(json.dumps(encode(self.figures)))

    @classmethod
    def load(cls, folder: Path) -> "ProcessMeasurement":
        """Read what `save` wrote."""
        from safetensors.numpy import load_file

        figures = decode(json.loads((folder / "figures.json").read_text()), ProcessFigures)
        named = load_file(folder / "series.safetensors")
        indices = range(len(figures.sizes))
        return cls(figures, [Series(named[f"session{index}"], named.get(f"runtime{index}")) for index in indices])


def measure_once(
    opens: Opens, buckets: Sequence[BucketInputs], seconds: float, least: int, imports: Callable[[], None] | None = None
) -> ProcessMeasurement:
    """Open an engine in this process and run it at each of its sizes.

    seconds, least: of each size's runs, as in `loop.latencies`.  imports: imports the runtime, which is timed apart.
    Raises what `imports`, `opens` and the session raise.
    """
    import_s = time_call(imports) if imports else None
    resettable = forget_peak()
    before = resident_bytes()
    with ExitStack() as stack:
        opened: list[Session] = []
        load_s = time_call(lambda: opened.append(stack.enter_context(opens())))
        loaded = resident_bytes() - before
        sizes = [_Size(opened[0], bucket, seconds, least, before) for bucket in buckets]
        for _ in range(PASSES):
            for size in sizes:
                size.go_on()
        figures = tuple(size.figures() for size in sizes)
    process = ProcessFigures(import_s, load_s, max(loaded, 0), resettable, figures)
    return ProcessMeasurement(process, [size.series() for size in sizes])


@dataclass
class _Timed:
    """The runs of one call, made in `PASSES` stretches."""

    call: Callable[[], object]
    seconds: float
    least: int
    found: list[Array] = field(default_factory=list)

    def go_on(self) -> None:
        """One stretch; none where those before took all the time."""
        if not self.found or sum(float(part.sum()) for part in self.found) < self.seconds:
            self.found.append(latencies(self.call, self.seconds / PASSES, 1 if self.found else self.least))

    def series(self) -> Array:
        """All runs, in order."""
        return np.concatenate(self.found)


class _Size:
    """An engine at one of its sizes."""

    def __init__(self, session: Session, bucket: BucketInputs, seconds: float, least: int, before: int) -> None:
        # Copied: a fork would have the arrays where its parent, and every other fork of it, has them.
        self._inputs = {name: array.copy() for name, array in select_inputs(session, bucket.inputs).items()}
        self._session = session
        self._first_s = time_call(lambda: session.run(self._inputs))
        own = session.prepare_call(self._inputs)
        share = 1 - RUNTIME_SHARE if own else 1.0
        self._of_session = _Timed(lambda: session.run(self._inputs), seconds * share, least)
        self._of_runtime = _Timed(own, seconds * RUNTIME_SHARE, least) if own else None
        self._memory_bytes = max(peak_bytes() - before, 0)

    def go_on(self) -> None:
        """A stretch of runs of either kind."""
        self._of_session.go_on()
        if self._of_runtime:
            self._of_runtime.go_on()

    def figures(self) -> SizeFigures:
        """What was measured besides the runs."""
        session = self._session
        device = session.device_seconds(self._inputs, DEVICE_RUNS)
        return SizeFigures(
            first_s=self._first_s,
            memory_bytes=self._memory_bytes,
            device_bytes=session.used_bytes(),
            device_s=median(device) if device else None,
        )

    def series(self) -> Series:
        """The runs."""
        return Series(self._of_session.series(), self._of_runtime.series() if self._of_runtime else None)


def select_inputs(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Of the inputs, those that the session takes."""
    return {spec.name: inputs[spec.name] for spec in session.inputs}
