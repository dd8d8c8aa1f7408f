"""Recorded traffic: the inputs of each request and its time of arrival; digests of answers, and how far two differ.

JSON lines: `{"at": seconds, "inputs": {"x": {"dtype": "float32", "shape": [1, 8], "data": base64}}}`; an input may
also be nested lists of numbers, for requests written by hand, and `latency` says how many seconds the answer took. Or
`.npz`: an array `at`, and each input with one complete input per entry of axis 0. If the file has no `at`, the
traffic has no times.
"""

import base64
import binascii
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, check_inputs, dtype_of, stored_arrays
from enginesmith.core.codec import refuse_newer
from enginesmith.core.errors import DataError, EnginesmithError, digest_of_file
from enginesmith.core.types import Tensors, TensorSpec
from enginesmith.recording.json_lines import JsonLinesReader, Record, number_in, text_in

TRAFFIC = "enginesmith-traffic"
FORMAT = 1
MOST_LINE_BYTES = 64 << 20
MOST_BYTES = 1 << 30
# Larger times of arrival are in milliseconds or less: as seconds they would be after the year 5000.
LATEST_S = 1e11
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64", "bfloat16")
# Decibels that stand for 'equal' and for 'nothing in common', because JSON has no infinity.
EQUAL_DB, UNLIKE_DB = 999.0, -999.0


@dataclass(frozen=True)
class RecordedRequest:
    """One request. at: seconds since the first.  latency: seconds until its answer, if recorded."""

    at: float
    inputs: Mapping[str, Array]
    latency: float | None = None


@dataclass(frozen=True)
class RecordedTraffic:
    """Requests in the order of their arrival. digest: of the file.  sampling: their share of the real traffic.
    cut: whether a last line was half written and left out.  made: how it was generated; '' for recorded traffic.
    surplus: arrays of generated traffic that are no inputs, such as labels of golden data, and were left out.
    timed: whether the file has times of arrival; if not, every `at` is 0 and the requests are in the order of the file.
    start: the first arrival in the file, in seconds since the epoch if it was recorded so; 0 without times.
    model: the requested model, if the file names it."""

    requests: tuple[RecordedRequest, ...]
    digest: str
    sampling: float = 1.0
    cut: bool = False
    made: str = ""
    surplus: tuple[str, ...] = ()
    timed: bool = True
    start: float = 0.0
    model: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].at

    def arrivals(self, scale: float = 1.0, duration: float | None = None) -> Iterator[tuple[float, RecordedRequest]]:
        """Arrival times, `scale` times as dense as recorded; repeated until `duration` seconds are full, if given."""
        count = len(self.requests)
        period = self.seconds * count / (count - 1) if count > 1 and self.seconds > 0 else 1.0
        for repetition in range(1 if duration is None else 10**9):
            for request in self.requests:
                arrival_s = (repetition * period + request.at) / scale
                if duration is not None and arrival_s >= duration:
                    return
                yield arrival_s, request

    def count(self, scale: float = 1.0, duration: float | None = None) -> int:
        """The number of requests that `arrivals` yields."""
        return sum(1 for _ in self.arrivals(scale, duration))


def encode_inputs(inputs: Mapping[str, object]) -> dict[str, object]:
    """Inputs as JSON that preserves every byte. Raises DataError for an array that a traffic file cannot represent."""
    encoded_inputs: dict[str, object] = {}
    for name, value in inputs.items():
        array = np.ascontiguousarray(value)
        if array.dtype.name not in DTYPES:
            raise DataError(f"input {name!r} is {array.dtype}; only numbers and truth values can be recorded")
        _check_finite(name, array)
        data = base64.b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode()
        shape = list(np.asarray(value).shape)
        encoded_inputs[name] = {"dtype": array.dtype.name, "shape": shape, "data": data}
    return encoded_inputs


def read_traffic(path: Path, inputs: Sequence[TensorSpec], most_bytes: int = MOST_BYTES) -> RecordedTraffic:
    """Read recorded traffic, checked against a model's inputs.

    Generated traffic contains all arrays of its file of samples; those that are no inputs are left out. Raises
    DataError with the line for a record that does not fit, and for more than `most_bytes` of inputs.
    """
    sampling, origin, model, is_cut = 1.0, "", "", False
    surplus_names: dict[str, None] = {}
    input_names = {spec.name for spec in inputs}
    if path.suffix == ".npz":
        recorded_requests = list(_read_npz(path, inputs))
    else:
        reader = JsonLinesReader(path, MOST_LINE_BYTES)
        recorded_requests, input_bytes = [], 0
        for line_number, record in reader:
            try:
                if "kind" in record:
                    sampling, origin, model = _read_head(record)
                    continue
                if origin and isinstance(record_inputs := record.get("inputs"), dict):
                    surplus_names |= dict.fromkeys(name for name in record_inputs if name not in input_names)
                    record = {
                        **record,
                        "inputs": {name: value for name, value in record_inputs.items() if name in input_names},
                    }
                recorded_requests.append(_read_request(record, inputs))
                if math.isnan(recorded_requests[-1].at) != math.isnan(recorded_requests[0].at):
                    raise ValueError("at is given for some requests only; give it for all of them, or for none")
                input_bytes += sum(array.nbytes for array in recorded_requests[-1].inputs.values())
                if input_bytes > most_bytes:
                    raise ValueError(f"more than {most_bytes} bytes of inputs so far; split the file")
            except (ValueError, TypeError, OverflowError, EnginesmithError) as error:
                raise reader.error(line_number, str(error)) from None
        is_cut = reader.cut
    if not recorded_requests:
        raise DataError(f"{path} holds no requests; `enginesmith traffic record` records them")
    is_timed = not math.isnan(recorded_requests[0].at)
    recorded_requests.sort(key=lambda request: request.at if is_timed else 0.0)
    start_s = recorded_requests[0].at if is_timed else 0.0
    requests = tuple(
        replace(recorded_request, at=recorded_request.at - start_s if is_timed else 0.0)
        for recorded_request in recorded_requests
    )
    return RecordedTraffic(
        requests, digest_of_file(path), sampling, is_cut, origin, tuple(surplus_names), is_timed, start_s, model
    )


def _read_head(record: Record) -> tuple[float, str, str]:
    """The share of the traffic that was recorded, how it was generated ('' if not), and the requested model ('' if
    unknown). Raises ValueError, NewerFormatError for traffic of a newer release."""
    if record.get("kind") == TRAFFIC:
        refuse_newer("traffic", record.get("format"), FORMAT)
    if record.get("kind") != TRAFFIC or record.get("format") != FORMAT:
        head_text = f"{str(record.get('kind'))[:60]!r} of format {str(record.get('format'))[:20]}"
        raise ValueError(f"is the head of {head_text}; traffic of format {FORMAT} is needed")
    sampling = number_in(record, "sampling", above=0.0) if "sampling" in record else 1.0
    return sampling, text_in(record, "made", 200), text_in(record, "model", 200)


def _read_request(record: Record, specs: Sequence[TensorSpec]) -> RecordedRequest:
    specs_by_name = {spec.name: spec for spec in specs}
    arrival_s, latency = check_timing(record)
    inputs = record.get("inputs")
    if not isinstance(inputs, dict):
        raise ValueError("inputs is missing, or not an object")
    arrays = {name: decode_input(name, value, specs_by_name.get(name)) for name, value in inputs.items()}
    _check(arrays, specs)
    return RecordedRequest(arrival_s, arrays, latency)


def check_timing(record: Record) -> tuple[float, float | None]:
    """The time of arrival of a request, NaN without one, and its latency, both in seconds. Raises ValueError."""
    arrival_s = _check_time(number_in(record, "at")) if record.get("at") is not None else math.nan
    return arrival_s, number_in(record, "latency", above=0.0) if record.get("latency") is not None else None


def _check_time(at: float) -> float:
    """A time of arrival in seconds. Raises ValueError for other values, such as milliseconds since the epoch."""
    if abs(at) > LATEST_S:
        raise ValueError(f"at is {at:g}; give seconds, such as those since the epoch, {LATEST_S:g} at most")
    return at


def _check(arrays: Mapping[str, Array], specs: Sequence[TensorSpec]) -> None:
    check_inputs(specs, arrays)
    for name, array in arrays.items():
        _check_finite(name, array)


def _check_finite(name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"input {name!r} holds NaN or infinity")


def decode_input(name: str, value: object, spec: TensorSpec | None) -> Array:
    """An input from JSON: an array as `encode_inputs` writes it, or nested lists of numbers that fit its dtype.

    Raises ValueError.
    """
    if isinstance(value, dict):
        return _from_base64(name, value)
    if spec is None:
        raise ValueError(f"no input is named {name[:60]!r}")
    try:
        numbers = np.asarray(value)
    except ValueError as error:  # rows of unequal lengths
        raise ValueError(f"input {name!r} is not an array of numbers: {str(error)[:120]}") from error
    if numbers.dtype.kind not in "biuf":
        raise ValueError(f"input {name!r} is not an array of numbers")
    with np.errstate(over="ignore", invalid="ignore"):  # `_check` finds an infinity that results
        array = numbers.astype(dtype_of(spec.dtype))
    if array.dtype.kind in "biu" and not np.array_equal(array, numbers):
        raise ValueError(f"input {name!r} holds numbers that {spec.dtype} cannot hold")
    return array


def _from_base64(name: str, value: Mapping[str, object]) -> Array:
    dtype, shape, base64_text = value.get("dtype"), value.get("shape"), value.get("data")
    if dtype not in DTYPES:
        raise ValueError(f"input {name!r} has dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 32:
        raise ValueError(f"input {name!r} has shape {str(shape)[:60]}; a list of sizes is needed")
    if not isinstance(base64_text, str):
        raise ValueError(f"input {name!r} has no data in base64")
    try:
        array_bytes = base64.b64decode(base64_text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"input {name!r}: its data is not base64 ({error})") from None
    array_dtype = dtype_of(dtype)
    if len(array_bytes) != math.prod(shape) * array_dtype.itemsize:
        raise ValueError(f"input {name!r} has {len(array_bytes)} bytes, which is not the size of {dtype} {shape}")
    return np.frombuffer(array_bytes, array_dtype).reshape(shape)


def _read_npz(path: Path, specs: Sequence[TensorSpec]) -> Iterator[RecordedRequest]:
    arrays = {name: stored_array.read() for name, stored_array in stored_arrays(path).items()}
    count = max((len(array) for array in arrays.values() if array.ndim), default=0)
    times = arrays.pop("at") if (is_timed := "at" in arrays) else np.zeros(count)
    if times.ndim != 1 or times.dtype.kind not in "iuf" or not np.isfinite(times).all():
        raise DataError(f"{path}: array 'at' must be one finite number per request")
    longest = "array 'at'" if is_timed else "the longest array"
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != len(times):
            raise DataError(
                f"{path}: array {name!r} has shape {array.shape}; axis 0 must have {len(times)} entries, as {longest}"
            )
    for index, arrival_s in enumerate(times):
        inputs = {name: array[index] for name, array in arrays.items()}
        try:
            _check_time(float(arrival_s))
            _check(inputs, specs)
        except (ValueError, EnginesmithError) as error:
            raise DataError(f"{path}: request {index}: {error}") from None
        yield RecordedRequest(float(arrival_s) if is_timed else math.nan, inputs)


@dataclass(frozen=True)
class Difference:
    """The difference of two answers. sqnr_db: of the output that differs most; EQUAL_DB if equal, UNLIKE_DB if they
    cannot be compared.  flipped: whether an argmax over the last axis differs."""

    sqnr_db: float
    flipped: bool


def digest_of_outputs(outputs: Tensors) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of arrays, in any order."""
    hasher = hashlib.sha256()
    for name in sorted(outputs):
        array = np.ascontiguousarray(outputs[name])
        hasher.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def difference(candidate: Tensors, baseline: Tensors) -> Difference:
    """The difference of the candidate's outputs from the baseline's: UNLIKE_DB for other names or shapes, for a NaN,
    for an infinity that only one of them has, and for integers that are not all equal. Infinities that both have are
    masks, as in validation, and left out of the sums."""
    if candidate.keys() != baseline.keys() or not baseline:
        return Difference(UNLIKE_DB, True)
    differences = [_difference(np.asarray(candidate[name]), np.asarray(baseline[name])) for name in baseline]
    return Difference(min(d.sqnr_db for d in differences), any(d.flipped for d in differences))


def _difference(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    if ours.shape != theirs.shape:
        return Difference(UNLIKE_DB, True)
    if theirs.dtype.kind in "biu" or ours.dtype.kind in "biu":
        is_equal = bool(np.array_equal(ours, theirs))
        return Difference(EQUAL_DB if is_equal else UNLIKE_DB, not is_equal)
    ours64, theirs64 = ours.astype(np.float64), theirs.astype(np.float64)
    masks = np.isinf(ours64) | np.isinf(theirs64)
    if np.isnan(ours64).any() or np.isnan(theirs64).any() or not np.array_equal(ours64[masks], theirs64[masks]):
        return Difference(UNLIKE_DB, True)
    is_flipped = bool(
        ours64.ndim and ours64.shape[-1] > 1 and ours64.size and (ours64.argmax(-1) != theirs64.argmax(-1)).any()
    )
    ours64[masks] = theirs64[masks] = 0.0
    signal, noise = float(np.sum(theirs64 * theirs64)), float(np.sum((ours64 - theirs64) ** 2))
    if noise == 0.0:
        return Difference(EQUAL_DB, is_flipped)
    sqnr_db = 10.0 * math.log10(signal / noise) if signal > 0.0 else UNLIKE_DB
    return Difference(max(UNLIKE_DB, min(EQUAL_DB, sqnr_db)), is_flipped)
