"""Recorded traffic at a place, a file or a folder of files, as one trace of sizes and arrivals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith.core.errors import DataError
from enginesmith.core.text import pluralize
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.recording.json_lines import JsonLinesReader
from enginesmith.recording.traffic import MOST_LINE_BYTES, RecordedTraffic, read_traffic
from validation.traffic.trace import Trace, trace_of

SUFFIXES = (".jsonl", ".ndjson", ".npz")
# Times of arrival from here on (2001) are taken for seconds since the epoch.
EPOCH_S = 1e9


@dataclass(frozen=True, eq=False)
class TrafficAtPlace:
    """The trace of all files.  sampling: share of the real traffic that was recorded.  cut: files whose last line was
    half written.  made: how it was generated; '' for recorded traffic."""

    trace: Trace
    files: tuple[Path, ...]
    sampling: float = 1.0
    cut: tuple[Path, ...] = ()
    made: str = ""

    @property
    def absolute(self) -> bool:
        """Whether its times are seconds since the epoch."""
        return self.trace.timed and self.trace.start >= EPOCH_S

    @property
    def per_second(self) -> float:
        """Mean requests a second of the real traffic. Raises DataError for traffic without times."""
        return self.trace.per_second / self.sampling


@dataclass(frozen=True, eq=False)
class SplitTrace:
    """Requests whose sizes the dims have, and how many lie beyond them.

    beyond: dim -> sizes beyond it and how many requests have each; a request may be beyond several dims.
    """

    within: Trace
    beyond: dict[str, dict[int, int]]
    requests: int

    @property
    def fallback_share(self) -> float:
        """Share of the requests that no bucket of these dims can hold."""
        return 1.0 - len(self.within) / self.requests


def model_of_place(place: Path) -> str:
    """The model that traffic says it is of; '' where it does not. Raises DataError for a place without traffic."""
    return _said_model(_files_of(place)[0])


def _said_model(file: Path) -> str:
    if file.suffix == ".npz":
        return ""
    first = next((record for _, record in JsonLinesReader(file, MOST_LINE_BYTES)), {})
    said = first.get("model") if "kind" in first else None
    return said if isinstance(said, str) else ""


def read_place(place: Path, inputs: Sequence[TensorSpec], model: str = "") -> TrafficAtPlace:
    """The traffic of a file, or of all .jsonl, .ndjson and .npz files of a folder, in the order of arrival.

    inputs: of the model.  model: its name; '' for any. Raises DataError for traffic that is empty, damaged or of
    another model, and for files that do not belong together.
    """
    files = _files_of(place)
    found: list[tuple[RecordedTraffic, Trace]] = []
    for file in files:
        check_model(file, model)
        traffic = read_traffic(file, inputs)
        # The inputs are let go: only their sizes are needed.
        found.append((replace(traffic, requests=traffic.requests[:1]), trace_of(traffic, inputs)))
    heads = [head for head, _ in found]
    _check_alike(files, heads)
    cut = tuple(file for file, head in zip(files, heads, strict=True) if head.cut)
    made = next((head.made for head in heads if head.made), "")
    return TrafficAtPlace(_merge([trace for _, trace in found]), files, heads[0].sampling, cut, made)


def check_model(file: Path, model: str) -> None:
    """Raise DataError for a file whose first line says that it is of another model. model: '' for any."""
    if model and (said := _said_model(file)) not in ("", model):
        raise DataError(f"{file} is traffic of {said!r}, and this is {model!r}; give its own spec or version")


def split_beyond(trace: Trace, dims: Sequence[Dim]) -> SplitTrace:
    """The requests that lie within all dims, and the sizes of the others. Raises DataError where all are others."""
    keep = np.ones(len(trace), bool)
    beyond: dict[str, dict[int, int]] = {}
    for dim in dims:
        sizes = trace.sizes[dim.name]
        outside = (sizes < dim.min) | (sizes > dim.max)
        keep &= ~outside
        if outside.any():
            values, counts = np.unique(sizes[outside], return_counts=True)
            beyond[dim.name] = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if not keep.any():
        ranges = ", ".join(f"{dim.name} {dim.words}" for dim in dims)
        raise DataError(f"none of the {pluralize(len(trace), 'request')} is within the dims ({ranges}); widen them")
    at = trace.at[keep]
    start = trace.start + float(at[0]) if trace.start else 0.0
    sizes_kept = {name: values[keep] for name, values in trace.sizes.items()}
    return SplitTrace(Trace(at - at[0], sizes_kept, start), beyond, len(trace))


def _files_of(place: Path) -> tuple[Path, ...]:
    if place.is_file():
        return (place,)
    if not place.is_dir():
        raise DataError(
            f"{place} does not exist; give a file that `enginesmith traffic record` wrote, or a folder of them"
        )
    files = tuple(sorted(file for file in place.iterdir() if file.suffix in SUFFIXES))
    if not files:
        raise DataError(f"{place} holds no traffic; files of traffic end in {', '.join(SUFFIXES)}")
    return files


def _check_alike(files: Sequence[Path], heads: Sequence[RecordedTraffic]) -> None:
    """Raise DataError for files of unequal sampling, with and without times, or several with times of their own."""
    first = heads[0]
    for file, head in zip(files[1:], heads[1:], strict=True):
        both = f"{files[0]} and {file}"
        if head.sampling != first.sampling:
            shares = f"{first.sampling:g} and {head.sampling:g}"
            raise DataError(f"{both} hold {shares} of the traffic; give files of one share")
        if head.timed != first.timed:
            raise DataError(f"of {both} only one has times of arrival; give such files apart")
        if head.timed and min(head.start, first.start) < EPOCH_S:
            raise DataError(f"{both} have times that do not count from the epoch; which came first is not known")


def _merge(traces: Sequence[Trace]) -> Trace:
    """Several traces as one, by the time of arrival; without times, one behind the other."""
    if len(traces) == 1:
        return traces[0]
    start = min(trace.start for trace in traces)
    at = np.concatenate([trace.at + (trace.start - start) for trace in traces])
    order = np.argsort(at, kind="stable")
    names = traces[0].sizes
    sizes = {name: np.concatenate([trace.sizes[name] for trace in traces])[order] for name in names}
    return Trace(at[order], sizes, start)
