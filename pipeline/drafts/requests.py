"""Recorded requests as the data of a draft."""

import hashlib
import itertools
import json
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from enginesmith.arrays import Array, check_inputs, describe_nonfinite, dtype_of, stored_arrays
from enginesmith.core import parsing
from enginesmith.core.errors import DataError, EnginesmithError, InputError
from enginesmith.core.text import format_bytes, pluralize
from enginesmith.core.types import Dim, Scalar, Tensors, TensorSpec
from enginesmith.recording.json_lines import JsonLinesReader
from enginesmith.recording.traffic import MOST_LINE_BYTES, decode_input, read_traffic
from pipeline.drafts.facts import is_batch
from validation.data.batches import leading_dim
from validation.data.samples import Samples, resize
from validation.data.stored import Stored, find_arrays

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
LINES = frozenset({".jsonl", ".ndjson", ".traffic"})
_ARRAYS = frozenset({".npz", ".npy", ".safetensors"})
FILES = LINES | {".json", ".npz", ".safetensors"}
# A JSON list is read in one piece, and takes several times its size in memory.
MOST_JSON_BYTES = 1 << 29
Scaling = Literal["imagenet", "unit", "symmetric", "bytes"]
# Mean and standard deviation of ImageNet's channels, as torchvision's models expect them
# (https://docs.pytorch.org/vision/stable/models.html).
_MEAN, _STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def read_requests(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> Iterator[Tensors]:
    """The requests of a file or folder, one at a time.

    Formats: recorded traffic and other JSON lines, a JSON list of objects, .npz, .npy and safetensors as in calibration
    data, a folder of such files, and images for a model with one image input, which are scaled to the input's size (a
    dim to its opt). scaling: of pixels: 'unit' to 0..1, 'symmetric' to -1..1, 'imagenet' by that data set's mean and
    deviation; 'bytes' not at all, nor for inputs of integers.

    Raises DataError, InputError for a file of another kind.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; name a file or folder of requests")
    suffix = path.suffix.lower()
    if path.is_dir():
        if images := sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES):
            return _read_images(images, inputs, dims, scaling)
        if files := sorted(file for file in path.iterdir() if file.suffix.lower() in FILES):
            return itertools.chain.from_iterable(read_requests(file, inputs, dims, scaling) for file in files)
    elif suffix in IMAGES:
        return _read_images([path], inputs, dims, scaling)
    elif suffix in LINES:
        return _read_lines(path, inputs)
    elif suffix == ".json":
        return _read_json(path, inputs)
    elif suffix not in _ARRAYS:
        suffix_text = ", ".join(sorted(FILES | _ARRAYS))
        raise InputError(f"{path} has the ending {suffix or 'none'}; files of requests are {suffix_text}, or a folder")
    return (request for _, request in Samples.open(path, inputs, dims).runs())


def _read_lines(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    """The requests of recorded traffic, or of lines that contain only inputs."""
    first_record = next((record for _, record in JsonLinesReader(path, MOST_LINE_BYTES)), {})
    if not first_record or "inputs" in first_record or "kind" in first_record:
        yield from (request.inputs for request in read_traffic(path, inputs).requests)
        return
    for line_number, record in JsonLinesReader(path, MOST_LINE_BYTES):
        yield _as_arrays(record, inputs, f"{path}:{line_number}")


def _read_json(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    remedy = "put one object per line into a .jsonl file"
    if (size := path.stat().st_size) > MOST_JSON_BYTES:
        raise DataError(f"{path} has {format_bytes(size)}; at most {format_bytes(MOST_JSON_BYTES)} are read; {remedy}")
    try:
        document = parsing.load_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path} is not JSON ({error}); {remedy}") from error
    for index, request in enumerate(document if isinstance(document, list) else [document]):
        tensors = request.get("inputs", request) if isinstance(request, dict) else None
        if not isinstance(tensors, dict):
            raise DataError(f"{path}: entry {index} is not an object of inputs by name; give a list of such objects")
        yield _as_arrays(tensors, inputs, f"{path}: entry {index}")


def _as_arrays(values: Mapping[str, object], inputs: Sequence[TensorSpec], place: str) -> Tensors:
    """Numbers as arrays of the inputs' types; a sample without the leading axis gets it."""
    arrays = {}
    for spec in inputs:
        if spec.name not in values:
            raise DataError(f"{place} has no input {spec.name!r}; it has {', '.join(map(repr, values)) or 'none'}")
        try:
            array = decode_input(spec.name, values[spec.name], spec)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{place}: {error}") from error
        arrays[spec.name] = array[None] if array.ndim == len(spec.shape) - 1 else array
    return arrays


def _read_images(
    files: Iterable[Path], inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling
) -> Iterator[Tensors]:
    """Images as one input: scaled until the shorter side fits, center-cropped, in RGB or grey."""
    from PIL import Image, ImageOps

    if len(inputs) != 1 or len(inputs[0].shape) not in (3, 4):
        input_texts = ", ".join(f"{spec.name} with {len(spec.shape)} axes" for spec in inputs)
        raise DataError(f"a folder of images needs a model with one input of 3 or 4 axes; this one has {input_texts}")
    spec = inputs[0]
    shape = spec.at({dim.name: dim.opt for dim in dims})[-3:]
    channels_last = shape[-1] in (1, 3) and shape[0] not in (1, 3)
    height, width = shape[:2] if channels_last else shape[1:]
    channels = shape[-1] if channels_last else shape[0]
    scaling = scaling if np.dtype(spec.dtype).kind == "f" else "bytes"
    image_errors = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
    for file in files:
        try:
            with Image.open(file) as source_image:
                image = source_image.convert("L" if channels == 1 else "RGB")
        except image_errors as error:
            raise DataError(f"{file} is not an image that can be read ({error}); remove or repair it") from error
        pixels = np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR))
        pixels = _scale(pixels[..., None] if pixels.ndim == 2 else pixels, scaling)
        array = (pixels if channels_last else pixels.transpose(2, 0, 1)).astype(spec.dtype)
        yield {spec.name: np.ascontiguousarray(array[None] if len(spec.shape) == 4 else array)}


def _scale(pixels: Array, scaling: Scaling) -> Array:
    unit = pixels / 255.0
    if scaling == "imagenet" and pixels.shape[-1] == 3:
        return np.asarray((unit - _MEAN) / _STD)
    return {"unit": unit, "imagenet": unit, "symmetric": unit * 2 - 1, "bytes": pixels}[scaling]


# The greatest number of requests whose sizes are read.
_MOST = 4096


@dataclass(frozen=True)
class RequestInput:
    """One input in all requests. dtype: '' for plain numbers of JSON.  kind: numpy's letter for the type.

    sizes: the least and the greatest of each axis.  stacked: whether axis 0 counts requests or samples, as in arrays of
    a file; else the axes are those of a request, or of a sample without its leading axis.
    """

    dtype: str
    kind: str
    sizes: tuple[tuple[int, int], ...]
    stacked: bool

    def as_read(self, complete: bool) -> tuple[tuple[int, int], ...]:
        """The sizes of an input of the model. complete: of stacked arrays, whether an entry of axis 0 is a complete
        input and not a sample; of JSON, whether the leading axis is missing."""
        if self.stacked:
            return self.sizes[1:] if complete else ((1, 1), *self.sizes[1:])
        return ((1, 1), *self.sizes) if complete else self.sizes


def observe_requests(path: Path) -> dict[str, RequestInput]:
    """The inputs in a file or folder of requests, by name; the single array of an .npy file is named ''. Empty for
    requests without this information, such as images, and if names or numbers of axes differ."""
    request_inputs: dict[str, RequestInput] = {}
    for request in itertools.islice(_observe(path), _MOST):
        if request_inputs and request_inputs.keys() != request.keys():
            return {}
        for name, request_input in request.items():
            known_input = request_inputs.get(name, request_input)
            if len(known_input.sizes) != len(request_input.sizes):
                return {}
            pairs = zip(known_input.sizes, request_input.sizes, strict=True)
            sizes = tuple((min(span[0], new_span[0]), max(span[1], new_span[1])) for span, new_span in pairs)
            request_inputs[name] = RequestInput(request_input.dtype, request_input.kind, sizes, request_input.stacked)
    return request_inputs


def _observe(path: Path) -> Iterator[dict[str, RequestInput]]:
    """The inputs of each request, or of each file of stacked requests. Ends at an unreadable file; reading all requests
    reports its error."""
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            for file in sorted(file for file in path.iterdir() if file.suffix.lower() in FILES):
                yield from _observe(file)
        elif suffix in (".npz", ".npy", ".safetensors"):
            arrays = stored_arrays(path) if suffix != ".safetensors" else find_arrays(path, [])
            yield {name: _observe_array(array, array.dtype.name, True) for name, array in arrays.items() if array.shape}
        elif suffix in LINES:
            for _, record in JsonLinesReader(path, MOST_LINE_BYTES):
                if "kind" not in record:
                    yield _observe_json(record)
        elif suffix == ".json" and path.stat().st_size <= MOST_JSON_BYTES:
            document = json.loads(path.read_text(encoding="utf-8"))
            yield from (_observe_json(request) for request in (document if isinstance(document, list) else [document]))
    except (EnginesmithError, ValueError, TypeError, AttributeError, OSError, RecursionError):
        return


def _observe_json(record: Mapping[str, object]) -> dict[str, RequestInput]:
    tensors = record.get("inputs", record)
    if not isinstance(tensors, Mapping):
        raise DataError("no inputs by name")
    request_inputs = {}
    for name, value in tensors.items():
        has_dtype = isinstance(value, dict)
        array: Array = decode_input(name, value, None) if has_dtype else np.asarray(value)
        request_inputs[name] = _observe_array(array, array.dtype.name if has_dtype else "", False)
    return request_inputs


def _observe_array(array: Array | Stored, dtype: str, stacked: bool) -> RequestInput:
    return RequestInput(dtype, array.dtype.kind, tuple((size, size) for size in array.shape), stacked)


@dataclass(frozen=True)
class Reading:
    """A possible reading of the requests: inputs of a model, and the least and greatest size of each axis."""

    inputs: tuple[TensorSpec, ...]
    sizes: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest size of each dim."""
        size_ranges: dict[str, tuple[int, int]] = {}
        for spec, sizes in zip(self.inputs, self.sizes, strict=True):
            size_ranges |= {dim: pair for dim, pair in zip(spec.shape, sizes, strict=True) if isinstance(dim, str)}
        return size_ranges


def list_readings(
    guesses: Sequence[TensorSpec], requests: Mapping[str, RequestInput], any_rank: bool
) -> Iterator[Reading]:
    """The possible readings of the requests, the likeliest first: axis 0 of arrays counts samples, or complete inputs;
    JSON has complete inputs, or samples. An axis that varies has a name: that of a guess with as many axes, if any.
    Any other axis except 0 has its size.

    guesses: the model's inputs; without dtype and axes if unknown.  any_rank: whether the model also takes other
    numbers of axes, as a model that begins with a linear layer does.
    """
    if [*requests] == [""] and len(guesses) == 1:
        requests = {guesses[0].name: requests[""]}
    if {spec.name for spec in guesses} != requests.keys():
        return
    readings = [_read(guesses, requests, is_complete) for is_complete in (False, True)]
    same_ranks = [
        all(len(a.shape) == len(b.shape) for a, b in zip(reading.inputs, guesses, strict=True)) for reading in readings
    ]
    is_stacked = all(
        request_input.stacked and request_input.sizes[1:2] == ((1, 1),) for request_input in requests.values()
    )
    if same_ranks[1] and not same_ranks[0] and (is_stacked or not any_rank):
        readings.reverse()
    yield from readings


def _read(guesses: Sequence[TensorSpec], requests: Mapping[str, RequestInput], complete: bool) -> Reading:
    sizes = tuple(requests[spec.name].as_read(complete) for spec in guesses)
    first_axis = "batch" if len({spans[:1] for spans in sizes}) == 1 else "?"
    pairs = zip(guesses, sizes, strict=True)
    return Reading(tuple(_read_input(spec, spans, requests[spec.name], first_axis) for spec, spans in pairs), sizes)


def _read_input(
    guess: TensorSpec, sizes: Sequence[tuple[int, int]], request_input: RequestInput, first_axis: str
) -> TensorSpec:
    same_rank = len(guess.shape) == len(sizes)
    shape: list[int | str] = []
    for axis, (low, high) in enumerate(sizes):
        guessed_dim = guess.shape[axis] if same_rank else None
        own_dim = low if low == high and axis else first_axis if axis == 0 else "?"
        shape.append(guessed_dim if isinstance(guessed_dim, str) else own_dim)
    usual_dtype = "float32" if request_input.kind == "f" else "int64" if request_input.kind in "iu" else "bool"
    same_kind = guess.dtype and dtype_of(guess.dtype).kind == request_input.kind
    return TensorSpec(guess.name, request_input.dtype or (guess.dtype if same_kind else usual_dtype), tuple(shape))


# The most golden samples: enough to show a decision that changes in 1 of 20. The most calibration samples: ranges
# change little beyond some hundreds. The share of golden samples.
MOST_GOLDEN, MOST_CALIBRATION, SHARE = 64, 512, 0.2
# Fewer requests of equal sizes are too little data for a golden set.
FEWEST_EQUAL = 10
# More requests are not read: some hundreds suffice, and a small archive can contain any number of zeros.
MOST_READ = 100_000
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class SplitRequests:
    """Requests for calibration and for golden data; none is in both. left_out: notes on omitted and changed requests.

    sizes: named dim -> its size in all chosen requests.  ranges: named dim -> least and greatest size in all requests.
    scalars: input without axes, not a float -> its value, if that is the same in all requests."""

    calibration: tuple[Tensors, ...]
    golden: tuple[Tensors, ...]
    left_out: tuple[str, ...]
    sizes: Mapping[str, int]
    ranges: Mapping[str, tuple[int, int]]
    scalars: Mapping[str, Scalar]


def split_requests(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> SplitRequests:
    """Read requests and split them: a fifth, at most `MOST_GOLDEN`, for golden data, the rest for calibration.

    The split depends only on the contents of requests, not on their order or on repeated requests (one is used).
    A request for a batch counts as one for each sample. The chosen requests have the most frequent sizes. If fewer than
    `FEWEST_EQUAL` requests have them, the others are cut or repeated to them. scaling: of images, see `read_requests`.

    Raises DataError for requests that cannot be read or do not fit the inputs, for NaN and infinities, and for fewer
    than two different requests.
    """
    samples = read_samples(path, inputs, dims, scaling)
    groups, counts, scalars, count = _group(itertools.islice(samples, MOST_READ))
    if not count:
        raise DataError(f"{path} holds no requests; give at least two")
    by_size = sorted(counts, key=lambda shapes: (sum(math.prod(shape) for _, shape in shapes), shapes))
    usual_shapes = max(by_size[len(by_size) // 2], *by_size, key=lambda shapes: counts[shapes])
    all_sizes = [check_inputs(inputs, next(iter(group.values()))) for group in groups.values()]
    sizes = check_inputs(inputs, next(iter(groups[usual_shapes].values())))
    fitted_count, usual_count = 0, counts[usual_shapes]
    if usual_count < FEWEST_EQUAL:
        for request in itertools.chain(*(groups[shapes].values() for shapes in by_size if shapes != usual_shapes)):
            fitted_request = resize(request, inputs, sizes)
            groups[usual_shapes][_digest(fitted_request)] = fitted_request
            fitted_count += 1
        usual_count = len(groups[usual_shapes])
    if usual_count < 2:
        request_text = f"{pluralize(count, 'request')}, {usual_count} of equal sizes that differ"
        raise DataError(f"{path} holds {request_text}; at least two are needed: give a list or a folder of them")
    usual_requests = [request for _, request in sorted(groups[usual_shapes].items(), key=lambda pair: pair[0])]
    golden_count = max(1, min(MOST_GOLDEN, int(usual_count * SHARE)))
    calibration = usual_requests[golden_count : golden_count + MOST_CALIBRATION]
    usual_text = ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in usual_shapes)
    drop_counts = {
        "equal to others": count - counts.total(),
        "equal to others once they are cut or repeated": counts[usual_shapes] + fitted_count - usual_count,
        f"of other sizes than {usual_text}": counts.total() - counts[usual_shapes] - fitted_count,
        f"beyond {MOST_CALIBRATION} for calibration": usual_count - golden_count - len(calibration),
    }
    notes = [f"{pluralize(number, 'request')} left out: {reason}" for reason, number in drop_counts.items() if number]
    if fitted_count:
        notes.append(f"{pluralize(fitted_count, 'request')} cut or repeated to {usual_text}: few have equal sizes")
    if count == MOST_READ and next(samples, None) is not None:
        notes.append(f"only the first {MOST_READ} requests were read")
    ends = {name: [dim_sizes[name] for dim_sizes in all_sizes] for name in all_sizes[0]}
    ranges = {name: (min(dim_ends), max(dim_ends)) for name, dim_ends in ends.items()}
    golden = tuple(usual_requests[:golden_count])
    return SplitRequests(tuple(calibration), golden, tuple(notes), sizes, ranges, scalars)


def _group(
    requests: Iterable[Tensors],
) -> tuple[dict[_Shapes, dict[str, Tensors]], Counter[_Shapes], dict[str, Scalar], int]:
    """Different requests by shapes and digest, of many only those that may be chosen; the number of different requests
    by shapes; the scalars that all requests share; and the number of requests."""
    groups: dict[_Shapes, dict[str, Tensors]] = {}
    scalars = dict[str, Scalar]()
    request_digests, counts, count = set[str](), Counter[_Shapes](), 0
    for count, request in enumerate(requests, 1):
        digest = _digest(request)
        values = {name: array.item() for name, array in request.items() if not array.ndim and array.dtype.kind != "f"}
        scalars = values if count == 1 else {name: scalars[name] for name in scalars if scalars[name] == values[name]}
        if digest not in request_digests:
            request_digests.add(digest)
            shapes = tuple((name, array.shape) for name, array in sorted(request.items()))
            counts[shapes] += 1
            _keep(groups.setdefault(shapes, {}), digest, request)
    return groups, counts, scalars, count


def _keep(some: dict[str, Tensors], digest: str, request: Tensors) -> None:
    """Add a request in place; from time to time, drop requests whose digests are too great to be chosen."""
    some[digest] = request
    if len(some) > 2 * (MOST_GOLDEN + MOST_CALIBRATION):
        for extra_digest in sorted(some)[MOST_GOLDEN + MOST_CALIBRATION :]:
            del some[extra_digest]


def read_samples(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> Iterator[Tensors]:
    """The checked requests; a batch becomes one request per sample. Raises DataError with the request's number."""
    batch_dim = leading_dim(inputs)
    single_dims = {dim.name for dim in dims if dim.min == dim.multiple == 1 and is_batch(dim.name)}
    single_dims -= {size for spec in inputs for size in spec.shape[1:] if isinstance(size, str)}
    for request_number, request in enumerate(read_requests(path, inputs, dims, scaling)):
        location = f"{path}: request {request_number}"
        try:
            sizes = check_inputs(inputs, request)
        except DataError as error:
            raise DataError(f"{location}: {error}") from error
        for name, array in request.items():
            if array.dtype.kind == "f" and (nonfinite_text := describe_nonfinite(array)):
                raise DataError(f"{location}: input {name!r} holds {nonfinite_text}; remove or repair that request")
        if batch_dim not in single_dims:
            yield request
            continue
        for row in range(sizes[batch_dim]):
            yield {name: array[row : row + 1] for name, array in request.items()}


def write_samples(file: Path | IO[bytes], requests: Sequence[Tensors]) -> None:
    """Write requests of equal sizes as an .npz that a spec can name: one complete input per entry of axis 0."""
    arrays: dict[str, Any] = {name: np.stack([request[name] for request in requests]) for name in requests[0]}
    np.savez_compressed(file, **arrays)


def _digest(request: Tensors) -> str:
    hasher = hashlib.sha256()
    for name in sorted(request):
        hasher.update(f"{name} {request[name].dtype} {request[name].shape}".encode())
        hasher.update(np.ascontiguousarray(request[name]).tobytes())
    return hasher.hexdigest()
