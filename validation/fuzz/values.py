"""The values of a case: a function of the seed, its sizes and its kind, so that a report's line makes them again.

Integers are mostly indices, which have no extremes of their own: they get the least and the greatest that the golden
data holds. A NaN goes into one sample of every floating-point input.
"""

from collections.abc import Sequence

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.types import Precision, Tensors, TensorSpec
from validation.data.batches import enough_samples, leading_dim
from validation.data.samples import resize
from validation.fuzz.cases import VALUES, FuzzCase

# Largest finite numbers, and smallest normal ones, of what an engine computes in. int8 and fp8 compute around in fp32.
_HALF = (65504.0, 2.0**-14)
_SINGLE = (float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny))


def reach(precision: Precision) -> tuple[float, float]:
    """The largest finite number and the smallest normal one of an engine's arithmetic."""
    return _HALF if precision == "fp16" else _SINGLE


def make(
    case: FuzzCase, specs: Sequence[TensorSpec], golden: Sequence[Tensors], seed: int, precision: Precision
) -> dict[str, Array]:
    """The inputs of a case. golden: groups of real inputs, which are drawn from and give integers their range."""
    generator = np.random.default_rng([seed, VALUES.index(case.values), case.draw, *(size for _, size in case.sizes)])
    sizes = dict(case.sizes)
    known = enough_samples(golden, int(generator.integers(len(golden))), specs, sizes)
    real = _resample(generator, known, specs, sizes)
    if case.values == "realistic":
        return real
    if case.values == "nan":
        return _with_nan(real, nan_at(case, specs, seed))
    return {spec.name: _fill(generator, real[spec.name], case, golden, spec.name, precision) for spec in specs}


def nan_at(case: FuzzCase, specs: Sequence[TensorSpec], seed: int) -> int | None:
    """The batch position that gets NaN; None where nothing could leak: no batch, or a batch of one."""
    size = dict(case.sizes).get(leading_dim(specs) or "", 1)
    return int(np.random.default_rng([seed, case.draw, size]).integers(size)) if size > 1 else None


def _resample(
    generator: np.random.Generator, tensors: Tensors, specs: Sequence[TensorSpec], sizes: dict[str, int]
) -> dict[str, Array]:
    """Real samples in another order, then cut or repeated to the sizes."""
    if leading_dim(specs) is not None:
        order = generator.permutation(len(tensors[specs[0].name]))
        tensors = {spec.name: tensors[spec.name][order] for spec in specs}
    return resize(tensors, specs, sizes)


def _with_nan(tensors: dict[str, Array], position: int | None) -> dict[str, Array]:
    if position is None:
        return tensors
    copies = {name: array.copy() for name, array in tensors.items()}
    for array in copies.values():
        if array.dtype.kind == "f":
            array[position] = np.nan
    return copies


def _fill(
    generator: np.random.Generator,
    real: Array,
    case: FuzzCase,
    golden: Sequence[Tensors],
    name: str,
    precision: Precision,
) -> Array:
    if case.values in ("zeros", "ones"):
        return np.full_like(real, case.values == "ones")
    if real.dtype.kind == "f":
        largest, tiny = reach(precision if real.dtype != np.float16 else "fp16")
        # The largest whose square is finite: one product is safe, a sum of squares is not.
        size = np.sqrt(largest) if case.values == "extreme" else tiny / 8
        return np.asarray(generator.choice([-1.0, 1.0], real.shape) * size, real.dtype)
    if case.values == "extreme" and real.dtype.kind in "iu":
        ends = [min(item[name].min() for item in golden), max(item[name].max() for item in golden)]
        return np.asarray(generator.choice(ends, real.shape), real.dtype)
    return real
