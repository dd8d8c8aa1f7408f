"""The loop that times a session, at each bucket."""

import gc
import math
import re
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import InputError
from enginesmith.core.types import Dim, Session, Tensors, TensorSpec, sizes_product
from validation.data.batches import leading_dim
from validation.data.samples import resize

Which = Literal["few", "all"]
# The most sizes for 'all'; each size is timed for its own seconds.
MOST = 16
_ONE = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, eq=False)
class BucketInputs:
    """The sizes of the dims, and inputs of these sizes. items: number of samples in the inputs."""

    sizes: Mapping[str, int]
    inputs: Tensors
    items: int

    @property
    def name(self) -> str:
        """'batch=8 length=64', or 'static'."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "static"


def sizes_of_buckets(dims: Sequence[Dim], which: Which) -> list[dict[str, int]]:
    """Distinct sizes, in order of their product.

    'few': every dim at its min, opt and max. 'all': the ends of every bucket of every dim, at most MOST combinations.
    """
    if which == "few":
        bucket_sizes = [{dim.name: getattr(dim, end) for dim in dims} for end in ("min", "opt", "max")]
    else:
        bucket_sizes = list(islice(sizes_product(dims, {dim.name: dim.test_sizes() for dim in dims}), MOST))
    distinct_sizes = {tuple(sizes.items()): sizes for sizes in bucket_sizes}
    return sorted(distinct_sizes.values(), key=lambda sizes: math.prod(sizes.values()))


def parse_sizes(text: str, dims: Sequence[Dim]) -> dict[str, int]:
    """Sizes from text such as 'batch=8,length=64'; missing dims have their tuned (opt) size.

    Raises InputError for a dim that the model lacks, and for a size outside the dim's range.
    """
    matches = _ONE.findall(text)
    stated_sizes = {name: int(size) for name, size in matches}
    dims_by_name = {dim.name: dim for dim in dims}
    example = ",".join(f"{dim.name}={dim.opt}" for dim in dims) or "nothing: this model has no dynamic dims"
    if _ONE.sub("", text).strip(" ,") or not 0 < len(matches) == len(stated_sizes):
        raise InputError(f"bucket {text!r} is not NAME=SIZE,...; write {example}")
    for name, size in stated_sizes.items():
        if name not in dims_by_name:
            raise InputError(f"bucket {text!r}: the model has no dim {name!r}; write {example}")
        if size not in dims_by_name[name].sizes:
            raise InputError(f"bucket {text!r}: {name} has the sizes {dims_by_name[name].words}")
    return {dim.name: stated_sizes.get(dim.name, dim.opt) for dim in dims}


def make_buckets(points: Sequence[Mapping[str, int]], specs: Sequence[TensorSpec], real: Tensors) -> list[BucketInputs]:
    """Inputs of each size in `points`. specs: the model's inputs.  real: real inputs, cut or repeated to fit."""
    batch = leading_dim(specs)
    return [BucketInputs(dict(sizes), resize(real, specs, sizes), sizes.get(batch or "", 1)) for sizes in points]


def tuned_for(dims: Sequence[Dim]) -> dict[str, int]:
    """The size for which each dim is tuned (opt)."""
    return {dim.name: dim.opt for dim in dims}


def at_tuned_sizes(inputs: Tensors, specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Tensors:
    """The inputs resized to the sizes for which the model is tuned; unchanged if an input is empty."""
    return resize(inputs, specs, tuned_for(dims)) if all(array.size for array in inputs.values()) else inputs


# Series of latencies: the loop that times calls, with as little as possible between two readings of the clock, and
# the rule for the number of warm-up runs of a series.

# A shorter series has no 95 % interval for its median (0.5^6 * 2 = 3 %).
LEAST_RUNS = 6
MOST_RUNS = 200_000
# The least number of runs may take this many times the given seconds.
PATIENCE = 20
# Runs in a batch of the warm-up rule; shorter series than the second number have no warm-up.
BATCH = 5
LEAST = 4 * BATCH
_LEAST_ROOM = 0.05

Run = Callable[[], object]


def latencies(run: Run, seconds: float, least: int = LEAST_RUNS) -> Array:
    """Call `run` repeatedly for about `seconds`; returns the wall-clock seconds of each call, float64 [runs].

    There are at least `least` runs, unless these take PATIENCE times `seconds`, and at most MOST_RUNS.
    """
    clock = time.perf_counter_ns
    times_ns: list[int] = []
    gc_enabled = gc.isenabled()
    gc.disable()  # pauses of Python's garbage collection do not count, as in `timeit`
    try:
        started_ns = last_ns = clock()
        soft_ns, hard_ns = started_ns + int(seconds * 1e9), started_ns + int(PATIENCE * seconds * 1e9)
        while len(times_ns) < MOST_RUNS:
            run()
            now = clock()
            times_ns.append(now - last_ns)
            if now >= soft_ns and (len(times_ns) >= least or now >= hard_ns):
                break
            last_ns = clock()
    finally:
        if gc_enabled:
            gc.enable()
    return np.array(times_ns) * 1e-9


def time_call(run: Run) -> float:
    """Seconds of one call."""
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def streams_per_second(runs: Sequence[Run], seconds: float) -> float:
    """Calls per second of all `runs` together. Each is called in its own thread, repeatedly for about `seconds` and at
    least once.

    Raises the errors of the calls.
    """
    barrier = threading.Barrier(len(runs) + 1)
    deadline = [0.0]

    def stream(run: Run) -> int:
        barrier.wait()
        count = 0
        while not count or time.perf_counter() < deadline[0]:
            run()
            count += 1
        return count

    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(stream, run) for run in runs]
        started_s = time.perf_counter()
        deadline[0] = started_s + seconds
        barrier.wait()
        count = sum(future.result() for future in futures)
        return count / (time.perf_counter() - started_s)


def warm_up(latencies: Array) -> tuple[int, bool]:
    """The number of warm-up runs at the start of `latencies` ([runs], seconds), and whether the rest is steady.

    By MSER-5 (White, Simulation 69, 1997; White, Cobb & Spratt, WSC 2000): the series is averaged in batches of five,
    and cut where the standard error of the mean of the remaining batches is least, within the first half. It is not
    steady if this is the last allowed cut, because a longer series might be cut later.

    One spike in the first half would move the cut to a later point. Therefore the rule uses logarithms, clipped to the
    range of the central 95 % of the second half plus its width on either side: a spike then counts little more than a
    slow run, and a slow beginning still has an effect.
    """
    if len(latencies) < LEAST:
        return 0, True
    logs = np.log(np.maximum(latencies, 1e-12))
    low, high = np.quantile(logs[len(logs) // 2 :], [0.025, 0.975])
    batch_count = len(logs) // BATCH
    margin = high - low + _LEAST_ROOM
    means = np.clip(logs, low - margin, high + margin)[: batch_count * BATCH].reshape(batch_count, BATCH).mean(1)
    # For each cut d, sums over the means from d on.
    batch_counts = np.arange(batch_count, 0, -1)
    sums, squares = (np.cumsum(values[::-1])[::-1] for values in (means, means**2))
    error = np.maximum(squares - sums**2 / batch_counts, 0.0) / batch_counts.astype(float) ** 2
    last_cut = batch_count // 2
    cut = int(np.argmin(error[: last_cut + 1]))
    return cut * BATCH, cut < last_cut


Opens = Callable[[], AbstractContextManager[Session]]
# The number of runs of a bucket that the device's events time, besides the runs timed by the clock.
DEVICE_RUNS = 30
# The share of a bucket's time for the runtime's own calls; the rest is for `Session.run`.
RUNTIME_SHARE = 0.4
# Each size is timed in this many passes, in turn with the other sizes: a disturbance of the machine then affects some
# runs of each size, and not all runs of one size.
PASSES = 4


@dataclass(frozen=True, eq=False)
class SizeMeasurement:
    """One size measured in one process. session: seconds of each run of `Session.run`, float64 [runs].  runtime: of the
    runtime's own call; None if the session has none.  first_s: the first run, which is in neither array.  Other fields
    as in `BucketLatency`."""

    session: Array
    runtime: Array | None
    first_s: float
    memory_bytes: int
    device_bytes: int | None
    device_s: float | None


@dataclass(frozen=True, eq=False)
class ProcessMeasurement:
    """An engine measured in one process. import_s: None if opening the engine imports the runtime.  Other fields as in
    `EngineLatency`."""

    import_s: float | None
    load_s: float
    loaded_bytes: int
    memory_resettable: bool
    sizes: tuple[SizeMeasurement, ...]


def measurement_from_json(fields: dict[str, Any]) -> ProcessMeasurement:
    """A measurement from JSON fields, in which arrays are lists."""
    sizes = tuple(
        SizeMeasurement(
            **{
                **size,
                "session": np.array(size["session"]),
                "runtime": None if size["runtime"] is None else np.array(size["runtime"]),
            }
        )
        for size in fields["sizes"]
    )
    return ProcessMeasurement(**{**fields, "sizes": sizes})


def measure_once(
    opens: Opens, buckets: Sequence[BucketInputs], seconds: float, least: int, imports: Callable[[], None] | None = None
) -> ProcessMeasurement:
    """Open an engine in this process and run it at each of its sizes.

    seconds, least: per size, as in `latencies`.  imports: imports the runtime, which is timed separately.
    Raises the errors of `imports`, `opens` and the session.
    """
    import_s = time_call(imports) if imports else None
    try:
        Path("/proc/self/clear_refs").write_text("5")  # restarts the peak of resident memory (proc(5))
        is_resettable = True
    except OSError:
        is_resettable = False
    rss_before = _status_bytes("VmRSS")
    with ExitStack() as exit_stack:
        sessions: list[Session] = []
        load_s = time_call(lambda: sessions.append(exit_stack.enter_context(opens())))
        loaded_bytes = _status_bytes("VmRSS") - rss_before
        sizes = [_Size(sessions[0], bucket, seconds, least, rss_before) for bucket in buckets]
        for timed_call in [timed_call for _ in range(PASSES) for size in sizes for timed_call in size.calls]:
            timed_call.run_pass()
        measured_sizes = tuple(size.result() for size in sizes)
    return ProcessMeasurement(import_s, load_s, max(loaded_bytes, 0), is_resettable, measured_sizes)


def _status_bytes(name: str) -> int:
    """A memory size of this process in bytes, by its name in /proc/self/status; 0 if the system lacks it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@dataclass
class _Timed:
    """The runs of one call, in `PASSES` passes. parts: the latencies of each pass."""

    call: Callable[[], object]
    seconds: float
    least: int
    parts: list[Array] = field(default_factory=list)

    def run_pass(self) -> None:
        """Time one pass; do nothing if the earlier passes took all the time."""
        if not self.parts or sum(float(pass_times.sum()) for pass_times in self.parts) < self.seconds:
            self.parts.append(latencies(self.call, self.seconds / PASSES, 1 if self.parts else self.least))


class _Size:
    """The measurement of an engine at one size. The constructor makes the first run.

    calls: `Session.run`, and the runtime's own call if the session offers one.
    """

    def __init__(self, session: Session, bucket: BucketInputs, seconds: float, least: int, before: int) -> None:
        # Copied, because all forks of a parent have the arrays at the same addresses.
        self._inputs = {name: array.copy() for name, array in select_inputs(session, bucket.inputs).items()}
        self._session = session
        self._first_s = time_call(lambda: session.run(self._inputs))
        runtime_call = session.prepare_call(self._inputs)
        share = 1 - RUNTIME_SHARE if runtime_call else 1.0
        self.calls = [_Timed(lambda: session.run(self._inputs), seconds * share, least)]
        self.calls += [_Timed(runtime_call, seconds * RUNTIME_SHARE, least)] if runtime_call else []
        peak = _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._memory_bytes = max(peak - before, 0)

    def result(self) -> SizeMeasurement:
        """All runs of this size, and its other figures."""
        device = self._session.device_seconds(self._inputs, DEVICE_RUNS)
        session, runtime, *_ = (*(np.concatenate(timed_call.parts) for timed_call in self.calls), None)
        device_s, used_bytes = median(device) if device else None, self._session.used_bytes()
        return SizeMeasurement(session, runtime, self._first_s, self._memory_bytes, used_bytes, device_s)


def select_inputs(session: Session, inputs: Tensors) -> dict[str, Array]:
    """The inputs that the session takes."""
    return {spec.name: inputs[spec.name] for spec in session.inputs}
