"""Arrays in .npz and .npy files, read as streams: memory depends on what is asked for, never on the file.

The file is found out by its first bytes, not by its name. Nothing is ever unpickled, and every array's header must
account for exactly the bytes that the file holds for it, so a truncated or padded file is refused before any work.
"""

import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from enginery.core.errors import DataError

Array = np.ndarray[Any, Any]

# numpy reads an array's header as Python literals, so a damaged one fails in the ways of Python's own reader.
_NO_HEADER = (SyntaxError, TypeError, MemoryError, tokenize.TokenError)
_UNREADABLE = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
    *_NO_HEADER,
)  # fmt: skip


@dataclass(frozen=True)
class StoredArray:
    """One array of a file, known by its header: `shape` and `dtype` as stored, `offset` of its bytes in the stream."""

    path: Path
    name: str
    member: str | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return _where(self.path, self.name)

    def blocks(self, rows: Iterable[int], skip: int = 0) -> Iterator[Array]:
        """Consecutive pieces along axis 0, of the given lengths, in native byte order; `skip` entries come before them.

        Raises DataError when the bytes cannot be read or fail their checksum.
        """
        with ExitStack() as stack:
            with _translated(self.path, self.name):
                stream = stack.enter_context(_opened(self.path, self.member))
                stream.seek(self.offset + skip * math.prod(self.shape[1:]) * self.dtype.itemsize)
            for count in rows:
                with _translated(self.path, self.name):
                    block = self._read(stream, count)
                yield block

    def read(self) -> Array:
        """The whole array, in memory."""
        if self.shape:
            return next(self.blocks([self.shape[0]]))
        raise DataError(f"{self} has no axes; store one entry per sample along axis 0")

    def whole(self) -> Array:
        """As `read`, also of an array without axes."""
        with _translated(self.path, self.name), _opened(self.path, self.member) as stream:
            stream.seek(self.offset)
            return self._shaped(stream, self.shape)

    def _read(self, stream: IO[bytes], count: int) -> Array:
        return self._shaped(stream, (count, *self.shape[1:]))

    def _shaped(self, stream: IO[bytes], shape: tuple[int, ...]) -> Array:
        data = stream.read(math.prod(shape) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(shape).astype(self.dtype.newbyteorder("="))


def stored_arrays(path: Path) -> dict[str, StoredArray]:
    """The arrays of a file by name; an .npy file's single array is named ''.

    Raises DataError when the file is missing, corrupt, of another kind, or holds anything but plain arrays.
    """
    with _translated(path, ""):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                infos = archive.infolist()
            arrays = [_header(path, info.filename, info.file_size) for info in infos]
        else:
            arrays = [_header(path, None, path.stat().st_size)]
    return {array.name: array for array in arrays}


def _header(path: Path, member: str | None, stored_bytes: int) -> StoredArray:
    name = (member or "").removesuffix(".npy")
    with _translated(path, name), _opened(path, member) as stream:
        major, _ = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
        with warnings.catch_warnings(action="ignore"):  # a header of Python 2's is as good
            shape, fortran, dtype = read(stream)
        array = StoredArray(path, name, member, dtype, shape, stream.tell())
    _check_plain(array, fortran)
    check_complete(array, stored_bytes)
    return array


def check_complete(array: StoredArray, stored_bytes: int) -> None:
    """Raise DataError unless the array ends exactly where its file, or its place in the file, ends."""
    expected = math.prod(array.shape) * array.dtype.itemsize
    if min(array.shape, default=0) < 0 or array.offset + expected != stored_bytes:
        raise DataError(
            f"{array} of shape {array.shape} needs {expected} bytes and the file holds {stored_bytes - array.offset}; "
            "it is truncated or damaged: write it again"
        )


def _check_plain(array: StoredArray, fortran: bool) -> None:
    if array.dtype.hasobject:
        raise DataError(f"{array} holds Python objects, which are never unpickled; save numbers of one dtype")
    if array.dtype.names is not None:
        raise DataError(f"{array} is a structured array; save each field as an array of its own")
    if fortran:
        raise DataError(f"{array} is in Fortran order, which cannot be streamed; save numpy.ascontiguousarray of it")


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    with ExitStack() as stack:
        if member is None:
            yield stack.enter_context(path.open("rb"))
        else:
            archive = stack.enter_context(zipfile.ZipFile(path))
            yield stack.enter_context(archive.open(member))


@contextmanager
def _translated(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of an .npz or .npy file") from None
    except _UNREADABLE as error:
        raise DataError(
            f"{_where(path, name)} cannot be read as .npz or .npy ({error}); write it again with numpy.savez"
        ) from error


def _where(path: Path, name: str) -> str:
    return f"{path}: array {name!r}" if name else str(path)
