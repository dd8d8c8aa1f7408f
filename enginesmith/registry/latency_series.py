"""Series of latencies: measurements over time of one unit of a model at one bucket on one kind of machine.

Each series is its own document. Points are only added, by compare-and-swap; the oldest are dropped beyond MOST_POINTS.
A point has two values: the median in seconds, which depends on the load of its machine, and the ratio of paired runs to
a reference, an engine of an earlier version, which depends on the load far less. The reference is opened by the current
runtime and driver, so a change of these affects only the median.

Series outlive the versions that they name, and garbage collection keeps no blob because of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

from enginesmith.core.codec import encode, explain_damage, parse_as
from enginesmith.core.errors import canonical_json, digest_of
from enginesmith.core.names import is_name, version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.reports.latency import MachineKind
from enginesmith.core.requirements import Amount, Format
from enginesmith.registry.store.base import Store, change
from enginesmith.registry.store.layout import SERIES, series_key

MAX_BYTES = 8 << 20
MOST_POINTS = 2000
# Number of points whose median is the base level of a new reference.
LEVEL_POINTS = 5


@dataclass(frozen=True)
class SeriesPoint:
    """One measurement. at: ISO 8601, UTC.  engine: its digest.  median_s, low_s, high_s: with the 95 % interval.

    relative, relative_low, relative_high: of the ratio to the series' reference; None if that could not be run.
    toolchain: versions that built the engine, and runtimes that ran it ('now onnxruntime').  driver: of the GPU, None
    on a CPU.  load: share of all cores' time used by other processes.  busy: as in a latency report.
    """

    at: str
    version: str
    engine: str
    median_s: Amount
    low_s: Amount | None
    high_s: Amount | None
    relative: Amount | None
    relative_low: Amount | None
    relative_high: Amount | None
    toolchain: Mapping[str, str]
    driver: str | None
    load: Amount | None
    busy: tuple[str, ...] = ()


@dataclass(frozen=True)
class LatencySeries:
    """A unit of a model ('cpu int8 onnxruntime') at a bucket on a kind of machine. points: oldest first.

    reference: the version whose engine is the ratios' denominator, None before the first point.  base: that engine's
    level in units of the first reference.
    """

    model: str
    unit: str
    bucket: str
    machine: MachineKind
    reference: str | None = None
    base: Amount = 1.0
    points: tuple[SeriesPoint, ...] = ()
    format: Annotated[int, Format(1)] = 1

    @property
    def key(self) -> str:
        """Key of its document."""
        return series_key(self.model, digest_of([self.unit, self.bucket, encode(self.machine)]))

    def with_reference(self, version: str) -> "LatencySeries":
        """The series with another reference. Its base level is the median of the newest points of that version, else of
        all points, since the lost reference cannot be run against it."""
        relative_points = [point for point in self.points if point.relative is not None]
        level_points = [point for point in relative_points if point.version == version] or relative_points
        relative_levels = [point.relative for point in level_points[-LEVEL_POINTS:] if point.relative is not None]
        return replace(self, reference=version, base=median(relative_levels) if relative_levels else 1.0)


def append_point(store: Store, series: LatencySeries, point: SeriesPoint) -> LatencySeries:
    """Add a point to the stored series, and return the series. series: names the series and its reference; its points
    count only if none are stored. Concurrent writers lose no point.

    Raises IntegrityError for an unreadable document, and as `store.base.change`.
    """

    def add(data: bytes | None) -> bytes:
        stored_series = parse_series(data, series.key) if data else replace(series, points=())
        return merged(replace(stored_series, reference=series.reference, base=series.base), (point,))

    def contains(data: bytes | None, _: bytes) -> bool:
        return data is not None and point in parse_series(data, series.key).points

    series_bytes = change(store, series.key, add, contains)
    return parse_series(series_bytes or b"", series.key)


def merge_series(source: Store, dest: Store, model: str) -> None:
    """Merge a model's series into those of another registry."""
    for series in list_series(source, model):

        def add(data: bytes | None, new: LatencySeries = series) -> bytes:
            return merged(parse_series(data, new.key) if data else replace(new, points=()), new.points)

        change(dest, series.key, add)


def merged(series: LatencySeries, points: tuple[SeriesPoint, ...]) -> bytes:
    """The document with these points added, each once, ordered by time; only the newest MOST_POINTS remain."""
    points_by_key = {(point.at, point.engine, point.median_s): point for point in (*series.points, *points)}
    ordered_points = [point for _, point in sorted(points_by_key.items(), key=lambda keyed_point: keyed_point[0])]
    return canonical_json(encode(replace(series, points=tuple(ordered_points[-MOST_POINTS:]))))


def read_series(store: Store, series: LatencySeries) -> LatencySeries:
    """The stored series with the key of `series`; `series` itself if none is stored. Raises IntegrityError."""
    series_bytes = store.read(series.key)
    return parse_series(series_bytes, series.key) if series_bytes else series


def list_series(store: Store, model: str) -> list[LatencySeries]:
    """All series of a model, in `order_of`. Raises IntegrityError for an unreadable one."""
    documents = ((key, store.read(key)) for key in store.list(f"{SERIES}{model}/"))
    return sorted((parse_series(series_bytes, key) for key, series_bytes in documents if series_bytes), key=order_of)


def order_of(series: LatencySeries) -> tuple[object, ...]:
    """Sort key of series: by unit, bucket ('batch=8' before 'batch=32') and machine."""
    return series.unit, version_order(series.bucket), str(series.machine)


def models_with_series(store: Store) -> list[str]:
    """The models that have series, with or without versions."""
    models = {key.removeprefix(SERIES).partition("/")[0] for key in store.list(SERIES)}
    return sorted(filter(is_name, models))


def parse_series(data: bytes, key: str) -> LatencySeries:
    """Parse the document of a series. Raises IntegrityError if it is invalid, or does not belong to its key."""
    with explain_damage(f"{key} is not a series of latencies", "move it away, and a new one begins"):
        series = parse_as(data, MAX_BYTES, LatencySeries)
        if series.key != key:
            raise Malformed(f"it is the document of another series ({series.key})")
    return series
