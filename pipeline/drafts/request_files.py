"""Saved requests, one at a time: recorded traffic, JSON, arrays, Parquet, images, and folders of these."""

import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core import parsing
from enginesmith.core.errors import DataError, InputError
from enginesmith.core.text import format_bytes
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.recording.json_lines import JsonLinesReader
from enginesmith.recording.traffic import MOST_LINE_BYTES, decode_input, read_traffic
from validation.data.samples import Samples

if TYPE_CHECKING:
    from PIL import Image

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
LINES = frozenset({".jsonl", ".ndjson", ".traffic"})
_ARRAYS = frozenset({".npz", ".npy", ".safetensors"})
FILES = LINES | {".json", ".parquet", ".npz", ".safetensors"}
# A JSON list is read in one piece, and takes several times its size in memory.
MOST_JSON_BYTES = 1 << 29
Scaling = Literal["imagenet", "unit", "symmetric", "bytes"]
# Mean and standard deviation of ImageNet's channels, as torchvision's models take them
# (https://docs.pytorch.org/vision/stable/models.html).
_MEAN, _STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def read_requests(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> Iterator[Tensors]:
    """The requests of a file or folder, one at a time.

    Known are recorded traffic and other JSON lines, a JSON list of objects, .npz, .npy and safetensors as calibration
    data has them, Parquet with a column for each input, a folder of such files, and a folder of images for a model with
    one image input, which are scaled to the input's size, of a dim to its opt. scaling: of pixels: 'unit' to 0..1,
    'symmetric' to -1..1, 'imagenet' by that data set's mean and deviation, 'bytes' and inputs of integers not at all.
    Raises DataError, InputError for a file of another kind.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; name a file or folder of requests")
    kind = path.suffix.lower()
    if path.is_dir():
        if images := sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES):
            return _read_images(images, inputs, dims, scaling)
        if files := sorted(file for file in path.iterdir() if file.suffix.lower() in FILES):
            return itertools.chain.from_iterable(read_requests(file, inputs, dims, scaling) for file in files)
    elif kind in IMAGES:
        return _read_images([path], inputs, dims, scaling)
    elif kind in LINES:
        return _read_lines(path, inputs)
    elif kind == ".json":
        return _read_json(path, inputs)
    elif kind == ".parquet":
        return _read_parquet(path, inputs)
    elif kind not in _ARRAYS:
        known = ", ".join(sorted(FILES | _ARRAYS))
        raise InputError(f"{path} has the ending {kind or 'none'}; files of requests are {known}, or a folder")
    return (request for _, request in Samples.open(path, inputs, dims).runs())


def _read_lines(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    """Recorded traffic, or lines that are the inputs themselves."""
    first = next((record for _, record in JsonLinesReader(path, MOST_LINE_BYTES)), {})
    if not first or "inputs" in first or "kind" in first:
        yield from (request.inputs for request in read_traffic(path, inputs).requests)
        return
    for number, record in JsonLinesReader(path, MOST_LINE_BYTES):
        yield _as_arrays(record, inputs, f"{path}:{number}")


def _read_json(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    remedy = "one object a line belongs into a .jsonl file"
    if (size := path.stat().st_size) > MOST_JSON_BYTES:
        raise DataError(f"{path} has {format_bytes(size)}, and is read in one piece; {remedy}")
    try:
        found = parsing.load_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path} is no JSON ({error}); {remedy}") from error
    for number, item in enumerate(found if isinstance(found, list) else [found]):
        given = item.get("inputs", item) if isinstance(item, dict) else None
        if not isinstance(given, dict):
            raise DataError(f"{path}: entry {number} is no object of inputs by name; give a list of such objects")
        yield _as_arrays(given, inputs, f"{path}: entry {number}")


def _read_parquet(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError(f"reading {path.name} needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        for batch in table.iter_batches(64):
            for row in batch.to_pylist():
                yield _as_arrays(row, inputs, str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}); write it again") from error


def _as_arrays(given: Mapping[str, object], inputs: Sequence[TensorSpec], where: str) -> Tensors:
    """Numbers as arrays of the inputs' types; a sample without the leading axis gets it."""
    arrays = {}
    for spec in inputs:
        if spec.name not in given:
            raise DataError(f"{where} has no input {spec.name!r}; it has {', '.join(map(repr, given)) or 'none'}")
        try:
            array = decode_input(spec.name, given[spec.name], spec)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{where}: {error}") from error
        arrays[spec.name] = array[None] if array.ndim == len(spec.shape) - 1 else array
    return arrays


def _read_images(
    files: Iterable[Path], inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling
) -> Iterator[Tensors]:
    """Images as one input: the shorter side scaled to the input's size, the middle cut out, RGB or grey."""
    from PIL import Image

    if len(inputs) != 1 or len(inputs[0].shape) not in (3, 4):
        raise DataError(f"a folder of images suits a model with one input of an image; this has {len(inputs)} inputs")
    spec = inputs[0]
    shape = spec.at({dim.name: dim.opt for dim in dims})[-3:]
    channels_last = shape[-1] in (1, 3) and shape[0] not in (1, 3)
    height, width = shape[:2] if channels_last else shape[1:]
    channels = shape[-1] if channels_last else shape[0]
    scaling = scaling if np.dtype(spec.dtype).kind == "f" else "bytes"
    unreadable = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
    for file in files:
        try:
            with Image.open(file) as opened:
                image = opened.convert("L" if channels == 1 else "RGB")
        except unreadable as error:
            raise DataError(f"{file} is no image that can be read ({error}); remove or repair it") from error
        pixels = np.asarray(_crop(image, height, width))
        pixels = _scale(pixels[..., None] if pixels.ndim == 2 else pixels, scaling)
        array = (pixels if channels_last else pixels.transpose(2, 0, 1)).astype(spec.dtype)
        yield {spec.name: np.ascontiguousarray(array[None] if len(spec.shape) == 4 else array)}


def _crop(image: "Image.Image", height: int, width: int) -> "Image.Image":
    """The middle of an image at a size."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


def _scale(pixels: Array, scaling: Scaling) -> Array:
    unit = pixels / 255.0
    if scaling == "imagenet" and pixels.shape[-1] == 3:
        return np.asarray((unit - _MEAN) / _STD)
    return {"unit": unit, "imagenet": unit, "symmetric": unit * 2 - 1, "bytes": pixels}[scaling]
