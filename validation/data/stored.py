"""Arrays stored in .npz, .npy and safetensors files, or in a folder of .npy files.

A folder holds `INPUT.npy` for each input, or a folder `INPUT/` for each, or, for a single input, only .npy files. A
file `INPUT.npy` is a whole array; any other file is one entry of axis 0, in the order of the file names. Arrays are
streamed: memory depends on the rows that are read, not on the size or number of files.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, StoredArray, check_complete, stored_arrays
from enginesmith.core import parsing
from enginesmith.core.codec import decode
from enginesmith.core.errors import DataError, IntegrityError
from enginesmith.core.text import join_first, pluralize

SAFETENSORS_DTYPES = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
LARGEST_HEADER = 100_000_000  # safetensors' own limit
# Suffixes of files of saved requests and of images, and the command that makes samples from such files.
REQUESTS = frozenset({".jsonl", ".ndjson", ".traffic", ".json", ".parquet", ".png", ".jpg", ".jpeg", ".bmp", ".webp"})
FROM_REQUESTS = "`enginesmith init MODEL --from-requests {}` makes calibration.npz and golden.npz of it"


@dataclass(frozen=True)
class FileSeries:
    """An array stored in several files, one entry of axis 0 in each; read in the same way as `StoredArray`."""

    path: Path
    files: tuple[StoredArray, ...]

    def __str__(self) -> str:
        return f"{self.path} ({pluralize(len(self.files), 'file')})"

    @property
    def dtype(self) -> np.dtype:
        """The files' dtype."""
        return self.files[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of files, followed by the files' shape."""
        return (len(self.files), *self.files[0].shape)

    def blocks(self, rows: Iterable[int], skip: int = 0) -> Iterator[Array]:
        """Consecutive blocks along axis 0, of the lengths `rows`, after the first `skip` entries.

        A file is opened only when its entry is read.
        """
        for count in rows:
            yield np.stack([file.whole() for file in self.files[skip : skip + count]])
            skip += count

    def read(self) -> Array:
        """The whole array, in memory."""
        return next(self.blocks([len(self.files)]))


Stored = StoredArray | FileSeries


def find_arrays(path: Path, inputs: Sequence[str], most_files: int | None = None) -> dict[str, Stored]:
    """The arrays at a path by name; the single array of an .npy file or of a folder is named ''.
    most_files: the most headers to read in a folder of samples; other files are assumed to be like the first. Raises
    DataError without arrays, and for anything but plain arrays.
    """
    if path.is_dir():
        # An input may be called 'encoder/x:0', whose file is in a subfolder; no name may lead out of the folder.
        if strays := [name for name in inputs if name.startswith("/") or ".." in name.split("/")]:
            raise DataError(
                f"{path}: input {strays[0]!r} cannot be the path of a file in a folder; store the inputs in one .npz"
            )
        nested_names = [name for name in inputs if "/" in name]
        if all((path / f"{name}.npy").is_file() for name in inputs):
            names = [file.stem for file in sorted(path.glob("*.npy"))] + nested_names
            return {name: stored_arrays(path / f"{name}.npy")[""] for name in names}
        if all((path / name).is_dir() for name in inputs):
            folders = {name.split("/")[0] for name in nested_names} - set(inputs)
            names = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name not in folders]
            return {name: _series(path / name, most_files) for name in names + nested_names}
        if len(inputs) > 1 or not any(path.glob("*.npy")):
            raise DataError(_describe_missing(path, inputs))
        return {"": _series(path, most_files)}
    if path.suffix == ".safetensors":
        return dict(_in_safetensors(path))
    if path.suffix.lower() in REQUESTS and path.is_file():
        raise DataError(f"{path} holds no stored arrays; {FROM_REQUESTS.format(path)}")
    return dict(stored_arrays(path))


def _describe_missing(path: Path, inputs: Sequence[str]) -> str:
    """A message: the files that a folder should have, and the remedy for the files that it has instead."""
    files_text = join_first([f"{name}.npy" for name in inputs])
    remedy = f"{path} must hold {files_text}, or a folder of .npy files for each of "
    remedy += join_first(inputs) if len(inputs) > 1 else f"{inputs[0]}, or just .npy files, one for each sample"
    file_names = sorted(file.name for file in path.iterdir())
    array_files = [name for name in file_names if name.endswith((".npz", ".safetensors"))]
    if array_files:
        return f"{remedy}; it holds {join_first(array_files)}: name that file, {path.name}/{array_files[0]}"
    if any(Path(name).suffix.lower() in REQUESTS for name in file_names):
        return f"{remedy}; it holds {join_first(file_names)}: {FROM_REQUESTS.format(path)}"
    return f"{remedy}; it holds {join_first(file_names) or 'nothing'}"


def _series(path: Path, most_files: int | None) -> FileSeries:
    paths = sorted(path.glob("*.npy"))
    files = tuple(stored_arrays(file)[""] for file in paths[:most_files])
    if not files:
        raise DataError(f"{path} holds no .npy files; save one sample in each")
    first_file = files[0]
    for index, file in enumerate(files):
        if file.shape != first_file.shape or file.dtype != first_file.dtype:
            raise DataError(
                f"{file} (sample {index}) has shape {file.shape} and dtype {file.dtype}; {first_file.path.name} has "
                f"{first_file.shape} and {first_file.dtype}: all samples must be alike"
            )
    return FileSeries(path, (*files, *(replace(first_file, path=file) for file in paths[len(files) :])))


@dataclass(frozen=True)
class _SafetensorsEntry:
    """An array's entry in a safetensors header. data_offsets: its begin and end in bytes, from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _in_safetensors(path: Path) -> dict[str, StoredArray]:
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            text = stream.read(size) if size <= LARGEST_HEADER else b""
        header = parsing.load_json(text)
        header.pop("__metadata__", None)
        arrays = {
            name: _tensor(path, name, decode(entry, _SafetensorsEntry), 8 + size) for name, entry in header.items()
        }
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a safetensors file") from None
    except (OSError, IntegrityError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as safetensors ({error!r}); write it again") from error
    max_offset = max((array.offset for array in arrays.values()), default=0)
    for array in arrays.values():
        if array.offset == max_offset:
            check_complete(array, path.stat().st_size)
    return arrays


def _tensor(path: Path, name: str, entry: "_SafetensorsEntry", start: int) -> StoredArray:
    if entry.dtype not in SAFETENSORS_DTYPES:
        raise DataError(f"{path}: array {name!r} is {entry.dtype}, which numpy lacks; convert it")
    begin, end = entry.data_offsets
    array = StoredArray(path, name, None, np.dtype(SAFETENSORS_DTYPES[entry.dtype]), entry.shape, start + begin)
    check_complete(array, start + end)
    return array
