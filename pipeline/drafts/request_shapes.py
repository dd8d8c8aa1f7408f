"""What saved requests say of a model's inputs where the model itself does not: names, types, sizes, and which vary."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, dtype_of, stored_arrays
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.types import TensorSpec
from enginesmith.recording.json_lines import JsonLinesReader
from enginesmith.recording.traffic import MOST_LINE_BYTES, decode_input
from pipeline.drafts.found import name_axes
from pipeline.drafts.request_files import FILES, LINES, MOST_JSON_BYTES
from validation.data.stored import find_arrays

# Requests of which the sizes are looked at.
_MOST = 4096


@dataclass(frozen=True)
class RequestInput:
    """One input in all requests. dtype: '' for plain numbers of JSON, of which `kind` is numpy's letter.

    sizes: the least and the greatest of each axis.  stacked: whether axis 0 counts requests or samples, as in arrays of
    a file; else a request has these axes, or a sample without its leading axis.
    """

    dtype: str
    kind: str
    sizes: tuple[tuple[int, int], ...]
    stacked: bool

    def as_read(self, complete: bool) -> tuple[tuple[int, int], ...]:
        """The sizes of an input of the model. complete: whether entries of a stacked axis 0 are inputs, and not samples
        of one; of JSON, whether the sample lacks its leading axis."""
        if self.stacked:
            return self.sizes[1:] if complete else ((1, 1), *self.sizes[1:])
        return ((1, 1), *self.sizes) if complete else self.sizes


def observe_requests(path: Path) -> dict[str, RequestInput]:
    """The inputs in a file or folder of requests, by name; the single array of an .npy file is named ''. Empty where
    nothing is said, as by images, or of differing names or numbers of axes."""
    found: dict[str, RequestInput] = {}
    for request in itertools.islice(_observe(path), _MOST):
        if found and found.keys() != request.keys():
            return {}
        for name, item in request.items():
            before = found.get(name, item)
            if len(before.sizes) != len(item.sizes):
                return {}
            pairs = zip(before.sizes, item.sizes, strict=True)
            sizes = tuple((min(one[0], other[0]), max(one[1], other[1])) for one, other in pairs)
            found[name] = RequestInput(item.dtype, item.kind, sizes, item.stacked)
    return found


def _observe(path: Path) -> Iterator[dict[str, RequestInput]]:
    """Each request, or each file of stacked ones. A file that cannot be read ends it: whoever reads all says why."""
    kind = path.suffix.lower()
    try:
        if path.is_dir():
            for file in sorted(file for file in path.iterdir() if file.suffix.lower() in FILES):
                yield from _observe(file)
        elif kind in (".npz", ".npy", ".safetensors"):
            arrays = stored_arrays(path) if kind != ".safetensors" else find_arrays(path, [])
            yield {
                name: RequestInput(array.dtype.name, array.dtype.kind, tuple((n, n) for n in array.shape), True)
                for name, array in arrays.items()
                if array.shape
            }
        elif kind in LINES:
            for _, record in JsonLinesReader(path, MOST_LINE_BYTES):
                if "kind" not in record:
                    yield _observe_json(record)
        elif kind == ".json" and path.stat().st_size <= MOST_JSON_BYTES:
            read = json.loads(path.read_text(encoding="utf-8"))
            yield from (_observe_json(item) for item in (read if isinstance(read, list) else [read]))
    except (EnginesmithError, ValueError, TypeError, AttributeError, OSError, RecursionError):
        return


def _observe_json(record: Mapping[str, object]) -> dict[str, RequestInput]:
    given = record.get("inputs", record)
    if not isinstance(given, Mapping):
        raise DataError("no inputs by name")
    found = {}
    for name, value in given.items():
        typed = isinstance(value, dict)
        array: Array = decode_input(name, value, None) if typed else np.asarray(value)
        sizes = tuple((size, size) for size in array.shape)
        found[name] = RequestInput(array.dtype.name if typed else "", array.dtype.kind, sizes, False)
    return found


@dataclass(frozen=True)
class Reading:
    """What the requests may mean: inputs of a model, and the least and greatest size of each of their axes."""

    inputs: tuple[TensorSpec, ...]
    sizes: tuple[tuple[tuple[int, int], ...], ...]

    def named(self) -> "Reading":
        """The same with names for the axes that vary (`name_axes`)."""
        return Reading(name_axes(self.inputs), self.sizes)

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest size of each dim."""
        found: dict[str, tuple[int, int]] = {}
        for spec, sizes in zip(self.inputs, self.sizes, strict=True):
            found |= {dim: pair for dim, pair in zip(spec.shape, sizes, strict=True) if isinstance(dim, str)}
        return found


def list_readings(
    guesses: Sequence[TensorSpec], requests: Mapping[str, RequestInput], any_rank: bool
) -> Iterator[Reading]:
    """What the requests may mean, the likeliest first: axis 0 of arrays counts samples, or complete inputs; JSON has
    complete inputs, or samples. An axis that varies has a name, or that of a guess of as many axes; any other but
    axis 0 has its size.

    guesses: of the model's inputs, of no dtype and no axes where there is no guess.  any_rank: whether the model takes
    other numbers of axes too, as one that begins with a linear layer does.
    """
    if [*requests] == [""] and len(guesses) == 1:
        requests = {guesses[0].name: requests[""]}
    if {spec.name for spec in guesses} != requests.keys():
        return
    ways = [_read(guesses, requests, complete) for complete in (False, True)]
    fit = [all(len(a.shape) == len(b.shape) for a, b in zip(way.inputs, guesses, strict=True)) for way in ways]
    singles = all(item.stacked and item.sizes[1:2] == ((1, 1),) for item in requests.values())
    if fit[1] and not fit[0] and (singles or not any_rank):
        ways.reverse()
    yield from ways


def _read(guesses: Sequence[TensorSpec], requests: Mapping[str, RequestInput], complete: bool) -> Reading:
    sizes = tuple(requests[spec.name].as_read(complete) for spec in guesses)
    first = "batch" if len({each[:1] for each in sizes}) == 1 else "?"
    pairs = zip(guesses, sizes, strict=True)
    return Reading(tuple(_read_input(spec, each, requests[spec.name], first) for spec, each in pairs), sizes)


def _read_input(guess: TensorSpec, sizes: Sequence[tuple[int, int]], given: RequestInput, first: str) -> TensorSpec:
    alike = len(guess.shape) == len(sizes)
    shape: list[int | str] = []
    for axis, (low, high) in enumerate(sizes):
        own = guess.shape[axis] if alike else None
        fixed = low if low == high and axis else first if axis == 0 else "?"
        shape.append(own if isinstance(own, str) else fixed)
    plain = "float32" if given.kind == "f" else "int64" if given.kind in "iu" else "bool"
    own_kind = guess.dtype and dtype_of(guess.dtype).kind == given.kind
    return TensorSpec(guess.name, given.dtype or (guess.dtype if own_kind else plain), tuple(shape))
