"""What one process measures of one engine: how long it loads, what it holds in memory, and its runs at each size."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from builders.backends.run_profiles import DeviceMemory, DeviceTimed, Prepared
from enginery.arrays.npz import Array
from enginery.core.types import Session, Tensors
from validation.latency.measurement.buckets import Bucket
from validation.latency.measurement.loop import latencies, timed
from validation.latency.measurement.memory import forget_peak, peak_bytes, resident_bytes

Opens = Callable[[], AbstractContextManager[Session]]
# Of a bucket, timed by the device's events besides those timed by the clock here.
DEVICE_RUNS = 30
# Of a bucket's time, for the runtime's own calls; the rest is for `Session.run`.
RUNTIME_SHARE = 0.4
# Stretches that a size's time is made of, in turn with the other sizes: what disturbs the machine for a moment then
# disturbs some of a size's runs, and not all of them.
PASSES = 4


@dataclass(frozen=True)
class Runs:
    """One size. session, runtime: seconds of each run of `Session.run` and of the runtime's own call, in order; no
    runtime where the session does not give it.  first_s: the first run of all, which is not among them."""

    session: Array
    runtime: Array | None
    first_s: float
    memory_bytes: int
    device_bytes: int | None = None
    device_s: float | None = None


@dataclass(frozen=True)
class Once:
    """One process. import_s: None where the runtime is imported with the engine's opening.  load_s, loaded_bytes,
    resettable: as in `Speed`."""

    import_s: float | None
    load_s: float
    loaded_bytes: int
    resettable: bool
    runs: Sequence[Runs]

    def save(self, folder: Path) -> None:
        """Write it into `folder`."""
        from safetensors.numpy import save_file

        series = {f"session{index}": item.session for index, item in enumerate(self.runs)}
        series |= {f"runtime{index}": item.runtime for index, item in enumerate(self.runs) if item.runtime is not None}
        save_file(series, folder / "series.safetensors")
        whole = {**vars(self), "runs": [{**vars(item), "session": None, "runtime": None} for item in self.runs]}
        (folder / "once.json").write_text(json.dumps(whole))

    @classmethod
    def load(cls, folder: Path) -> "Once":
        """Read what `save` wrote."""
        from safetensors.numpy import load_file

        whole: dict[str, Any] = json.loads((folder / "once.json").read_text())
        series = load_file(folder / "series.safetensors")
        runs = [
            Runs(**{**item, "session": series[f"session{index}"], "runtime": series.get(f"runtime{index}")})
            for index, item in enumerate(whole["runs"])
        ]
        return cls(**{**whole, "runs": runs})


def measure_once(
    opens: Opens, buckets: Sequence[Bucket], seconds: float, least: int, imports: Callable[[], None] | None = None
) -> Once:
    """Open an engine in this process and run it at each of its sizes.

    seconds, least: of each size's runs, as in `loop.latencies`.  imports: imports the runtime, which is timed apart.
    Raises what `imports`, `opens` and the session raise.
    """
    import_s = timed(imports) if imports else None
    resettable = forget_peak()
    before = resident_bytes()
    with ExitStack() as stack:
        opened: list[Session] = []
        load_s = timed(lambda: opened.append(stack.enter_context(opens())))
        loaded = resident_bytes() - before
        sizes = [_Size(opened[0], bucket, seconds, least, before) for bucket in buckets]
        for _ in range(PASSES):
            for size in sizes:
                size.go_on()
        runs = [size.runs() for size in sizes]
    return Once(import_s, load_s, max(loaded, 0), resettable, runs)


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

    def __init__(self, session: Session, bucket: Bucket, seconds: float, least: int, before: int) -> None:
        # Copied: a fork would have the arrays where its parent, and every other fork of it, has them.
        self._inputs = {name: array.copy() for name, array in taken(session, bucket.inputs).items()}
        self._session = session
        self._first_s = timed(lambda: session.run(self._inputs))
        own = session.prepared(self._inputs) if isinstance(session, Prepared) else None
        share = 1 - RUNTIME_SHARE if own else 1.0
        self._of_session = _Timed(lambda: session.run(self._inputs), seconds * share, least)
        self._of_runtime = _Timed(own, seconds * RUNTIME_SHARE, least) if own else None
        self._memory_bytes = max(peak_bytes() - before, 0)

    def go_on(self) -> None:
        """A stretch of runs of either kind."""
        self._of_session.go_on()
        if self._of_runtime:
            self._of_runtime.go_on()

    def runs(self) -> Runs:
        """What was measured."""
        session, inputs = self._session, self._inputs
        return Runs(
            session=self._of_session.series(),
            runtime=self._of_runtime.series() if self._of_runtime else None,
            first_s=self._first_s,
            memory_bytes=self._memory_bytes,
            device_bytes=session.used_bytes() if isinstance(session, DeviceMemory) else None,
            device_s=median(session.device_seconds(inputs, DEVICE_RUNS)) if isinstance(session, DeviceTimed) else None,
        )


def taken(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Of the inputs, those that the session takes."""
    return {spec.name: inputs[spec.name] for spec in session.inputs}
