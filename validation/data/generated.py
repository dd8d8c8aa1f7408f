"""Samples from a Python generator: each a dict with one array per input, checked when it is yielded. An array has its
input's rank (a whole batch, of any size that the model accepts), or one rank less: one sample, to which the leading
axis is added here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.user_code.task import sample_items
from validation.data.samples import sizes_of


@dataclass(frozen=True)
class GeneratedSamples:
    """Samples of the generator function `make`, which is called for each pass and must yield the same samples again.

    digest: of the function's code, without data that the code reads.
    """

    make: Callable[[], Iterable[object]]
    name: str
    digest: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, dict[str, Array]]]:
        """See `SampleSource.runs`. Each sample is a run and counts as one sample. Raises DataError without samples."""
        index = -1
        for index, sample in enumerate(sample_items(self.make, self.name)):
            if stop is not None and index >= stop:
                return
            if index >= start:
                label = f"{self.name}: sample {index}"
                for name in sample.keys() - {spec.name for spec in self.inputs}:
                    raise DataError(f"{label} has an array {name!r}, but no input has that name")
                batch = {spec.name: _to_batch(sample.get(spec.name), spec, label) for spec in self.inputs}
                try:
                    sizes = sizes_of(batch, self.inputs)
                except DataError as error:
                    raise DataError(f"{label}: {error}") from error
                for dim in self.dims:
                    if (size := sizes.get(dim.name, dim.min)) not in dim.sizes:
                        raise DataError(f"{label}: {dim.name} is {size}, outside {dim.words}; widen dims.{dim.name}")
                yield index + 1, batch
        if index < 0:
            raise DataError(f"{self.name} gave no samples; yield at least one")


def _to_batch(value: object, spec: TensorSpec, place: str) -> Array:
    if value is None:
        raise DataError(f"{place} lacks the input {spec.name!r}")
    array = np.asarray(value)
    if array.dtype.name != spec.dtype:
        raise DataError(f"{place}: {spec.name!r} is {array.dtype.name}; the input is {spec.dtype}: convert it")
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise DataError(f"{place}: {spec.name!r} holds NaN or Inf; remove or repair that sample")
    is_single = array.ndim == len(spec.shape) - 1 and (spec.shape[0] == 1 or isinstance(spec.shape[0], str))
    return array[None] if is_single else array
