"""Real inputs for a model, streamed from files: calibration data and golden data.

An array with the rank of its input holds samples along axis 0; a run takes a group of them. An array of one rank more
holds one complete input per entry of axis 0. All arrays of a file must have the same layout of these two.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, digest_of_path
from enginesmith.core.text import suggest
from enginesmith.core.types import PLUS, Dim, Tensors, TensorSpec, list_sums, size_of
from validation.data.stored import Stored, find_arrays

# The most files of a folder whose headers are read when samples are only checked.
MOST_HEADERS = 8


class SampleSource(Protocol):
    """A source of samples. name: for messages.  digest: of the data, or of the code that generates the data."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def digest(self) -> str: ...  # noqa: D102

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, dict[str, Array]]]:
        """For each run: the index after its last sample, and its inputs by name. A run has as few samples as the model
        accepts. start, stop: range of samples, by default all. Raises DataError for a bad sample.
        """


@dataclass(frozen=True)
class Samples:
    """The samples of one file or folder, checked against a model's inputs; opened by `Samples.open`.

    count: the length of axis 0.  complete: whether each entry of axis 0 is a complete input.
    arrays: by name, read when they are used.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    arrays: Mapping[str, Stored]
    count: int
    complete: bool

    @classmethod
    def open(
        cls, path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], extra: Sequence[str] = ()
    ) -> "Samples":
        """Open the samples at a path; only headers of arrays are read. extra: names of further arrays, such as labels.

        Raises DataError, which names file, array, value and remedy, if an array does not fit the model.
        """
        input_names = [spec.name for spec in inputs]
        names = [*input_names, *extra]
        arrays = find_arrays(path, input_names)
        if list(arrays) == [""] and len(names) == 1:
            arrays = {names[0]: arrays[""]}
        _raise_first(find_wrong_names(arrays, input_names, path, extra))
        arrays = {name: arrays[name] for name in names}
        _raise_first(_wrong_layout([arrays[spec.name] for spec in inputs], inputs))
        _raise_first(_wrong_counts(arrays))
        samples = cls._of(path, inputs, dims, arrays)
        _raise_first(samples._wrong_arrays())
        samples._sizes(None)
        return samples

    @classmethod
    def _of(
        cls, path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], arrays: Mapping[str, Stored]
    ) -> "Samples":
        count = next((array.shape[0] for array in arrays.values() if array.shape), 0)
        is_complete = len(arrays[inputs[0].name].shape) > len(inputs[0].shape)
        return cls(path, tuple(inputs), tuple(dims), arrays, count, is_complete)

    @classmethod
    def find_mistakes(
        cls,
        path: Path,
        inputs: Sequence[TensorSpec],
        dims: Sequence[Dim],
        extra: Sequence[str] = (),
        ignored: Collection[str] = (),
    ) -> Iterator[str]:
        """Messages on all mistakes for which `open` or `column` would raise, as far as headers show them.

        In a folder of samples only the first few files are read, for speed. extra: as in `open`.  ignored: names of
        arrays that are not checked.
        """
        try:
            stored_arrays = find_arrays(path, [spec.name for spec in inputs], most_files=MOST_HEADERS)
        except DataError as error:
            yield str(error)
            return
        if list(stored_arrays) == [""] and len(inputs) + len(extra) == 1:
            stored_arrays = {inputs[0].name: stored_arrays[""]}
        stored_arrays = {name: array for name, array in stored_arrays.items() if name not in ignored}
        wrong_names = list(find_wrong_names(stored_arrays, [spec.name for spec in inputs], path, extra))
        yield from wrong_names
        wanted_names = {*(spec.name for spec in inputs), *extra}
        arrays = {name: array for name, array in stored_arrays.items() if name in wanted_names}
        present_specs = [spec for spec in inputs if spec.name in arrays]
        if not present_specs:
            return
        mistakes = list(_wrong_layout([arrays[spec.name] for spec in present_specs], present_specs))
        mistakes += _wrong_counts(arrays)
        mistakes += [mistake for name in extra if name in arrays and (mistake := _wrong_labels(arrays[name]))]
        fitting_specs = [spec for spec in present_specs if len(arrays[spec.name].shape) - len(spec.shape) in (0, 1)]
        missing_axes = {len(arrays[spec.name].shape) - len(spec.shape) for spec in fitting_specs}
        if len(missing_axes) == 1:
            samples = cls._of(path, fitting_specs, dims, arrays)
            mistakes += samples._wrong_arrays()
            if not mistakes and not wrong_names:
                try:
                    samples._check_rest(samples.count, *(1, 1, 1) if samples.complete else samples._group(None))
                except DataError as error:
                    mistakes.append(str(error))
        else:
            mistakes += [mistake for spec in present_specs if (mistake := _wrong_dtype(arrays[spec.name], spec))]
        yield from mistakes

    @cached_property
    def digest(self) -> str:
        """The digest of the file or of the folder's files."""
        return digest_of_path(self.path)

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def batches(self, size: int | None = None) -> Iterator[dict[str, Array]]:
        """The inputs of each run by name, with one group in memory at a time.

        size: samples in a group if the leading dim is dynamic, limited to the dim's min and max; default its opt.
        Raises DataError for groups that do not fit the dim, and while reading for NaN, infinities and damaged files.
        """
        return (inputs for _, inputs in self._stream(self._sizes(size), 0))

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, dict[str, Array]]]:
        """See `SampleSource.runs`. Raises DataError if the range does not divide into the model's groups."""
        stop_index = self.count if stop is None else min(stop, self.count)
        return self._stream(self._sizes(1, stop_index - start), start)

    def part(self, index: int, of: int) -> tuple[int, int]:
        """The range [start, stop) of samples of part `index` out of `of` parts of about equal size, in whole runs.

        With more parts than runs, some parts are empty.
        """
        run_ends = [0, *itertools.accumulate(self._sizes(1))]
        start_run, end_run = ((len(run_ends) - 1) * number // of for number in (index, index + 1))
        return run_ends[start_run], run_ends[end_run]

    def column(self, name: str) -> Array:
        """One whole array in memory, such as labels. Raises DataError without such an array of finite numbers."""
        if name not in self.arrays:
            raise DataError(f"{self.path} has no array {name!r}; {suggest(name, self.arrays)}")
        array = self.arrays[name]
        if mistake := _wrong_labels(array):
            raise DataError(mistake)
        column = array.read()
        _check_finite(column, array, 0)
        return column

    def _stream(self, sizes: Sequence[int], start: int) -> Iterator[tuple[int, dict[str, Array]]]:
        names = [spec.name for spec in self.inputs]
        for blocks in zip(*(self.arrays[name].blocks(sizes, start) for name in names), strict=True):
            group = dict(zip(names, blocks, strict=True))
            for name, block in group.items():
                _check_finite(block, self.arrays[name], start)
            start += len(blocks[0])
            # `[0, ...]` keeps a scalar input an array, of no axes; `[0]` would make it a number.
            yield start, {name: block[0, ...] for name, block in group.items()} if self.complete else group

    def _wrong_arrays(self) -> Iterator[str]:
        """Messages on dtypes and sizes that do not fit the inputs. Raises DataError for a dim that is not declared."""
        dim_lengths: dict[str, int] = {}
        for spec in self.inputs:
            array = self.arrays[spec.name]
            if mistake := _wrong_dtype(array, spec):
                yield mistake
            for axis, length, size in self._axes(spec):
                axis_text = f"{array} has {size} = {length} on axis {axis}"
                if isinstance(size, int):
                    if length != size:
                        yield f"{array} has shape {array.shape}: axis {axis} must be {size}; reshape or crop it"
                    continue
                dim = self._dim(size)
                if length not in dim.sizes:
                    yield f"{axis_text}, outside {dim.words}; crop or pad it, or widen dims.{size}"
                if dim_lengths.setdefault(size, length) != length:
                    yield f"{axis_text} and {dim_lengths[size]} elsewhere; make them equal"
        yield from self._wrong_sums(dim_lengths)

    def _wrong_sums(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Messages on axes whose length differs from their sum in the spec, if the sum's terms are known."""
        for spec, axis, total in list_sums(self.inputs):
            length = self.arrays[spec.name].shape[axis + 1 if self.complete else axis]
            has_sizes = all(term.isdecimal() or term in sizes for term in total.split(PLUS))
            if has_sizes and (size := size_of(total, sizes)) != length:
                yield f"{self.arrays[spec.name]} has {length} along {total!r}, which is {size}; make them equal"

    def _axes(self, spec: TensorSpec) -> Iterator[tuple[int, int, int | str]]:
        """(axis, length, declared size) of the axes of one sample: all but axis 0, and sums of dims."""
        sizes = spec.shape if self.complete else spec.shape[1:]
        for axis, (length, dim) in enumerate(zip(self.arrays[spec.name].shape[1:], sizes, strict=True), start=1):
            if isinstance(dim, int) or PLUS not in dim:
                yield axis, length, dim

    def _dim(self, name: str) -> Dim:
        declared_dim = next((dim for dim in self.dims if dim.name == name), None)
        if declared_dim is None:
            raise DataError(f"{self.path}: dim {name!r} of the inputs is not declared; add dims.{name}")
        return declared_dim

    def _sizes(self, group_size: int | None, among: int | None = None) -> list[int]:
        """The number of entries of axis 0 in each run, of `among` entries (default all). group_size: see `batches`."""
        count = self.count if among is None else max(among, 0)
        if self.complete:
            return [1] * count
        low, size, multiple = self._group(group_size)
        self._check_rest(count, low, size, multiple)
        full_count, remainder = divmod(count, size)
        return [size] * full_count + ([remainder] if remainder else [])

    def _check_rest(self, count: int, low: int, size: int, multiple: int) -> None:
        """Raise DataError if the last group of `count` samples in groups of `size` is too small or no multiple."""
        remainder = count % size
        if remainder and (remainder < low or remainder % multiple):
            needs_text = f"{low} or more" + (f" in steps of {multiple}" if multiple > 1 else "")
            missing_count = low - remainder if remainder < low else -remainder % multiple
            raise DataError(
                f"{self.path}: {count} samples in groups of {size} leave {remainder}, but a group needs {needs_text}; "
                f"drop {remainder % multiple if remainder > low else remainder} or add {missing_count}"
            )

    def _group(self, group_size: int | None) -> tuple[int, int, int]:
        """The least and the usual length of a group, and the number of which every length is a multiple."""
        first_dims = {spec.shape[0] for spec in self.inputs}
        if len(first_dims) > 1:
            raise DataError(
                f"{self.path}: the inputs' leading sizes differ ({', '.join(sorted(map(str, first_dims)))}), so "
                "samples cannot be grouped; store one complete input per entry of a new axis 0, in every array"
            )
        leading_dim = first_dims.pop()
        if isinstance(leading_dim, int):
            return leading_dim, leading_dim, 1
        lengths = {dim: length for spec in self.inputs for _, length, dim in self._axes(spec) if isinstance(dim, str)}
        if leading_dim in lengths:
            return lengths[leading_dim], lengths[leading_dim], 1
        dim = self._dim(leading_dim)
        size = max(dim.min, min(group_size or dim.opt, dim.max))
        return dim.min, size // dim.multiple * dim.multiple, dim.multiple


def resize(tensors: Tensors, specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The tensors of `specs`, sliced or tiled to `sizes` of the named dims: new element i is old element i % length.

    Dims that `sizes` lacks keep their length. Indices into a shortened dim, and its lengths, are kept within it
    (`_hold_places`). Raises DataError if an axis to fill is empty.
    """
    new_tensors, cuts = {}, dict[str, tuple[int, int]]()
    all_sizes = {**sizes_of(tensors, specs), **sizes} if any(list_sums(specs)) else sizes
    for spec in specs:
        tensor, sums = tensors[spec.name], dict(spec.sums)
        for axis, dim in enumerate(spec.shape):
            length = tensor.shape[axis]
            target_length = size_of(sums[axis], all_sizes) if axis in sums else sizes.get(str(dim), length)
            if target_length != length:
                if length == 0:
                    reason = f"there is nothing to fill {target_length} from"
                    raise DataError(f"tensor {spec.name!r} is empty along {dim!r}; {reason}")
                tensor = np.take(tensor, np.arange(target_length) % length, axis)
                if target_length < length:
                    cuts[str(dim)] = length, target_length
        new_tensors[spec.name] = tensor
    first_dims = {spec.shape[0] for spec in specs if spec.shape} - {"batch"}  # nothing points at samples
    for spec in specs:
        other_cuts = sorted((cut, dim in first_dims) for dim, cut in cuts.items() if dim not in spec.shape)
        new_tensors[spec.name] = _hold_places(new_tensors[spec.name], tensors[spec.name], other_cuts)
    return new_tensors


def _hold_places(tensor: Array, whole: Array, cuts: Sequence[tuple[tuple[int, int], bool]]) -> Array:
    """Keep int32 or int64 indices and lengths within a shortened dim; any other tensor is returned unchanged.

    Indices (such as the ends of a graph's edges) are a table with all values below the old length of an axis 0 and some
    at or above the new length; they are taken modulo the new length. Lengths are a vector whose largest value is the
    old length; they are limited to the new length. cuts: (old, new length) of dims that the tensor lacks, and whether
    the dim is an axis 0.  whole: the tensor before resizing."""
    if not cuts or tensor.dtype.name not in ("int32", "int64") or tensor.min(initial=0) < 0:
        return tensor
    largest = int(whole.max(initial=0))
    for (old_length, new_length), is_axis_0 in cuts:
        if tensor.ndim > 1 and is_axis_0 and 0 < new_length <= largest < old_length and largest > 1:
            return np.asarray(tensor % new_length)
        if tensor.ndim == 1 and largest == old_length:
            return np.asarray(np.minimum(tensor, new_length))
    return tensor


def sizes_of(tensors: Tensors, specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The size of each named dim, from the tensors' shapes.

    Raises DataError for a missing tensor, another rank, another static size, and a name with two sizes.
    """
    sizes: dict[str, int] = {}
    for spec in specs:
        if spec.name not in tensors:
            raise DataError(f"tensor {spec.name!r} is missing; {suggest(spec.name, tensors)}")
        shape = tensors[spec.name].shape
        if len(shape) != len(spec.shape):
            raise DataError(f"tensor {spec.name!r} has shape {shape}; {spec.shape} has another rank")
        for length, dim in zip(shape, spec.shape, strict=True):
            is_sum = isinstance(dim, str) and PLUS in dim
            wanted_length = length if is_sum else sizes.setdefault(dim, length) if isinstance(dim, str) else dim
            if length != wanted_length:
                sizes_text = f"{dim} is {length} here and {wanted_length} elsewhere"
                raise DataError(f"tensor {spec.name!r} has shape {shape}: {sizes_text}")
    for spec, axis, name in list_sums(specs):
        if (length := tensors[spec.name].shape[axis]) != (size := size_of(name, sizes)):
            raise DataError(f"tensor {spec.name!r} has size {length} on axis {axis}, but {name!r} is {size}")
    return sizes


def _raise_first(wrong: Iterator[str]) -> None:
    """Raise DataError with the first message, if there is one."""
    if (mistake := next(wrong, None)) is not None:
        raise DataError(mistake)


def find_wrong_names(
    array_names: Collection[str], inputs: Sequence[str], path: Path, extra_names: Sequence[str] = ()
) -> Iterator[str]:
    """Messages on missing arrays, and on arrays that are not needed. array_names: names of the arrays at `path`.
    extra_names: names of arrays that are needed besides the inputs."""
    extra_text = f", and beside them {', '.join(extra_names)}" if extra_names else ""
    names_text = f"it holds {', '.join(array_names) or 'none'}; the model wants {', '.join(inputs)}{extra_text}"
    expected_names = [*inputs, *extra_names]
    if list(array_names) == [""]:
        yield f"{path} holds a single array; {', '.join(expected_names)} are needed: save them with numpy.savez"
        return
    for name in expected_names:
        if name not in array_names:
            remedy = f"{suggest(name, array_names, '')} rename the array, or correct the name in the spec".lstrip()
            yield f"{path} has no array {name!r}: {names_text}; {remedy}"
    for name in array_names:
        if name not in expected_names:
            remedy = f"{suggest(name, expected_names, '')} leave it out, or name it in the spec".lstrip()
            yield f"{path} has an array {name!r} that nothing asks for: {names_text}; {remedy}"


def _wrong_dtype(array: Stored, spec: TensorSpec) -> str:
    if array.dtype.name == spec.dtype:
        return ""
    return f"{array} is {array.dtype.name}; the input is {spec.dtype}: convert it with astype"


def _wrong_labels(array: Stored) -> str:
    return "" if array.dtype.kind in "biuf" else f"{array} is {array.dtype}; store integers"


def _wrong_layout(arrays: Sequence[Stored], inputs: Sequence[TensorSpec]) -> Iterator[str]:
    """Messages on arrays whose rank does not fit samples of their input, and on arrays of different layouts."""
    layouts = set()
    for array, spec in zip(arrays, inputs, strict=True):
        rank_excess = len(array.shape) - len(spec.shape)
        if rank_excess not in (0, 1) or not array.shape:
            yield (
                f"{array} has shape {array.shape}; input {spec.name!r} has shape {spec.shape}: give the same rank "
                "(samples along axis 0) or one rank more (one complete input per entry)"
            )
        layouts.add(rank_excess == 1)
    if len(layouts) > 1:
        yield (
            f"{arrays[0].path}: some arrays hold one complete input per entry of axis 0, others samples along it; "
            "store all of them the same way"
        )


def _wrong_counts(arrays: Mapping[str, Stored]) -> Iterator[str]:
    """Messages on arrays without samples, and on arrays with another number of samples than the first array."""
    counts = {name: array.shape[0] if array.shape else 0 for name, array in arrays.items()}
    first_name = next(iter(counts))
    for name, count in counts.items():
        if count == 0:
            yield f"{arrays[name]} has no samples; give at least one along axis 0"
        elif count != counts[first_name]:
            yield f"{arrays[name]} has {count} samples, but {first_name!r} has {counts[first_name]}; make them equal"


def _check_finite(block: Array, array: Stored, start: int) -> None:
    if block.dtype.kind not in "fc" or np.isfinite(block).all():
        return
    entry = int(np.argmax(~np.isfinite(block).reshape(len(block), -1).all(axis=1)))
    value = block[entry][~np.isfinite(block[entry])].flat[0]
    raise DataError(f"{array} holds {value} in sample {start + entry}; remove or repair that sample")
