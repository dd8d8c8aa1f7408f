"""numpy arrays: checks that inputs fit a model's declaration and that weights are finite; .npz and .npy files.

A full check takes some microseconds per input, a call of a small engine not much more. So a session keeps an
`InputCheck`, a table of the types, dtypes and shapes that were accepted once.

Files are read as streams: memory depends on the requested data, never on the file's size. The first bytes determine the
format, not the name. Nothing is ever unpickled, and every array's header must account for exactly the bytes that the
file holds for it, so that a truncated or padded file is refused before any work.
"""

import math
import tokenize
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.text import DAMAGED, check_compression
from enginesmith.core.types import ShapeProfile, Tensors, TensorSpec, list_sums, size_of

# An array of any shape and any dtype.
Array = np.ndarray
# The number of shape combinations that a session stores, so that its table does not grow with every new size.
MOST_ACCEPTED = 256
# Exceptions for damaged files. numpy raises the last four: it parses headers as Python literals.
_UNREADABLE = (*DAMAGED, SyntaxError, TypeError, MemoryError, tokenize.TokenError)


def dtype_of(name: str) -> np.dtype:
    """The dtype with this name, numpy's ('float32', '<f4') or one of ml_dtypes ('bfloat16'). Raises TypeError."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype = np.dtype(getattr(ml_dtypes, name, name))
        return dtype


@dataclass(frozen=True)
class Fit:
    """How inputs fit a model. sizes: of each named dim.  profile: index of the first one that allows their shapes."""

    sizes: dict[str, int]
    profile: int


class InputCheck:
    """Checks the inputs of a session like `check_inputs` and `find_profile`, once for equal dtypes and shapes.

    profiles: if empty, every shape that fits the specs is accepted.
    """

    def __init__(self, specs: Sequence[TensorSpec], profiles: Sequence[ShapeProfile] = ()) -> None:
        self.specs, self._profiles = specs, profiles
        self._names = [spec.name for spec in specs]
        self._accepted: dict[object, Fit] = {}

    def __call__(self, inputs: Tensors) -> Fit:
        """Check inputs; return how they fit. Raises DataError as `check_inputs` and `find_profile` do."""
        try:
            key = tuple([(type(array), array.dtype, array.shape) for array in map(inputs.__getitem__, self._names)])
            fit = self._accepted[key]
        except (KeyError, AttributeError, TypeError, IndexError):  # a new combination, no array, or no mapping
            return self._check_in_full(inputs)
        return fit if len(inputs) == len(self._names) else self._check_in_full(inputs)

    def _check_in_full(self, inputs: Tensors) -> Fit:
        sizes = check_inputs(self.specs, inputs)
        fit = Fit(sizes, find_profile(self._profiles, inputs) if self._profiles else 0)
        if len(self._accepted) >= MOST_ACCEPTED:
            self._accepted.clear()
        arrays = [inputs[name] for name in self._names]
        self._accepted[tuple([(type(array), array.dtype, array.shape) for array in arrays])] = fit
        return fit


def check_inputs(specs: Sequence[TensorSpec], inputs: Tensors | object) -> dict[str, int]:
    """The size of each named dim in `inputs`, arrays by name. Raises DataError for inputs that are no mapping of
    arrays, missing or unknown names, a dtype, byte order, rank or size that differs from the declared one, and a dim
    with two sizes."""
    input_names = {spec.name for spec in specs}
    if not isinstance(inputs, Mapping):  # a caller may pass any object
        type_name, name_list = type(inputs).__name__, _names(input_names)
        raise DataError(
            f"the inputs are a {type_name}; give a dict of numpy arrays by name: the model needs {name_list}"
        )
    if missing_names := input_names - inputs.keys():
        raise DataError(f"no array for input {_names(missing_names)}; the model needs {_names(input_names)}")
    if unknown_names := inputs.keys() - input_names:
        raise DataError(f"no input is named {_names(unknown_names)}; the model has {_names(input_names)}")
    sizes: dict[str, int] = {}
    for spec in specs:
        _check(spec, inputs[spec.name], sizes)
    for spec, axis, sum_dim in list_sums(specs):
        if (size := inputs[spec.name].shape[axis]) != (expected_size := size_of(sum_dim, sizes)):
            raise DataError(f"input {spec.name!r} has size {size} on axis {axis}, but {sum_dim!r} is {expected_size}")
    return sizes


def _check(spec: TensorSpec, array: np.ndarray, sizes: dict[str, int]) -> None:
    if not isinstance(array, np.ndarray):
        raise DataError(
            f"input {spec.name!r} is of type {type(array).__name__}; the model needs a numpy array of {spec.dtype}: "
            "numpy.asarray makes one"
        )
    if not array.dtype.isnative:  # dtype.name ignores byte order, and a runtime would read wrong numbers
        raise DataError(f"input {spec.name!r} has the wrong byte order ({array.dtype.str}); use astype({spec.dtype!r})")
    if array.dtype.name != spec.dtype:
        raise DataError(f"input {spec.name!r} is {array.dtype.name}; the model needs {spec.dtype}: convert it")
    if array.ndim != len(spec.shape):
        raise DataError(f"input {spec.name!r} has shape {array.shape}; the model needs {_shape(spec)}")
    sums = dict(spec.sums)
    for axis, (size, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if axis in sums:
            continue
        expected_size = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if size != expected_size:
            remark = (
                f"{dim!r} is {expected_size} elsewhere" if isinstance(dim, str) else f"the model needs {_shape(spec)}"
            )
            raise DataError(f"input {spec.name!r} has size {size} on axis {axis} (shape {array.shape}); {remark}")


def _shape(spec: TensorSpec) -> str:
    return "(" + ", ".join(str(dim) for dim in spec.shape) + ")"


def _names(names: set[str]) -> str:
    return ", ".join(sorted(map(repr, names)))


def find_profile(profiles: Sequence[ShapeProfile], inputs: Tensors) -> int:
    """Index of the first profile whose ranges include every input's shape. Raises DataError if there is none, and for a
    size that is not a multiple that the profile requires."""
    _check_multiples(profiles, inputs)
    for index, shapes in enumerate(profiles):
        ranges = ((inputs[name].shape, low, high) for name, low, _, high in shapes.inputs if name in inputs)
        if all(
            min_size <= size <= max_size
            for shape, low, high in ranges
            for size, min_size, max_size in zip(shape, low, high, strict=True)
        ):
            return index
    shapes_text = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
    ranges_text = "; ".join(f"{name} {low}..{high}" for shapes in profiles for name, low, _, high in shapes.inputs)
    raise DataError(f"no optimization profile holds {shapes_text}; the engine was built for {ranges_text}; widen dims")


def _check_multiples(profiles: Sequence[ShapeProfile], inputs: Tensors) -> None:
    """Raise DataError for a size that is no multiple of its axis's number; all profiles have the same multiples."""
    for name, multiples in profiles[0].multiples if profiles else ():
        shape = inputs[name].shape if name in inputs else ()
        for axis, (size, multiple) in enumerate(zip(shape, multiples, strict=False)):
            if size % multiple:
                smaller_size = size - size % multiple
                sizes_text = f"{smaller_size} or {smaller_size + multiple}" if smaller_size else str(multiple)
                raise DataError(
                    f"input {name!r} has size {size} on axis {axis} (shape {shape}); the model takes multiples of "
                    f"{multiple} there: pad, crop or scale it to {sizes_text}"
                )


def check_finite(weights: Iterable[tuple[str, Array]]) -> None:
    """Raise ModelError for the first of these weights that contains NaN or an infinity. Without this check, an error
    would name a sample with wrong outputs instead."""
    for name, array in weights:
        if description := describe_nonfinite(array):
            raise ModelError(f"weight {name!r} holds {description}; repair it, or train or export the model again")


def describe_nonfinite(array: Array) -> str:
    """'' if all values are finite, else the first other one and its place: 'nan at [0, 3], and 2 more such values'."""
    positions = np.argwhere(~np.isfinite(array))
    if not len(positions):
        return ""
    remainder_text = f", and {len(positions) - 1} more such values" if len(positions) > 1 else ""
    return f"{array[tuple(positions[0])]} at {positions[0].tolist()}{remainder_text}"


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, whose header was read. member: its file in an archive, None for an .npy file.
    dtype, shape: as stored.  offset: where its data begins in the stream, in bytes."""

    path: Path
    name: str
    member: str | None
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return _where(self.path, self.name)

    def blocks(self, rows: Iterable[int], skip: int = 0) -> Iterator[Array]:
        """Consecutive pieces along axis 0, of the given lengths, in native byte order, after the first `skip` entries.

        Raises DataError if the bytes cannot be read or fail their checksum.
        """
        with ExitStack() as exit_stack:
            with _translate_errors(self.path, self.name):
                stream = exit_stack.enter_context(_open_member(self.path, self.member))
                stream.seek(self.offset + skip * math.prod(self.shape[1:]) * self.dtype.itemsize)
            for count in rows:
                with _translate_errors(self.path, self.name):
                    block = self._read_array(stream, (count, *self.shape[1:]))
                yield block

    def read(self) -> Array:
        """The whole array, in memory. Raises DataError as `blocks`, and for an array without axes."""
        if self.shape:
            return self.whole()
        raise DataError(f"{self} has no axes; store one entry per sample along axis 0")

    def whole(self) -> Array:
        """The whole array, in memory; also an array without axes. Raises DataError as `blocks`."""
        with _translate_errors(self.path, self.name), _open_member(self.path, self.member) as stream:
            stream.seek(self.offset)
            return self._read_array(stream, self.shape)

    def _read_array(self, stream: IO[bytes], shape: tuple[int, ...]) -> Array:
        array_bytes = stream.read(math.prod(shape) * self.dtype.itemsize)
        return np.frombuffer(array_bytes, self.dtype).reshape(shape).astype(self.dtype.newbyteorder("="))


def stored_arrays(path: Path) -> dict[str, StoredArray]:
    """The arrays of a file by name; an .npy file's single array is named ''.

    Raises DataError if the file is missing, corrupt, of another kind, or contains anything but plain arrays with unique
    names.
    """
    with _translate_errors(path, ""):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_compression(archive)
                members = archive.infolist()
            arrays = [_header(path, member.filename, member.file_size) for member in members]
        else:
            arrays = [_header(path, None, path.stat().st_size)]
    arrays_by_name = {array.name: array for array in arrays}
    if duplicate := next((array for array in arrays if arrays_by_name[array.name] is not array), None):
        raise DataError(f"{duplicate} is in the file twice; keep one of the two")
    return arrays_by_name


def _header(path: Path, member: str | None, stored_bytes: int) -> StoredArray:
    name = (member or "").removesuffix(".npy")
    with _translate_errors(path, name), _open_member(path, member) as stream:
        major, _ = npy.read_magic(stream)
        read_header = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
        with warnings.catch_warnings(action="ignore"):  # numpy warns about headers from Python 2; they are readable
            shape, is_fortran, dtype = read_header(stream)
        array = StoredArray(path, name, member, dtype, shape, stream.tell())
    if dtype.hasobject:
        raise DataError(f"{array} holds Python objects, which are never unpickled; save numbers of one dtype")
    if dtype.names is not None:
        raise DataError(f"{array} is a structured array; save each field as an array of its own")
    if is_fortran:
        raise DataError(f"{array} is in Fortran order, which cannot be streamed; save numpy.ascontiguousarray of it")
    check_complete(array, stored_bytes)
    return array


def check_complete(array: StoredArray, stored_bytes: int) -> None:
    """Raise DataError unless the array ends exactly where its file, or its place in the file, ends."""
    expected_bytes = math.prod(array.shape) * array.dtype.itemsize
    if min(array.shape, default=0) < 0 or array.offset + expected_bytes != stored_bytes:
        raise DataError(
            f"{array} of shape {array.shape} needs {expected_bytes} bytes and the file holds "
            f"{stored_bytes - array.offset}; it is truncated or damaged: write it again"
        )


@contextmanager
def _open_member(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with path.open("rb") as stream:
            yield stream
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            yield stream


@contextmanager
def _translate_errors(path: Path, name: str) -> Iterator[None]:
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
