"""The measurement of one engine in one process: time to load, resident memory, and its runs at each size."""

import json
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.codec import decode, encode
from enginesmith.core.types import Session, Tensors
from validation.latency.measurement.buckets import BucketInputs
from validation.latency.measurement.loop import latencies, time_call

Opens = Callable[[], AbstractContextManager[Session]]
# Runs of a bucket that are timed by the device's events, besides those timed by the clock here.
DEVICE_RUNS = 30
# The share of a bucket's time for the runtime's own calls; the rest is for `Session.run`.
RUNTIME_SHARE = 0.4
# Each size is timed in so many passes, in turn with the other sizes, so that a disturbance of the machine affects some
# runs of each size, and not all runs of one.
PASSES = 4


@dataclass(frozen=True)
class SizeFigures:
    """One size in one process. first_s: the first run, which is in no series.  The rest as in `BucketLatency`."""

    first_s: float
    memory_bytes: int
    device_bytes: int | None = None
    device_s: float | None = None


@dataclass(frozen=True)
class ProcessFigures:
    """One process. import_s: None where the runtime is imported when the engine is opened.  The rest as in
    `EngineLatency`."""

    import_s: float | None
    load_s: float
    loaded_bytes: int
    memory_resettable: bool
    sizes: tuple[SizeFigures, ...]


@dataclass(frozen=True, eq=False)
class Series:
    """Seconds of each run at one size, float64 [runs]. session: of `Session.run`.  runtime: of the runtime's own call;
    None where the session does not offer it."""

    session: Array
    runtime: Array | None = None


@dataclass(frozen=True, eq=False)
class ProcessMeasurement:
    """The measurement of one process. series: of each size."""

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
    try:
        Path("/proc/self/clear_refs").write_text("5")  # lets the peak of resident memory count from now on (proc(5))
        resettable = True
    except OSError:
        resettable = False
    before = _status_bytes("VmRSS")
    with ExitStack() as stack:
        opened: list[Session] = []
        load_s = time_call(lambda: opened.append(stack.enter_context(opens())))
        loaded = _status_bytes("VmRSS") - before
        sizes = [_Size(opened[0], bucket, seconds, least, before) for bucket in buckets]
        for timed in [timed for _ in range(PASSES) for size in sizes for timed in size.calls]:
            timed.run_pass()
        figures = tuple(size.figures() for size in sizes)
    process = ProcessFigures(import_s, load_s, max(loaded, 0), resettable, figures)
    return ProcessMeasurement(process, [size.series() for size in sizes])


def _status_bytes(name: str) -> int:
    """A size of this process by its name in /proc/self/status; 0 where the system does not give it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@dataclass
class _Timed:
    """The runs of one call, made in `PASSES` passes. found: the latencies of each."""

    call: Callable[[], object]
    seconds: float
    least: int
    found: list[Array] = field(default_factory=list)

    def run_pass(self) -> None:
        """Time one pass; none where those before took all the time."""
        if not self.found or sum(float(part.sum()) for part in self.found) < self.seconds:
            self.found.append(latencies(self.call, self.seconds / PASSES, 1 if self.found else self.least))


class _Size:
    """The measurement of an engine at one of its sizes, whose first run is made here.

    calls: `Session.run`, and the runtime's own call where the session offers it.
    """

    def __init__(self, session: Session, bucket: BucketInputs, seconds: float, least: int, before: int) -> None:
        # Copied, as a fork has the arrays at the addresses of its parent and of every other fork of it.
        self._inputs = {name: array.copy() for name, array in select_inputs(session, bucket.inputs).items()}
        self._session = session
        self._first_s = time_call(lambda: session.run(self._inputs))
        own = session.prepare_call(self._inputs)
        share = 1 - RUNTIME_SHARE if own else 1.0
        self.calls = [_Timed(lambda: session.run(self._inputs), seconds * share, least)]
        self.calls += [_Timed(own, seconds * RUNTIME_SHARE, least)] if own else []
        peak = _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._memory_bytes = max(peak - before, 0)

    def figures(self) -> SizeFigures:
        """The figures of this size besides its runs."""
        device = self._session.device_seconds(self._inputs, DEVICE_RUNS)
        device_s = median(device) if device else None
        return SizeFigures(self._first_s, self._memory_bytes, self._session.used_bytes(), device_s)

    def series(self) -> Series:
        """All runs of this size."""
        session, *runtime = (np.concatenate(timed.found) for timed in self.calls)
        return Series(session, *runtime)


def select_inputs(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Those of the inputs that the session takes."""
    return {spec.name: inputs[spec.name] for spec in session.inputs}
