"""Calibration and golden data out of requests that were saved: recorded traffic, arrays, JSON, Parquet, images."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from enginery.arrays import Array, check_inputs
from enginery.core.errors import DataError, InputError
from enginery.core.text import pluralize
from enginery.core.types import Dim, Tensors, TensorSpec
from enginery.recording.traffic import read_traffic
from validation.data.samples import Samples

if TYPE_CHECKING:
    from PIL import Image

# How many of them become golden data: enough that a decision that changes in 1 of 20 shows; and calibration data:
# ranges change little beyond some hundreds of samples (docs/concepts/calibration.md).
MOST_GOLDEN, MOST_CALIBRATION, SHARE = 64, 512, 0.2
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
Scaling = Literal["imagenet", "unit", "symmetric", "bytes"]
# Mean and standard deviation of ImageNet's channels, as torchvision's models take them
# (https://docs.pytorch.org/vision/stable/models.html).
_MEAN, _STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@dataclass(frozen=True)
class SplitRequests:
    """Requests for calibration and for golden data; none is in both. left_out: why some are in neither, for people."""

    calibration: tuple[Tensors, ...]
    golden: tuple[Tensors, ...]
    left_out: tuple[str, ...]


def split_requests(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> SplitRequests:
    """Read requests and part them: a fifth, and `MOST_GOLDEN` at most, for golden data, the rest for calibration.

    Which request goes where follows from its content, so that equal requests, of which one is kept, and the order of
    the file change nothing. All that are kept have the sizes that most have. scaling: of images, see `read_requests`.
    Raises DataError for what cannot be read or does not fit the inputs, and for fewer than two different requests.
    """
    found: dict[str, Tensors] = {}
    count = 0
    for request in read_requests(path, inputs, dims, scaling):
        check_inputs(inputs, request)
        found.setdefault(_digest(request), request)
        count += 1
    sizes = Counter(_shapes(request) for request in found.values())
    if not sizes:
        raise DataError(f"{path} holds no requests; give at least two")
    usual, most = sizes.most_common(1)[0]
    kept = [found[digest] for digest in sorted(found) if _shapes(found[digest]) == usual]
    if len(kept) < 2:
        raise DataError(f"{path} holds {count} requests, {len(kept)} of equal sizes that differ; two are the least")
    golden = max(1, min(MOST_GOLDEN, int(len(kept) * SHARE)))
    rest = kept[golden : golden + MOST_CALIBRATION]
    left = [
        (count - len(found), "equal to others"),
        (len(found) - most, f"of other sizes than {_format(usual)}"),
        (len(kept) - golden - len(rest), f"beyond {MOST_CALIBRATION} for calibration"),
    ]
    notes = tuple(f"{pluralize(number, 'request')} left out: {why}" for number, why in left if number)
    return SplitRequests(tuple(rest), tuple(kept[:golden]), notes)


def write_samples(path: Path, requests: Sequence[Tensors]) -> None:
    """Write requests of equal sizes as an .npz that a spec can name: one complete input per entry of axis 0."""
    arrays: dict[str, Any] = {name: np.stack([request[name] for request in requests]) for name in requests[0]}
    np.savez_compressed(path, **arrays)


def read_requests(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> Iterator[Tensors]:
    """The requests of a file or folder, one at a time.

    Known are recorded traffic and other JSON lines, a JSON list of objects, .npz, .npy and safetensors as calibration
    data has them, Parquet with a column for each input, and a folder of images for a model with one image input.
    scaling: of pixels: 'unit' to 0..1, 'symmetric' to -1..1, 'imagenet' by that data set's mean and deviation, 'bytes'
    not at all. Raises DataError.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; name a file or folder of requests")
    if path.is_dir() and (images := sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)):
        return _read_images(images, inputs, scaling)
    match path.suffix.lower():
        case ".jsonl" | ".ndjson" | ".traffic":
            return (request.inputs for request in read_traffic(path, inputs).requests)
        case ".json":
            return _read_json(path, inputs)
        case ".parquet":
            return _read_parquet(path, inputs)
    return (request for _, request in Samples.open(path, inputs, dims).runs())


def _read_json(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path} is no JSON ({error}); one object a line belongs into a .jsonl file") from error
    for number, item in enumerate(found if isinstance(found, list) else [found]):
        given = item.get("inputs", item) if isinstance(item, dict) else None
        if not isinstance(given, dict):
            raise DataError(f"{path}: entry {number} is no object of inputs by name")
        yield _as_arrays(given, inputs, f"{path}: entry {number}")


def _read_parquet(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError(f"reading {path.name} needs pyarrow: pip install pyarrow") from error
    table = pyarrow.parquet.ParquetFile(path)
    for batch in table.iter_batches(64):
        for row in batch.to_pylist():
            yield _as_arrays(row, inputs, str(path))


def _as_arrays(given: Mapping[str, object], inputs: Sequence[TensorSpec], where: str) -> Tensors:
    """Numbers as arrays of the inputs' types; a sample without the leading axis gets it."""
    arrays = {}
    for spec in inputs:
        if spec.name not in given:
            raise DataError(f"{where} has no input {spec.name!r}; it has {', '.join(map(repr, given)) or 'none'}")
        try:
            array = np.asarray(given[spec.name]).astype(spec.dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{where}: input {spec.name!r} is no array of {spec.dtype}: {error}") from error
        arrays[spec.name] = array[None] if array.ndim == len(spec.shape) - 1 else array
    return arrays


def _read_images(files: Iterable[Path], inputs: Sequence[TensorSpec], scaling: Scaling) -> Iterator[Tensors]:
    """Images as one input: the shorter side scaled to the input's size, the middle cut out, RGB or grey."""
    from PIL import Image, UnidentifiedImageError

    if len(inputs) != 1 or len(inputs[0].shape) not in (3, 4):
        raise DataError(f"a folder of images suits a model with one input of an image; this has {len(inputs)} inputs")
    spec = inputs[0]
    shape = spec.shape[-3:]
    channels_last = shape[-1] in (1, 3) and shape[0] not in (1, 3)
    height, width = (size if isinstance(size, int) else 0 for size in (shape[:2] if channels_last else shape[1:]))
    channels = shape[-1] if channels_last else shape[0]
    for file in files:
        try:
            with Image.open(file) as opened:
                image = opened.convert("L" if channels == 1 else "RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"{file} is no image that can be read ({error}); remove or repair it") from error
        pixels = np.asarray(_crop(image, height, width))
        pixels = _scale(pixels[..., None] if pixels.ndim == 2 else pixels, scaling)
        array = (pixels if channels_last else pixels.transpose(2, 0, 1)).astype(spec.dtype)
        yield {spec.name: np.ascontiguousarray(array[None] if len(spec.shape) == 4 else array)}


def _crop(image: "Image.Image", height: int, width: int) -> "Image.Image":
    """The middle of an image at a size; 0 keeps the image's own."""
    from PIL import Image, ImageOps

    own = image.width, image.height
    return ImageOps.fit(image, (width or own[0], height or own[1]), Image.Resampling.BILINEAR)


def _scale(pixels: Array, scaling: Scaling) -> Array:
    unit = pixels / 255.0
    if scaling == "imagenet" and pixels.shape[-1] == 3:
        return np.asarray((unit - _MEAN) / _STD)
    return {"unit": unit, "imagenet": unit, "symmetric": unit * 2 - 1, "bytes": pixels}[scaling]


def _digest(request: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(request):
        digest.update(f"{name} {request[name].dtype} {request[name].shape}".encode())
        digest.update(np.ascontiguousarray(request[name]).tobytes())
    return digest.hexdigest()


def _shapes(request: Tensors) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, array.shape) for name, array in sorted(request.items()))


def _format(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes)
