"""External data of an ONNX model: bytes of its tensors in other files, which must lie in the model's folder."""

from pathlib import Path

import onnx

from enginery.core.errors import ModelError
from pipeline.sources.walk import all_tensors

LARGEST_BYTES = (1 << 31) - 1


def inside(path: Path, folder: Path, what: str) -> Path:
    """Return `path` if it is a file in `folder`, links followed. Raises ModelError."""
    try:
        within, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, links in a circle
        raise ModelError(f"{str(path)[:300]!r} cannot be the path of a file ({error}); correct it") from error
    if not within:
        raise ModelError(f"{path} leads outside {what} {folder}; put the file itself inside")
    if not there:
        raise ModelError(f"{path} does not exist or is not a file; correct the path or restore the file")
    return path


def checked_files(model: onnx.ModelProto, path: Path) -> set[Path]:
    """The external files of a model, each checked to be where it may be, long enough, and not too much; none is read.

    Raises ModelError."""
    found, embedded = set(), 0
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            file, offset, length = _place(tensor, path.parent)
            what = f"the folder of {path.name}, which its external data must stay in:"
            size = inside(file, path.parent, what).stat().st_size
            if offset + length > size:
                raise ModelError(
                    f"{path}: tensor {tensor.name[:80]!r} ends at byte {offset + length} of {file.name}, which has "
                    f"{size}; the file is truncated or belongs to another model: copy both again"
                )
            found.add(file)
            embedded += length
    # Many tensors may name the same bytes: what counts is what the model will hold.
    if max(path.stat().st_size + embedded, sum(file.stat().st_size for file in {path, *found})) > LARGEST_BYTES:
        raise ModelError(
            f"{path}: the model and its external data are over 2 GB; models that large cannot be built yet"
        )
    return found


def embed(model: onnx.ModelProto, path: Path) -> None:
    """Read external data that `checked_files` found sound into the model."""
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            file, offset, length = _place(tensor, path.parent)
            with file.open("rb") as stream:
                stream.seek(offset)
                tensor.raw_data = stream.read(length)
            tensor.ClearField("data_location")
            del tensor.external_data[:]


def _place(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int]:
    """File, offset and length in bytes of an external tensor."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = _number(entries, "offset"), _number(entries, "length") or _bytes_of(tensor)
        return folder / entries.get("location", ""), offset, length
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"tensor {tensor.name[:80]!r} has a broken external data entry: {str(error)[:200]}; export it again"
        ) from error


def _number(entries: dict[str, str], key: str) -> int:
    """A number of bytes; 0 where none is given. Raises ValueError."""
    found = int(entries.get(key, 0))
    if not 0 <= found < 1 << 63:
        raise ValueError(f"{key} is {entries[key][:80]}, and no number of bytes")
    return found


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """The size that its dims ask for. Raises ValueError for one that no tensor has, KeyError for an unknown type."""
    count = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    for size in tensor.dims:
        count *= size
        if not 0 <= count < 1 << 63:
            raise ValueError(f"its dims are {str(list(tensor.dims[:8]))[:200]}")
    return count
