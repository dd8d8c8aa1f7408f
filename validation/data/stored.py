"""Arrays in files, whatever the kind of file: .npz, .npy, safetensors, or a folder of .npy files.

A folder holds `INPUT.npy` for each input, or a folder `INPUT/` for each, or, for a single input, just .npy files. A
file of the first kind is a whole array; the others are one entry of axis 0 each, in the order of their names.
Everything is streamed: memory depends on what is asked for, never on the size of a file or their number.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from enginery.arrays import Array, StoredArray, check_complete, stored_arrays
from enginery.core.codec import decode
from enginery.core.errors import DataError, IntegrityError
from enginery.core.text import pluralize

SAFETENSORS_DTYPES = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
LARGEST_HEADER = 100_000_000  # safetensors' own limit


class Stored(Protocol):
    """An array that is somewhere in files, known by its shape and dtype."""

    @property
    def path(self) -> Path: ...  # noqa: D102

    @property
    def dtype(self) -> np.dtype: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    def blocks(self, rows: Iterable[int], skip: int = 0) -> Iterator[Array]:
        """Consecutive pieces along axis 0, of the given lengths, the first of them behind `skip` entries."""
        ...

    def read(self) -> Array:
        """The whole array, in memory."""
        ...


@dataclass(frozen=True)
class FileSeries:
    """One entry of axis 0 per file."""

    path: Path
    files: tuple[StoredArray, ...]

    def __str__(self) -> str:
        return f"{self.path} ({pluralize(len(self.files), 'file')})"

    @property
    def dtype(self) -> np.dtype:
        """That of the first file, which all share."""
        return self.files[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of files, and the shape that they share."""
        return (len(self.files), *self.files[0].shape)

    def blocks(self, rows: Iterable[int], skip: int = 0) -> Iterator[Array]:
        """Consecutive pieces along axis 0; a file is opened when its turn comes."""
        for count in rows:
            yield np.stack([_whole(file) for file in self.files[skip : skip + count]])
            skip += count

    def read(self) -> Array:
        """All of them, in memory."""
        return next(self.blocks([len(self.files)]))


def find_arrays(path: Path, inputs: Sequence[str]) -> dict[str, Stored]:
    """The arrays at a path by name; the only array of an .npy file or of a folder is named ''.

    Raises DataError when there is nothing, or anything but plain arrays.
    """
    if path.is_dir():
        return _in_folder(path, inputs)
    if path.suffix == ".safetensors":
        return dict(_in_safetensors(path))
    return dict(stored_arrays(path))


def _in_folder(path: Path, inputs: Sequence[str]) -> dict[str, Stored]:
    if all((path / f"{name}.npy").is_file() for name in inputs):
        return {file.stem: stored_arrays(file)[""] for file in sorted(path.glob("*.npy"))}
    if all((path / name).is_dir() for name in inputs):
        return {folder.name: _series(folder) for folder in sorted(path.iterdir()) if folder.is_dir()}
    if len(inputs) > 1:
        named = ", ".join(f"{name}.npy" for name in inputs)
        raise DataError(f"{path} must hold {named}, or a folder of .npy files for each of {', '.join(inputs)}")
    return {"": _series(path)}


def _series(path: Path) -> FileSeries:
    files = tuple(stored_arrays(file)[""] for file in sorted(path.glob("*.npy")))
    if not files:
        raise DataError(f"{path} holds no .npy files; save one sample in each")
    first = files[0]
    for index, file in enumerate(files):
        if file.shape != first.shape or file.dtype != first.dtype:
            raise DataError(
                f"{file} (sample {index}) has shape {file.shape} and dtype {file.dtype}; {first.path.name} has "
                f"{first.shape} and {first.dtype}: all samples must be alike"
            )
    return FileSeries(path, files)


def _whole(file: StoredArray) -> Array:
    """An entry, which may be a number without axes."""
    (entry,) = next(replace(file, shape=(1, *file.shape)).blocks([1]))
    return np.asarray(entry)


@dataclass(frozen=True)
class _SafetensorsEntry:
    """An array in a safetensors header. data_offsets: begin and end behind the header, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _in_safetensors(path: Path) -> dict[str, StoredArray]:
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            text = stream.read(size) if size <= LARGEST_HEADER else b""
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = {name: _tensor(path, name, decode(item, _SafetensorsEntry), 8 + size) for name, item in header.items()}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a safetensors file") from None
    except (OSError, IntegrityError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as safetensors ({error!r}); write it again") from error
    last = max((item.offset for item in found.values()), default=0)
    for item in found.values():
        if item.offset == last:
            check_complete(item, path.stat().st_size)
    return found


def _tensor(path: Path, name: str, item: "_SafetensorsEntry", start: int) -> StoredArray:
    if item.dtype not in SAFETENSORS_DTYPES:
        raise DataError(f"{path}: array {name!r} is {item.dtype}, which numpy lacks; convert it")
    begin, end = item.data_offsets
    array = StoredArray(path, name, None, np.dtype(SAFETENSORS_DTYPES[item.dtype]), item.shape, start + begin)
    check_complete(array, start + end)
    return array
