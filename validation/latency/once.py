"""What one process measures of one engine: how long it loads, what it holds in memory, and its runs at each size."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from builders.profiles import DeviceMemory, DeviceTimed, Prepared
from builders.types import Session, Tensors
from validation.latency.buckets import Bucket
from validation.latency.loop import latencies, timed
from validation.latency.memory import forget_peak, peak_bytes, resident_bytes
from validation.npz import Array

Opens = Callable[[], AbstractContextManager[Session]]
# Of a bucket, timed by the device's events besides those timed by the clock here.
DEVICE_RUNS = 30
# Of a bucket's time, for the runtime's own calls; the rest is for `Session.run`.
RUNTIME_SHARE = 0.4


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
        series = {f"session{index}": item.session for index, item in enumerate(self.runs)}
        series |= {f"runtime{index}": item.runtime for index, item in enumerate(self.runs) if item.runtime is not None}
        np.savez(folder / "series.npz", **series)  # type: ignore[arg-type]
        whole = {**vars(self), "runs": [{**vars(item), "session": None, "runtime": None} for item in self.runs]}
        (folder / "once.json").write_text(json.dumps(whole))

    @classmethod
    def load(cls, folder: Path) -> "Once":
        """Read what `save` wrote."""
        whole: dict[str, Any] = json.loads((folder / "once.json").read_text())
        with np.load(folder / "series.npz", allow_pickle=False) as series:
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
        runs = [_runs(opened[0], bucket, seconds, least, before) for bucket in buckets]
    return Once(import_s, load_s, max(loaded, 0), resettable, runs)


def _runs(session: Session, bucket: Bucket, seconds: float, least: int, before: int) -> Runs:
    # Copied: a fork would have the arrays where its parent, and every other fork of it, has them.
    inputs = {name: array.copy() for name, array in taken(session, bucket.inputs).items()}
    first_s = timed(lambda: session.run(inputs))
    call = session.prepared(inputs) if isinstance(session, Prepared) else None
    series = latencies(lambda: session.run(inputs), seconds * (1 - RUNTIME_SHARE if call else 1), least)
    runtime = latencies(call, seconds * RUNTIME_SHARE, least) if call else None
    return Runs(
        session=series,
        runtime=runtime,
        first_s=first_s,
        memory_bytes=max(peak_bytes() - before, 0),
        device_bytes=session.used_bytes() if isinstance(session, DeviceMemory) else None,
        device_s=median(session.device_seconds(inputs, DEVICE_RUNS)) if isinstance(session, DeviceTimed) else None,
    )


def taken(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Of the inputs, those that the session takes."""
    return {spec.name: inputs[spec.name] for spec in session.inputs}
