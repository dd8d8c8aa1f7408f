"""The history of builds, which predicts later builds, and build locks."""

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated

from enginesmith.core.codec import NewerFormatError, encode, parse_as
from enginesmith.core.errors import EnginesmithError, IntegrityError, UndecidedError, canonical_json
from enginesmith.core.parsing import Presence, this_process
from enginesmith.core.requirements import Amount, Count, Format
from enginesmith.core.text import pluralize, precise_now
from enginesmith.core.types import BuildRequest
from enginesmith.registry import leases
from enginesmith.registry.store.base import Store, change
from enginesmith.registry.store.layout import BUILD_LOCKS, TOTALS, build_lock_key, history_key

# The history of builds: the prediction of a build's seconds and memory, and the totals.
#
# The history is two documents for each backend: the builds of one model, and the newest of all models. Each is bounded
# in size and changed by compare-and-swap. A run reads them when it builds its first unit, and appends its builds in a
# few batches, so that a prediction costs one or two reads per run. A history is a cache: an unreadable one counts as
# empty.
#
# The totals are counters over the life of a registry that only increase, with a histogram of build times whose buckets
# are cumulative, as in Prometheus. Each run adds its builds to them, because its process ends too soon to be scraped;
# `enginesmith registry metrics` prints them.

MAX_BYTES = 4 << 20
# The numbers of newest builds that are stored: of one unit, of one model, and of a backend.
MOST_OF_UNIT = 10
MOST_OF_MODEL = 300
MOST_OF_BACKEND = 200
# Prediction for a unit never built: from this many builds nearest in graph size; the largest factor, up or down.
NEIGHBOURS = 5
MOST_STRETCH = 8.0
# Upper bounds in seconds of the histogram: from a CPU graph to a large engine that is tuned for hours.
BUCKETS_S = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
# The maximum number of counted combinations of state, target and backend; real registries have far fewer.
MOST_LINES = 2000


@dataclass(frozen=True)
class Past:
    """One finished build. graph_bytes: size of its ONNX file with its shards.  seconds: wall clock time of its process;
    peak_mib: its peak memory in MiB.  outcome: 'built' or 'failed'.  at: ISO 8601, UTC."""

    model: str
    target: str
    precision: str
    graph_bytes: Count
    seconds: Amount
    peak_mib: Amount
    outcome: str
    at: str

    @property
    def unit(self) -> tuple[str, str, str]:
        """Model, target and precision: the identity of a unit within its backend."""
        return self.model, self.target, self.precision


@dataclass(frozen=True)
class _HistoryDocument:
    builds: tuple[Past, ...]
    format: Annotated[int, Format(1)] = 1


@dataclass(frozen=True)
class Expectation:
    """The prediction of a build. builds: number of builds that it is based on.  basis: describes these builds.

    seconds: the median of successful builds, None without one.  peak_mib: the largest peak memory in MiB.
    """

    seconds: Amount | None
    peak_mib: Amount
    builds: Count
    basis: str

    def describe_left(self, elapsed_s: float) -> str:
        """The remaining time as text: '~40 s left (predicted from 3 builds of this unit)'; '' if it is unknown."""
        if self.seconds is None:
            return ""
        remaining_s = self.seconds - elapsed_s
        text = f"~{math.ceil(remaining_s)} s left" if remaining_s > 0 else f"{-remaining_s:.0f} s over the prediction"
        return f"{text} (predicted from {self.basis})"


class History:
    """The build history of one registry, read once per document. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Past, ...]] = {}

    def predict(self, model: str, request: BuildRequest, shard_bytes: int = 0) -> Expectation | None:
        """The predicted time and memory of building this unit of `model`; None without similar builds. shard_bytes: of
        its graph's shards.

        From builds of the same unit, else from the backend's builds nearest in graph size, scaled by the ratio of the
        sizes. Also None if the store cannot be read.
        """
        try:
            with self._lock:
                return self._same(model, request) or self._near(request, shard_bytes)
        except EnginesmithError:
            return None

    def _same(self, model: str, request: BuildRequest) -> Expectation | None:
        unit = (model, request.target.name, request.precision)
        past_builds = [build for build in self._of(history_key(request.backend, model)) if build.unit == unit]
        basis = f"{pluralize(len(past_builds), 'build')} of this unit"
        return _expectation([(build, 1.0) for build in past_builds], basis) if past_builds else None

    def _near(self, request: BuildRequest, shard_bytes: int) -> Expectation | None:
        size = max(1, self._store.size(request.model) + shard_bytes)
        past_builds = [build for build in self._of(history_key(request.backend)) if build.graph_bytes > 0]
        peer_builds = [build for build in past_builds if build.target == request.target.name] or past_builds
        peer_builds = [build for build in peer_builds if build.precision == request.precision] or peer_builds
        peer_builds.sort(key=lambda past: abs(math.log(size / past.graph_bytes)))
        scaled_builds = [
            (build, min(max(size / build.graph_bytes, 1 / MOST_STRETCH), MOST_STRETCH))
            for build in peer_builds[:NEIGHBOURS]
        ]
        basis = f"{pluralize(len(scaled_builds), 'build')} of {request.backend}, scaled by the size of the graph"
        return _expectation(scaled_builds, basis) if scaled_builds else None

    def _of(self, key: str) -> tuple[Past, ...]:
        if key not in self._read:
            self._read[key] = read_pasts(self._store.read(key))
        return self._read[key]


def remember_builds(store: Store, builds: Mapping[str, Sequence[Past]]) -> None:
    """Append finished builds, by backend; concurrent writers lose nothing.

    Raises UnavailableError; ConflictError if a document keeps changing.
    """

    def add(key: str, new: Sequence[Past], cap: int) -> None:
        def with_new(data: bytes | None) -> bytes | None:
            if _is_newer(data, _HistoryDocument):
                return None
            # Sets, because a write whose response was lost is repeated, and must not add a build twice.
            return canonical_json(encode(_HistoryDocument(_newest({*read_pasts(data), *new}, cap))))

        change(store, key, with_new)

    for backend, past_builds in builds.items():
        for model in dict.fromkeys(build.model for build in past_builds):
            add(history_key(backend, model), [build for build in past_builds if build.model == model], MOST_OF_MODEL)
        add(history_key(backend), past_builds, MOST_OF_BACKEND)


def _newest(pasts: set[Past], cap: int) -> tuple[Past, ...]:
    """The newest builds of each unit and of all units, oldest first."""
    newest_builds: list[Past] = []
    unit_counts: dict[tuple[str, str, str], int] = {}
    for build in sorted(pasts, key=lambda past: (past.at, *past.unit), reverse=True):
        unit_counts[build.unit] = unit_counts.get(build.unit, 0) + 1
        if unit_counts[build.unit] <= MOST_OF_UNIT and len(newest_builds) < cap:
            newest_builds.append(build)
    return tuple(newest_builds[::-1])


def _is_newer(data: bytes | None, kind: type[object]) -> bool:
    """Whether a newer release wrote a document. This release would drop the fields that it does not know."""
    try:
        parse_as(data or b"{}", MAX_BYTES, kind)
    except IntegrityError as error:
        return isinstance(error, NewerFormatError)
    return False


def read_pasts(data: bytes | None) -> tuple[Past, ...]:
    """The builds in a history document; empty if it is absent or malformed."""
    try:
        return parse_as(data, MAX_BYTES, _HistoryDocument).builds if data else ()
    except IntegrityError:
        return ()


def _expectation(scaled_builds: Sequence[tuple[Past, float]], basis: str) -> Expectation:
    """The median time of the successful builds, and the largest peak memory. Memory is never scaled down: a compiler's
    own share does not shrink with the model, and a build with too small a reservation is killed."""
    durations_s = [build.seconds * ratio for build, ratio in scaled_builds if build.outcome == "built"]
    peak_mib = max(build.peak_mib * max(1.0, ratio) for build, ratio in scaled_builds)
    return Expectation(
        statistics.median(durations_s) if durations_s else None, round(peak_mib, 1), len(scaled_builds), basis
    )


@dataclass(frozen=True)
class BuildTally:
    """Builds of a backend for a target with one final state: count, total seconds, and for each of `BUCKETS_S` the
    number of builds that took at most so long."""

    state: str
    target: str
    backend: str
    count: Count = 0
    seconds: Amount = 0.0
    buckets: tuple[Count, ...] = (0,) * len(BUCKETS_S)

    @property
    def labels(self) -> tuple[str, str, str]:
        """State, target and backend."""
        return self.state, self.target, self.backend

    def with_build(self, seconds: float) -> "BuildTally":
        """The tally with one more build that took `seconds`."""
        buckets = tuple(n + (seconds <= bound) for n, bound in zip(self.buckets, BUCKETS_S, strict=True))
        return replace(self, count=self.count + 1, seconds=round(self.seconds + seconds, 3), buckets=buckets)


@dataclass(frozen=True)
class Totals:
    """The totals document. hits, misses: numbers of units that were found in the build cache, and that were not."""

    builds: tuple[BuildTally, ...] = ()
    hits: Count = 0
    misses: Count = 0
    buckets_s: tuple[Amount, ...] = BUCKETS_S
    format: Annotated[int, Format(1)] = 1


def remember_totals(store: Store, builds: Mapping[str, Sequence[Past]], hits: int, misses: int) -> None:
    """Add finished builds, by backend. A write whose response was lost may be counted twice.

    Raises UnavailableError; ConflictError if the document keeps changing.
    """

    def add(data: bytes | None) -> bytes | None:
        if _is_newer(data, Totals):
            return None
        totals = read_totals(data)
        tallies = {tally.labels: tally for tally in totals.builds}
        for backend, past_builds in builds.items():
            for build in past_builds:
                new_tally = BuildTally(build.outcome, build.target, backend)
                if new_tally.labels in tallies or len(tallies) < MOST_LINES:
                    tallies[new_tally.labels] = tallies.get(new_tally.labels, new_tally).with_build(build.seconds)
        ordered_tallies = tuple(tally for _, tally in sorted(tallies.items()))
        return canonical_json(encode(Totals(ordered_tallies, totals.hits + hits, totals.misses + misses)))

    change(store, TOTALS, add)


def read_totals(data: bytes | None) -> Totals:
    """Parse the totals document; zeros if it is absent or malformed."""
    try:
        totals = parse_as(data, MAX_BYTES, Totals) if data else Totals()
    except IntegrityError:
        return Totals()
    has_all_buckets = all(len(tally.buckets) == len(BUCKETS_S) for tally in totals.builds)
    return totals if has_all_buckets and totals.buckets_s == BUCKETS_S else Totals()


# Build locks: if several runs, on any machines, build the same thing, one builds and the others wait.
#
# A lock saves work and is not needed for correctness: two concurrent builds make the same version twice, and the second
# publication finds the first. So a run may take a lock whose holder seems dead: its document did not change for
# `DEAD_AFTER_S` on the waiting run's clock, or its process has ended on this machine.

BEAT_S = 10.0
DEAD_AFTER_S = 45.0
# Garbage collection deletes locks that were not renewed for this long.
STALE_AFTER = timedelta(days=1)
_POLL_S = 0.5
MAX_LOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class LockHolder:
    """The holder of a build lock. what: the work, for messages.  host, namespace, pid, began: as in `Presence`.
    thread: two threads of a process are two holders.  beat: counter of renewals.  since: when it got the lock (ISO
    8601)."""

    what: str
    host: str
    namespace: str
    pid: Count
    thread: Count
    began: str
    beat: Count
    since: str

    @property
    def gone(self) -> bool:
        """Whether its process ran on this machine and has ended."""
        return Presence(self.host, self.namespace, self.pid, self.began).has_ended

    def __str__(self) -> str:
        start_text = self.since[:19].replace("T", " ")
        return f"{self.what} is running on {self.host}, process {self.pid}, since {start_text} UTC"


@contextmanager
def hold_build_lock(
    store: Store, name: str, what: str, say: Callable[[str], object] = lambda _: None
) -> Iterator[None]:
    """Hold the build lock `name`, a digest, while the block runs; waits as long as another run holds it.

    what: the work, for the messages of waiting runs.  say: called with a text about the holder, whenever it changes.
    """
    process, key = this_process(), build_lock_key(name)
    own_lock = LockHolder(
        what, process.host, process.namespace, process.pid, threading.get_ident(), process.began, 0, precise_now()
    )
    own_lock = _take(store, key, own_lock, say)

    def renew() -> None:
        nonlocal own_lock
        lock_bytes, renewed_lock = store.read(key), replace(own_lock, beat=own_lock.beat + 1)
        if _is_of(own_lock, _read(lock_bytes)) and store.replace(key, canonical_json(encode(renewed_lock)), lock_bytes):
            own_lock = renewed_lock

    try:
        with leases.keep_renewing(renew, BEAT_S):
            yield
    finally:
        with suppress(EnginesmithError):  # a waiting run takes a lock that is not renewed
            if _is_of(own_lock, _read(store.read(key))):
                store.remove(key)


def is_held(store: Store, name: str) -> bool:
    """Whether a run holds the build lock `name` and its process is not known to have ended."""
    holder = _read(store.read(build_lock_key(name)))
    return holder is not None and not holder.gone


def remove_stale_locks(store: Store) -> None:
    """Delete build locks that are unreadable, or were not renewed for a day on the store's clock."""
    renewal_times = dict(store.stamps(BUILD_LOCKS))
    oldest_valid = store.now() - STALE_AFTER if renewal_times else None
    for key, renewed_at in renewal_times.items():
        if _read(store.read(key)) is None or (oldest_valid and renewed_at < oldest_valid):
            store.remove(key)


def _take(store: Store, key: str, own_lock: LockHolder, say: Callable[[str], object]) -> LockHolder:
    last_bytes, changed_at_s, reported_holder = b"", time.monotonic(), ""
    while True:
        lock_bytes = store.read(key)
        holder = _read(lock_bytes)
        if _is_of(own_lock, holder):
            return own_lock
        if lock_bytes != last_bytes:
            last_bytes, changed_at_s = lock_bytes or b"", time.monotonic()
        if holder is None or holder.gone or time.monotonic() - changed_at_s > DEAD_AFTER_S:
            own_lock = replace(own_lock, since=precise_now())
            with suppress(UndecidedError):  # the next read shows which writer won
                if store.replace(key, canonical_json(encode(own_lock)), lock_bytes):
                    return own_lock
            continue
        if reported_holder != (reported_holder := str(holder)):
            say(reported_holder)
        time.sleep(random.uniform(_POLL_S / 2, _POLL_S))  # noqa: S311 - no secret


def _is_of(own_lock: LockHolder, holder: LockHolder | None) -> bool:
    """Whether a lock is the process's own, with any beat."""
    return holder is not None and replace(holder, beat=own_lock.beat) == own_lock


def _read(data: bytes | None) -> LockHolder | None:
    """The holder in a lock's document; None if the document is absent or unreadable."""
    with suppress(IntegrityError):
        return parse_as(data or b"{}", MAX_LOCK_BYTES, LockHolder)
    return None
