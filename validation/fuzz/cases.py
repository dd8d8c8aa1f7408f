"""Fuzz cases: the shapes and values to try an engine with, and the inputs that a case and a seed determine.

Sizes are boundary values first (each edge of a bucket and its neighbours: Myers, "The Art of Software Testing", 1979,
chapter 4), then random ones between them.

Values are derived from the real ones of a golden set. Integers are mostly indices, so their extremes are the least and
the greatest of the golden data. NaN fills one sample of every floating-point input.

Mixtures are new samples between two real ones, as in mixup (Zhang et al., "mixup: Beyond Empirical Risk Minimization",
2018): the few samples of a golden set do not show a fault that one input in fifty has.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "times_2", "times_8", "times_64", "negated", "negative", "permuted", "lengths", "small", "repeated",
    "infinite", "blank", "mixed", "stretched", "positive", "flat",
]  # fmt: skip
VALUES: tuple[Values, ...] = get_args(Values)
# Real values with other magnitudes, signs or positions. 'positive' is |x|, 'negative' is -|x|. 'blank' fills one sample
# with zeros, 'flat' with the greatest value: neither sample has variance.
MOVED: tuple[Values, ...] = (
    "times_2", "times_8", "times_64", "negated", "negative", "positive", "permuted", "small", "blank", "flat",
    "stretched",
)  # fmt: skip
# Real samples. 'repeated' has the same sample in every row; it finds engines that cache answers by the first row.
# 'lengths' has other numbers of tokens in masks.
REAL: tuple[Values, ...] = ("realistic", "repeated", "mixed", "lengths")
# New samples on the line through two real ones: 'mixed' between the two, 'stretched' up to SHARES_BEYOND times their
# distance beyond either.
MIXED: tuple[Values, ...] = ("mixed", "stretched")
SHARES_BEYOND = 3.0
NOT_FINITE: tuple[Values, ...] = ("nan", "infinite")
# Values that fill one sample of a batch.
IN_ONE_SAMPLE: Mapping[Values, Callable[[Array], float]] = {
    "nan": lambda _: np.nan, "infinite": lambda _: np.inf, "blank": lambda _: 0.0, "flat": np.max,
}  # fmt: skip
# Every second batch of mixtures repeats these rows of the batch before: an engine that caches answers by a part of
# the inputs then returns an outdated answer.
SAME_ROWS = [0, 1, -1]
# The shares of a mixture's integers that are from the first sample, from the second, or random in the range of both.
SHARES = (0.375, 0.375, 0.25)
FACTORS: Mapping[Values, float] = {
    "times_2": 2.0, "times_8": 8.0, "times_64": 64.0, "negated": -1.0, "small": 2.0**-10,
}  # fmt: skip

# Other lengths are tried in at least this many rows of masks, in at least two batches.
LEAST_LENGTHS = 8
# All dims together have 2^dims corners; at most this many are tried.
MOST_CORNERS = 16
_ONLY = re.compile(r"(\w+)=(\w+)")


@dataclass(frozen=True)
class FuzzCase:
    """The size of each dim, the kind of values, and the number of the draw. outside: whether no profile covers it."""

    sizes: tuple[tuple[str, int], ...]
    values: Values = "realistic"
    outside: bool = False
    draw: int = 0

    def __str__(self) -> str:
        settings = [*(f"{name}={size}" for name, size in self.sizes), f"values={self.values}"]
        return " ".join([*settings, f"draw={self.draw}"] if self.draw else settings)


def draw(dims: Sequence[Dim], seed: int, count: int) -> list[FuzzCase]:
    """All cases to try: each boundary size with real values, the opt size with each kind of values, `count` random
    cases, and sizes outside the profiles. The same arguments give the same cases.
    """
    generator = np.random.default_rng(seed)
    inner_cases = [FuzzCase(tuple(sizes.items())) for sizes in boundaries(dims)]
    inner_cases += [FuzzCase(_opt(dims), kind) for kind in VALUES]
    for index in range(count):
        sizes = tuple((dim.name, dim.sizes[int(generator.integers(len(dim.sizes)))]) for dim in dims)
        kind = VALUES[index % (len(VALUES) - 2)]  # not the last two kinds, which are newer: a seed keeps its draws
        inner_cases.append(FuzzCase(sizes, kind, draw=0 if kind in ("zeros", "ones") else index + 1))
    outer_cases = [FuzzCase(tuple(sizes.items()), outside=True) for sizes in just_outside(dims)]
    return list(dict.fromkeys([*inner_cases, *outer_cases]))


def boundaries(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """Boundary sizes: all dims at corners, then one dim at or beside a bucket's end or opt and the others at opt."""
    yield from islice(sizes_product(dims, {dim.name: sorted({dim.min, dim.max}) for dim in dims}), MOST_CORNERS)
    opt_sizes = dict(_opt(dims))
    for dim in dims:
        near_sizes = {size + step for size in dim.test_sizes() for step in (-dim.multiple, 0, dim.multiple)}
        for size in sorted(near_sizes):
            if size in dim.sizes:
                yield opt_sizes | {dim.name: size}


def just_outside(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """Sizes outside the profiles: one dim a step beyond an end, or between two multiples, and the others at opt."""
    opt_sizes = dict(_opt(dims))
    for dim in dims:
        yield opt_sizes | {dim.name: dim.max + dim.multiple}
        if dim.min > dim.multiple:
            yield opt_sizes | {dim.name: dim.min - dim.multiple}
        if dim.multiple > 1:
            yield opt_sizes | {dim.name: dim.min + dim.multiple // 2}


def parse_only(text: str, dims: Sequence[Dim]) -> FuzzCase:
    """The case that a report names as text, such as 'batch=5 values=ones'. Raises InputError if the text is no case."""
    case_fields = dict(_ONLY.findall(text))
    remainder = _ONLY.sub("", text).replace(",", " ").strip()
    values, draw_text = case_fields.pop("values", "realistic"), case_fields.pop("draw", "0")
    if remainder or values not in VALUES or set(case_fields) != {dim.name for dim in dims}:
        usage = " ".join([*(f"{dim.name}={dim.opt}" for dim in dims), f"values={'|'.join(VALUES)}"])
        raise InputError(f"case {text!r} is not a case of this model; write it as '{usage}'")
    min_sizes = {dim.name: min(dim.min, 1) for dim in dims}
    is_valid = all(size.isdecimal() and int(size) >= min_sizes[name] for name, size in case_fields.items())
    if not (is_valid and draw_text.isdecimal()):
        raise InputError(f"case {text!r}: sizes are whole numbers from 1 up, and a draw is one from 0")
    sizes = tuple((dim.name, int(case_fields[dim.name])) for dim in dims)
    is_outside = any(size not in dim.sizes for dim, (_, size) in zip(dims, sizes, strict=True))
    return FuzzCase(sizes, values, is_outside, int(draw_text))


def _opt(dims: Sequence[Dim]) -> tuple[tuple[str, int], ...]:
    return tuple((dim.name, dim.opt) for dim in dims)


# The largest finite and the smallest normal number of float16 and of float32; int8 and fp8 engines compute their
# unquantized parts in float32.
_HALF = (65504.0, 2.0**-14)
_SINGLE = (float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny))


def reach(precision: Precision) -> tuple[float, float]:
    """The largest finite number and the smallest normal one of an engine's arithmetic."""
    return _HALF if precision == "fp16" else _SINGLE


def make(
    case: FuzzCase, specs: Sequence[TensorSpec], golden: Sequence[Tensors], seed: int, precision: Precision
) -> dict[str, Array]:
    """The inputs of a case by name. golden: groups of real inputs, from which values and integer ranges are taken."""
    if case.values in MIXED:
        return make_mixture(case, specs, golden, seed)[0]
    generator, inputs = draw_real(case, specs, golden, seed)
    if case.values == "lengths":
        return inputs | {name: rows.cut(inputs[name], case.draw) for name, rows in find_masks(golden).items()}
    if case.values in REAL:
        return inputs
    if case.values in IN_ONE_SAMPLE:
        position, value_of = nan_at(case, specs, seed), IN_ONE_SAMPLE[case.values]
        left_names = list_masks(inputs) if case.values in MOVED else []
        for name, array in inputs.items() if position is not None else ():
            if array.dtype.kind == "f" and name not in left_names:
                inputs[name] = array.copy()
                inputs[name][position] = value_of(array)
        return inputs
    if case.values in MOVED:
        masks = list_masks(inputs)
        return {
            name: array if name in masks else _move(generator, array, case.values) for name, array in inputs.items()
        }
    return {spec.name: _fill(generator, inputs[spec.name], case, golden, spec.name, precision) for spec in specs}


def make_mixture(
    case: FuzzCase, specs: Sequence[TensorSpec], golden: Sequence[Tensors], seed: int, previous: Tensors | None = None
) -> tuple[dict[str, Array], Tensors, Tensors]:
    """A batch of mixtures, and the two groups of real samples that are mixed. previous: the batch of the draw before,
    or None."""
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
    """The case's random generator, and the real samples from which its inputs are made."""
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
    """Mixtures of the samples of two groups. Floats are mixed with one random share per sample, from -`beyond` to
    1 + `beyond`; a sign that all values share is kept. Integers are mixed element by element, and some are drawn from
    the range of both. Masks, and inputs with fewer than `least_ndim` axes (they may be sizes), stay unchanged."""
    mixtures, masks = dict(real), list_masks(real)
    for name, array in real.items():
        other = others[name]
        if name in masks or array.ndim < least_ndim or not array.size:
            continue
        if array.dtype.kind == "f":
            share = generator.uniform(-beyond, 1 + beyond, (len(array), *[1] * (array.ndim - 1)))
            with np.errstate(invalid="ignore"):  # infinities, as in a mask, give NaN: the value stays unchanged
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
    """The input with its values changed as `values` says. Only floats with two or more axes: others may be sizes."""
    if real.dtype.kind != "f" or real.ndim < 2:
        return real
    if values == "permuted":
        flat_rows = real.reshape(len(real), -1)
        return np.ascontiguousarray(flat_rows[:, generator.permutation(flat_rows.shape[1])].reshape(real.shape))
    with np.errstate(over="ignore"):
        sources = {"negative": -np.abs(real), "positive": np.abs(real)}
        moved_values = sources[values] if values in sources else real * np.asarray(FACTORS[values], real.dtype)
    return np.asarray(moved_values, real.dtype)


def list_masks(inputs: Tensors) -> list[str]:
    """Names of the masks: inputs of only zeros and ones, which other values would make invalid. [] if all inputs are
    masks."""
    numbers = {name: array for name, array in inputs.items() if array.dtype.kind in "fiub"}
    masks = [name for name, array in numbers.items() if ((array == 0) | (array == 1)).all()]
    return masks if len(masks) < len(inputs) else []


@dataclass(frozen=True)
class MaskRows:
    """The rows of a mask in golden data. real: the value that marks a token.  is_left: whether padding precedes tokens.
    low, high: the fewest and the most tokens of a row.  spare: positions kept as padding, as they may be tokens."""

    real: bool
    is_left: bool
    low: int
    high: int
    spare: int = 0

    @classmethod
    def of(cls, arrays: Sequence[Array], real: bool, is_left: bool) -> "MaskRows | None":
        """The rows of masks (samples, ..., tokens). None if a row is only padding or has gaps, or if a sample's rows
        differ."""
        tokens = [(array == real)[..., ::-1] if is_left else array == real for array in arrays]
        counts = [array.sum(axis=-1).reshape(len(array), -1) for array in tokens]
        is_alike, numbers = all((count == count[:, :1]).all() for count in counts), np.concatenate(counts, axis=None)
        is_cut = is_alike and all((array[..., 1:] <= array[..., :-1]).all() for array in tokens)
        return cls(real, is_left, int(numbers.min()), int(numbers.max())) if is_cut and numbers.min() else None

    def cut(self, mask: Array, draw: int) -> Array:
        """The mask with other lengths, one per sample, from draw number `draw` of `draw_lengths`."""
        places, numbers = np.arange(mask.shape[-1]), np.resize(draw_lengths(mask.shape, draw, self.spare), len(mask))
        is_token = (places[::-1] if self.is_left else places) < numbers.reshape(-1, *[1] * (mask.ndim - 1))
        return np.broadcast_to(is_token == self.real, mask.shape).astype(mask.dtype)


def draw_lengths(shape: Sequence[int], draw: int, spare: int = 0) -> list[int]:
    """Numbers of tokens to try in masks (samples, ..., tokens): one per sample; one for all from draw LEAST_LENGTHS on.
    They rise from one token to all over the rows of all draws, so that no length's energy hides another's error."""
    rows, width = (1 if draw >= LEAST_LENGTHS else shape[0]), max(shape[-1] - spare, 1)
    lengths = sorted(min(max(n, 1), width) for n in (1, 2, 3, width // 4, width // 2, 3 * width // 4, width - 1, width))
    places = max(LEAST_LENGTHS, 2 * rows)
    return [lengths[(draw * rows + row) % places * LEAST_LENGTHS // places] for row in range(rows)]


def find_masks(golden: Sequence[Tensors]) -> dict[str, MaskRows]:
    """Padding masks by name: rows of tokens, then padding, or the reverse. A mask of only zeros is left out. If the
    meaning of 0 and 1 is unclear, the name must contain "mask"."""
    masks: dict[str, MaskRows] = {}
    for name in list_masks(golden[0]):
        arrays, real = [tensors[name] for tensors in golden], "padding" not in name.lower()
        if any(array.any() for array in arrays) and all(
            array.ndim > 1 and array.size and ((array == 0) | (array == 1)).all() for array in arrays
        ):
            for is_left in (True, False):
                is_named = "attention" in name.lower() or ("mask" in name.lower() and not is_left)
                is_sure = is_named or not MaskRows.of(arrays, not real, not is_left)
                if (is_sure or "mask" in name.lower()) and (rows := MaskRows.of(arrays, real, is_left)):
                    masks[name] = replace(rows, spare=int(not is_sure))
    return masks


def nan_at(case: FuzzCase, specs: Sequence[TensorSpec], seed: int) -> int | None:
    """The index of the sample that gets NaN; None for a batch of one, which has no other sample to spoil."""
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
    """Values of the case's kind with the shape and dtype of the input `real`; `real` itself if the kind has none."""
    if case.values in ("zeros", "ones"):
        return np.full_like(real, case.values == "ones")
    if real.dtype.kind == "f":
        max_value, min_value = reach(precision if real.dtype != np.float16 else "fp16")
        # The largest number whose square is finite: one product is safe, a sum of squares is not.
        size = np.sqrt(max_value) if case.values == "extreme" else min_value / 8
        return np.asarray(generator.choice([-1.0, 1.0], real.shape) * size, real.dtype)
    if case.values == "extreme" and real.dtype.kind in "iu":
        bounds = [min(tensors[name].min() for tensors in golden), max(tensors[name].max() for tensors in golden)]
        return np.asarray(generator.choice(bounds, real.shape), real.dtype)
    return real


# Cases draw from at most this many groups; if the number changes, the same case draws another group.
MOST_GROUPS = 32
# Groups of up to this many bytes stay in memory after they are read.
MOST_KEPT = 1 << 20


class Groups(Sequence[Tensors]):
    """The inputs of the first golden cases of a golden set, which are read on access."""

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
