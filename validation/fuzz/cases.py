"""Which shapes and values an engine is tried with: fuzz cases, and the inputs that follow from a case and a seed.

Sizes are boundary values first (each edge of a bucket and its neighbours: Myers, "The Art of Software Testing", 1979,
chapter 4), then interior ones at random.

Values are made from real ones of a golden set. Integers are mostly indices, which have no extremes of their own: they
get the least and the greatest of the golden data. A NaN goes into one sample of every floating-point input.

Mixtures are new samples between two real ones, as in mixup (Zhang et al., "mixup: Beyond Empirical Risk Minimization",
2018): what an engine does to one input in fifty is not seen in the few of a golden set.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, get_args

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import InputError
from enginesmith.core.types import Dim, Precision, Tensors, TensorSpec, sizes_product
from validation.data.batches import enough_samples, leading_dim
from validation.data.samples import resize
from validation.golden.golden_set import GoldenSet, case_kinds

Values = Literal[
    "realistic", "zeros", "ones", "extreme", "denormal", "nan",
    "times_2", "times_8", "times_64", "negated", "negative", "permuted", "cleared", "small", "repeated",
    "infinite", "blank", "mixed", "stretched",
]  # fmt: skip
VALUES: tuple[Values, ...] = get_args(Values)
# Real values of other magnitudes, signs and places: 'negative' is minus the magnitude of each value; 'cleared' has
# zeros in half of an input that never varies, such as a mask of ones; 'blank' has one sample of zeros.
MOVED: tuple[Values, ...] = (
    "times_2", "times_8", "times_64", "negated", "negative", "permuted", "cleared", "small", "blank", "stretched",
)  # fmt: skip
# Real samples. 'repeated' has one sample in every row, which shows an engine that looks its answer up by the first row.
REAL: tuple[Values, ...] = ("realistic", "repeated", "mixed")
# New samples: between two real ones, or on the line through two of them, at most SHARES_BEYOND behind each end.
MIXED: tuple[Values, ...] = ("mixed", "stretched")
SHARES_BEYOND = 3.0
NOT_FINITE: tuple[Values, ...] = ("nan", "infinite")
# Values that fill one sample of a batch.
IN_ONE_SAMPLE: Mapping[Values, float] = {"nan": np.nan, "infinite": np.inf, "blank": 0.0}
# Rows of every second batch of mixtures that are those of the one before it: an engine that looks its answer up by a
# part of the inputs gives an outdated one.
SAME_ROWS = [0, 1, -1]
# Shares of a mixture's integers that are one sample's, the other's, and drawn from the range of both.
SHARES = (0.375, 0.375, 0.25)
FACTORS: Mapping[Values, float] = {
    "times_2": 2.0, "times_8": 8.0, "times_64": 64.0, "negated": -1.0, "small": 2.0**-10,
}  # fmt: skip

# Corners of all dims at once number 2^dims; of more than these, only the first are tried.
MOST_CORNERS = 16
_ONLY = re.compile(r"(\w+)=(\w+)")


@dataclass(frozen=True)
class FuzzCase:
    """The size of each dim, the kind of values, and the number of their draw. outside: no profile covers the sizes."""

    sizes: tuple[tuple[str, int], ...]
    values: Values = "realistic"
    outside: bool = False
    draw: int = 0

    def __str__(self) -> str:
        settings = [*(f"{name}={size}" for name, size in self.sizes), f"values={self.values}"]
        return " ".join([*settings, f"draw={self.draw}"] if self.draw else settings)


def draw(dims: Sequence[Dim], seed: int, count: int) -> list[FuzzCase]:
    """Cases at every boundary with real values, of every kind of values at opt, `count` random ones, and those outside.

    The same arguments give the same cases.
    """
    generator = np.random.default_rng(seed)
    inner_cases = [FuzzCase(tuple(sizes.items())) for sizes in boundaries(dims)]
    inner_cases += [FuzzCase(_opt(dims), kind) for kind in VALUES]
    for index in range(count):
        sizes = tuple((dim.name, dim.sizes[int(generator.integers(len(dim.sizes)))]) for dim in dims)
        kind = VALUES[index % len(VALUES)]
        inner_cases.append(FuzzCase(sizes, kind, draw=0 if kind in ("zeros", "ones") else index + 1))
    outer_cases = [FuzzCase(tuple(sizes.items()), outside=True) for sizes in just_outside(dims)]
    return list(dict.fromkeys([*inner_cases, *outer_cases]))


def boundaries(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """Corners of all dims; then each dim at its buckets' ends, beside them, and at opt, with the others at opt."""
    yield from islice(sizes_product(dims, {dim.name: sorted({dim.min, dim.max}) for dim in dims}), MOST_CORNERS)
    opt_sizes = dict(_opt(dims))
    for dim in dims:
        near_sizes = {size + step for size in dim.test_sizes() for step in (-dim.multiple, 0, dim.multiple)}
        for size in sorted(near_sizes):
            if size in dim.sizes:
                yield opt_sizes | {dim.name: size}


def just_outside(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """One step beyond each end of each dim, and one size between two multiples, the others at opt."""
    opt_sizes = dict(_opt(dims))
    for dim in dims:
        yield opt_sizes | {dim.name: dim.max + dim.multiple}
        if dim.min > dim.multiple:
            yield opt_sizes | {dim.name: dim.min - dim.multiple}
        if dim.multiple > 1:
            yield opt_sizes | {dim.name: dim.min + dim.multiple // 2}


def parse_only(text: str, dims: Sequence[Dim]) -> FuzzCase:
    """The case that a report writes as 'batch=5 values=ones'. Raises InputError for text that is none of this model."""
    case_fields = dict(_ONLY.findall(text))
    remainder = _ONLY.sub("", text).replace(",", " ").strip()
    values, draw_text = case_fields.pop("values", "realistic"), case_fields.pop("draw", "0")
    if remainder or values not in VALUES or set(case_fields) != {dim.name for dim in dims}:
        usage = " ".join([*(f"{dim.name}={dim.opt}" for dim in dims), f"values={'|'.join(VALUES)}"])
        raise InputError(f"case {text!r} is not one of this model; write it as '{usage}'")
    min_sizes = {dim.name: min(dim.min, 1) for dim in dims}
    is_valid = all(size.isdecimal() and int(size) >= min_sizes[name] for name, size in case_fields.items())
    if not (is_valid and draw_text.isdecimal()):
        raise InputError(f"case {text!r}: sizes are whole numbers from 1 up, and a draw is one from 0")
    sizes = tuple((dim.name, int(case_fields[dim.name])) for dim in dims)
    is_outside = any(size not in dim.sizes for dim, (_, size) in zip(dims, sizes, strict=True))
    return FuzzCase(sizes, values, is_outside, int(draw_text))


def _opt(dims: Sequence[Dim]) -> tuple[tuple[str, int], ...]:
    return tuple((dim.name, dim.opt) for dim in dims)


# The largest finite and the smallest normal number of float16 and of float32, in which int8 and fp8 engines compute
# what is not quantized.
_HALF = (65504.0, 2.0**-14)
_SINGLE = (float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny))


def reach(precision: Precision) -> tuple[float, float]:
    """The largest finite number and the smallest normal one of an engine's arithmetic."""
    return _HALF if precision == "fp16" else _SINGLE


def make(
    case: FuzzCase, specs: Sequence[TensorSpec], golden: Sequence[Tensors], seed: int, precision: Precision
) -> dict[str, Array]:
    """The inputs of a case by name. golden: groups of real inputs, from which values and ranges of integers come."""
    if case.values in MIXED:
        return make_mixture(case, specs, golden, seed)[0]
    generator, inputs = draw_real(case, specs, golden, seed)
    if case.values in REAL:
        return inputs
    if case.values in IN_ONE_SAMPLE:
        position, value = nan_at(case, specs, seed), IN_ONE_SAMPLE[case.values]
        left_names = list_masks(inputs) if case.values == "blank" else []
        for name, array in inputs.items() if position is not None else ():
            if array.dtype.kind == "f" and name not in left_names:
                inputs[name] = array.copy()
                inputs[name][position] = value
        return inputs
    if case.values in MOVED:
        mask_names = () if case.values == "cleared" else list_masks(inputs)
        return {
            name: array if name in mask_names else _move(generator, array, case.values)
            for name, array in inputs.items()
        }
    return {spec.name: _fill(generator, inputs[spec.name], case, golden, spec.name, precision) for spec in specs}


def make_mixture(
    case: FuzzCase, specs: Sequence[TensorSpec], golden: Sequence[Tensors], seed: int, previous: Tensors | None = None
) -> tuple[dict[str, Array], Tensors, Tensors]:
    """A batch of mixtures, and the two groups of real samples that it lies between. previous: the batch of the draw
    before, if known."""
    generator, inputs = draw_real(case, specs, golden, seed)
    _, others = draw_real(FuzzCase(case.sizes, draw=case.draw + 1), specs, golden, seed)
    beyond = SHARES_BEYOND if case.values == "stretched" else 0.0
    mixtures = _mix(generator, inputs, others, 2 if leading_dim(specs) is None else 1, beyond)
    if not beyond and case.draw % 2 and dict(case.sizes).get(leading_dim(specs) or "", 1) > len(SAME_ROWS):
        previous = previous or make_mixture(replace(case, draw=case.draw - 1), specs, golden, seed)[0]
        for name, array in mixtures.items():
            array[SAME_ROWS] = previous[name][SAME_ROWS]
    return mixtures, inputs, others


def draw_real(
    case: FuzzCase, specs: Sequence[TensorSpec], golden: Sequence[Tensors], seed: int
) -> tuple[np.random.Generator, dict[str, Array]]:
    """The case's generator, and the real samples that its inputs are made from."""
    generator = np.random.default_rng([seed, VALUES.index(case.values), case.draw, *(size for _, size in case.sizes)])
    sizes = dict(case.sizes)
    golden_samples = enough_samples(golden, int(generator.integers(len(golden))), specs, sizes)
    if leading_dim(specs) is not None:  # real samples in another order
        order = generator.permutation(len(golden_samples[specs[0].name]))
        order = np.zeros_like(order) if case.values == "repeated" else order
        golden_samples = {spec.name: golden_samples[spec.name][order] for spec in specs}
    return generator, resize(golden_samples, specs, sizes)


def _mix(
    generator: np.random.Generator, real: Tensors, others: Tensors, least_ndim: int, beyond: float
) -> dict[str, Array]:
    """Samples between those of two groups: of floats in a drawn share for each, which may lie `beyond` 0 and 1 where no
    value gets another sign than all have; of integers element by element, some of which are drawn from the range of
    both. Masks stay, and inputs of fewer axes, which may be sizes."""
    mixtures, masks = dict(real), list_masks(real)
    for name, array in real.items():
        other = others[name]
        if name in masks or array.ndim < least_ndim or not array.size:
            continue
        if array.dtype.kind == "f":
            share = generator.uniform(-beyond, 1 + beyond, (len(array), *[1] * (array.ndim - 1)))
            with np.errstate(invalid="ignore"):  # where an infinity, as of a mask, gives NaN, it stays
                values = array + share * (other.astype(np.float64) - array)
                values = np.maximum(values, 0) if min(array.min(), other.min()) >= 0 else values
                values = np.minimum(values, 0) if max(array.max(), other.max()) <= 0 else values
            mixtures[name] = np.where(np.isfinite(values), values, array).astype(array.dtype)
        elif array.dtype.kind in "iu":
            low, high = min(array.min(), other.min()), max(array.max(), other.max())
            drawn_values = generator.integers(low, high, array.shape, array.dtype, endpoint=True)
            mixtures[name] = np.choose(generator.choice(3, array.shape, p=SHARES), (array, other, drawn_values))
    return mixtures


def _move(generator: np.random.Generator, real: Array, values: Values) -> Array:
    """A float input of two axes or more with its values moved. A vector or a number may be a size, and stays."""
    if values == "cleared":
        return clear_half(real)
    if real.dtype.kind != "f" or real.ndim < 2:
        return real
    if values == "permuted":
        flat_rows = real.reshape(len(real), -1)
        return np.ascontiguousarray(flat_rows[:, generator.permutation(flat_rows.shape[1])].reshape(real.shape))
    with np.errstate(over="ignore"):
        moved_values = -np.abs(real) if values == "negative" else real * np.asarray(FACTORS[values], real.dtype)
    return np.asarray(moved_values, real.dtype)


def list_masks(inputs: Tensors) -> list[str]:
    """Names of the inputs of zeros and ones alone, beside others: twice a mask is none."""
    numbers = {name: array for name, array in inputs.items() if array.dtype.kind in "fiub"}
    masks = [name for name, array in numbers.items() if ((array == 0) | (array == 1)).all()]
    return masks if len(masks) < len(inputs) else []


def clear_half(real: Array) -> Array:
    """An input of two axes or more that holds one value, not 0, everywhere: with zeros in the second half of its last
    axis. Another one as it is."""
    if real.dtype.kind not in "fiub" or real.ndim < 2 or real.shape[-1] < 2 or not real.size:
        return real
    if not real.flat[0] or (real != real.flat[0]).any():
        return real
    half_cleared = real.copy()
    half_cleared[..., real.shape[-1] // 2 :] = 0
    return half_cleared


def nan_at(case: FuzzCase, specs: Sequence[TensorSpec], seed: int) -> int | None:
    """The sample of the batch that gets NaN; None without a batch of two or more, where it could leak to no other."""
    size = dict(case.sizes).get(leading_dim(specs) or "", 1)
    return int(np.random.default_rng([seed, case.draw, size]).integers(size)) if size > 1 else None


def _fill(
    generator: np.random.Generator,
    real: Array,
    case: FuzzCase,
    golden: Sequence[Tensors],
    name: str,
    precision: Precision,
) -> Array:
    """Values of the case's kind in the shape and dtype of the input `real`, which they are where the kind has none."""
    if case.values in ("zeros", "ones"):
        return np.full_like(real, case.values == "ones")
    if real.dtype.kind == "f":
        max_value, min_value = reach(precision if real.dtype != np.float16 else "fp16")
        # The largest whose square is finite: one product is safe, a sum of squares is not.
        size = np.sqrt(max_value) if case.values == "extreme" else min_value / 8
        return np.asarray(generator.choice([-1.0, 1.0], real.shape) * size, real.dtype)
    if case.values == "extreme" and real.dtype.kind in "iu":
        bounds = [min(tensors[name].min() for tensors in golden), max(tensors[name].max() for tensors in golden)]
        return np.asarray(generator.choice(bounds, real.shape), real.dtype)
    return real


# Groups that cases draw from; with another number, the same case draws another group.
MOST_GROUPS = 32
# Groups of at most so many bytes are kept in memory once they were read.
MOST_KEPT = 1 << 20


class Groups(Sequence[Tensors]):
    """The inputs of the first golden cases of a golden set, read when they are asked for."""

    def __init__(self, golden: GoldenSet) -> None:
        numbered_kinds = enumerate(case_kinds(golden))
        self._cases = golden.cases
        self._at = list(islice((index for index, kind in numbered_kinds if kind == "golden"), MOST_GROUPS))
        self._kept: dict[int, Tensors] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int) -> Tensors:  # type: ignore[override]
        case_index = self._at[index]
        if case_index in self._kept:
            return self._kept[case_index]
        tensors = self._cases[case_index].inputs
        if sum(array.nbytes for array in tensors.values()) <= MOST_KEPT:
            self._kept[case_index] = tensors
        return tensors
