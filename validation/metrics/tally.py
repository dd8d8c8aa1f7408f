"""Tallies of errors over elements and samples, and along the steps of sequences."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import FreeRunning, SequenceDrift, Spread, Worst
from validation.metrics.drift import is_exact
from validation.metrics.slice_sums import exponent_of

# Measures the distribution of errors over elements and samples, from pairs of outputs that are added one by one.
#
# - |a - e| over all finite elements of the golden cases, in a histogram whose buckets are the sign, exponent and first
#   6 bits of a float32's fraction: logarithmic without computing logarithms, as in HdrHistogram (Tene, 2012), with
#   every quantile within 0.8 %. 101 quantiles are stored; the greatest error is exact.
# - the SQNR of each golden sample, of which up to 101 quantiles are stored, greatest last.
# - the worst samples of golden and edge cases: the element with the greatest error, its expected and its actual value.
#
# A sample is an entry along axis 0 if the inputs and the output have the same number of them; else a whole case is one
# sample.

# The number of elements measured at a time: their float64 copies stay in the processor's cache.
CHUNK = 1 << 15
# The most quantiles and worst samples that are stored for an output, and the most outputs.
QUANTILES, MOST_WORST, MOST_OUTPUTS = 101, 5, 64
# A bucket is a float32 without its last 17 bits: positive numbers keep 8 bits of exponent and 6 bits of fraction.
_SHIFT, _BUCKETS = 17, 1 << 14


class Spreads:
    """Collects the spreads of the first `MOST_OUTPUTS` outputs at one stage."""

    def __init__(self) -> None:
        self._tallies: dict[str, OutputTally] = {}

    def add(self, output: str, case: str, golden: bool, pair: tuple[Array, Array], samples: int) -> None:
        """Add an output of a case. pair: (expected, actual).  golden: if False, only its worst samples count."""
        if output in self._tallies or len(self._tallies) < MOST_OUTPUTS:
            self._tallies.setdefault(output, OutputTally()).add(case, *pair, samples=samples, golden=golden)

    def at(self, stage: str) -> tuple[Spread, ...]:
        """The spread of each output so far. stage: name for the result."""
        return tuple(tally.spread(stage, output) for output, tally in self._tallies.items())


class OutputTally:
    """The running counts of one output: a histogram of its errors, the SQNR of its samples, and the worst samples."""

    def __init__(self) -> None:
        self.buckets = np.zeros(_BUCKETS, np.int64)
        self.elements = self.equal = self.nonfinite = 0
        self.greatest = 0.0
        self.exact = False
        self.sqnr: list[float] = []
        self.samples = 0
        self.worst: list[Worst] = []

    def add(self, case: str, expected: Array, actual: Array, samples: int = 1, golden: bool = True) -> None:
        """Add two arrays of one shape. samples: the length of axis 0 if its entries are samples; else 1.  golden:
        whether the errors count in the distribution."""
        expected, actual = np.asarray(expected), np.asarray(actual)
        self.exact = expected.dtype.kind in "biu"
        row_count = samples if expected.ndim and samples == expected.shape[0] and expected.size else 1
        expected_rows, actual_rows = expected.reshape(row_count, -1), actual.reshape(row_count, -1)
        spans = _parts(*expected_rows.shape)
        quality = np.concatenate([self._take(expected_rows[span], actual_rows[span], golden) for span in spans])
        if golden:
            self.samples += row_count
            self.sqnr += [] if self.exact else quality.tolist()
        order = np.argsort(np.where(np.isnan(quality), -np.inf, quality), kind="stable")[:MOST_WORST]
        least_bad = self.worst[-1].badness[0] if len(self.worst) == MOST_WORST else -math.inf
        worst_rows = [
            _at(case, row, expected_rows[row], actual_rows[row], value, expected.shape)
            for row, value in zip(order.tolist(), quality[order].tolist(), strict=True)
            if not -value < least_bad
        ]
        candidates = [*self.worst, *(worst_row for worst_row in worst_rows if not worst_row.fine)]
        self.worst = sorted(candidates, key=lambda row: row.badness, reverse=True)[:MOST_WORST]

    def spread(self, stage: str, output: str) -> Spread:
        """The spread of all added outputs."""
        sqnr_values = np.sort(np.array([value for value in self.sqnr if not math.isnan(value)]))
        if len(sqnr_values) > QUANTILES:
            sqnr_values = np.quantile(sqnr_values, np.linspace(0, 1, QUANTILES), method="lower")
        errors = () if self.exact else self._quantiles()
        counts = self.elements, self.samples, self.equal, self.nonfinite
        return Spread(stage, output, *counts, errors, tuple(sqnr_values.tolist()), tuple(self.worst))

    def _take(self, e: Array, a: Array, golden: bool) -> Array:
        """Count errors; returns each row's SQNR in decibels (rows,), or for integers -(number of unequal elements)."""
        if self.exact:
            unequal_counts = np.count_nonzero(e != a, axis=1)
            if golden:
                self.elements += e.size
                self.equal += e.size - int(unequal_counts.sum())
            return np.asarray(-unequal_counts, np.float64)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            values = e.astype(np.float64)
            error = np.abs(np.subtract(a, values, dtype=np.float64))
            if not np.isfinite(error).all():
                error[e == a] = 0.0  # equal infinities are no error
                values = np.where(np.isfinite(values), values, 0.0)
            unit = -exponent_of(e, a)
            signal, noise = (np.einsum("ij,ij->i", *[np.ldexp(x, unit) if unit else x] * 2) for x in (values, error))
            if golden:
                self._count(error)
            quality = np.where(noise == 0, np.inf, 10 * np.log10(signal / noise))
            return np.asarray(np.where(np.isfinite(noise), quality, np.nan))

    def _count(self, error: Array) -> None:
        self.elements += error.size
        max_error = float(error.max(initial=0.0))
        if not math.isfinite(max_error):
            finite_mask = np.isfinite(error)
            self.nonfinite += error.size - int(finite_mask.sum())
            error = error[finite_mask]
            max_error = float(error.max(initial=0.0))
        self.equal += error.size - int(np.count_nonzero(error))
        self.greatest = max(self.greatest, max_error)
        errors = np.minimum(error, np.finfo(np.float32).max) if max_error > np.finfo(np.float32).max else error
        bits = errors.astype(np.float32).reshape(-1).view(np.uint32) >> _SHIFT
        self.buckets += np.bincount(bits, minlength=_BUCKETS)

    def _quantiles(self) -> tuple[float, ...]:
        total = int(self.buckets.sum())
        if not total:
            return ()
        ranks = np.ceil(np.linspace(0, 1, QUANTILES) * total).clip(1)
        bucket_indices = np.searchsorted(np.cumsum(self.buckets), ranks)
        lower_edges = (bucket_indices.astype(np.uint32) << _SHIFT).view(np.float32).astype(np.float64)
        centres = (
            ((bucket_indices.astype(np.uint32) << _SHIFT) | (1 << (_SHIFT - 1))).view(np.float32).astype(np.float64)
        )
        quantiles = np.minimum(np.where(bucket_indices == 0, 0.0 * lower_edges, centres), self.greatest)
        quantiles[-1] = self.greatest
        return tuple(quantiles.tolist())


def samples_of(inputs: Iterable[Array], output: Array) -> int:
    """The number of samples in an output: the length of its axis 0 if every input has that length too; else 1."""
    sizes = {np.shape(value)[0] for value in inputs if np.ndim(value)}
    return int(output.shape[0]) if output.ndim and sizes == {output.shape[0]} else 1


def _parts(rows: int, length: int) -> list[slice]:
    step = max(1, CHUNK // max(length, 1))
    return [slice(start, start + step) for start in range(0, rows, step)] or [slice(0, 0)]


def _at(case: str, row: int, e: Array, a: Array, quality: float, shape: tuple[int, ...]) -> Worst:
    """The sample (e, a) of row `row` of an output of `shape`, with the element of the greatest error."""
    is_integer = e.dtype.kind in "biu"
    with np.errstate(invalid="ignore", over="ignore"):
        error = (e != a) * 1.0 if is_integer else np.abs(a.astype(np.float64) - e.astype(np.float64))
        error = np.where(e == a, 0.0, np.where(np.isnan(error), np.inf, error))
    flat_index = int(np.argmax(error)) if error.size else 0
    index = (
        tuple(int(coordinate) for coordinate in np.unravel_index(row * len(e) + flat_index, shape))
        if error.size and shape
        else ()
    )
    values = (float(e[flat_index]), float(a[flat_index])) if error.size else (0.0, 0.0)
    quality_field = {"unequal": int(-quality)} if is_integer else {"sqnr_db": quality}
    return Worst(case, row, index, *values, **quality_field)


# Measures drift along sequences: of whole sequences that each side runs with its own states, and of single steps.

# Drift is reported for at most this many parts of the sequences.
PARTS = 8


@dataclass
class _Energies:
    """By step: energy of the signal, energy of the error, and number of rows; float64 (steps,) each."""

    signal: Array = field(default_factory=lambda: np.zeros(0))
    error: Array = field(default_factory=lambda: np.zeros(0))
    rows: Array = field(default_factory=lambda: np.zeros(0))

    def add(self, steps: Array, expected: Array, actual: Array) -> None:
        """Add rows [n, ...]. steps: index of each row's step, [n]."""
        e = expected.reshape(len(steps), -1).astype(np.float64)
        residual = actual.reshape(len(steps), -1).astype(np.float64) - e
        missing_count = int(steps.max(initial=-1)) + 1 - len(self.signal)
        if missing_count > 0:
            self.signal, self.error, self.rows = (
                np.pad(sums, (0, missing_count)) for sums in (self.signal, self.error, self.rows)
            )
        np.add.at(self.rows, steps, 1)
        np.add.at(self.signal, steps, (e * e).sum(1))
        np.add.at(self.error, steps, (residual * residual).sum(1))

    def levels(self, width: int, count: int) -> tuple[float, ...]:
        """The SQNR in dB of each of `count` parts of `width` steps; NaN for parts without rows."""
        spans = [slice(index * width, (index + 1) * width) for index in range(count)]
        return tuple(
            _level(self.signal[span], self.error[span]) if self.rows[span].any() else math.nan for span in spans
        )


def _level(signal: Array, error: Array) -> float:
    signal_sum, error_sum = float(signal.sum()), float(error.sum())
    if not math.isfinite(error_sum):
        return math.nan
    return math.inf if error_sum == 0 else 10 * math.log10(signal_sum / error_sum) if signal_sum > 0 else -math.inf


@dataclass
class _Output:
    free: _Energies = field(default_factory=_Energies)
    single: _Energies = field(default_factory=_Energies)
    sequences: list[SequenceDrift] = field(default_factory=list)
    decides: bool = True


class Along:
    """Collects the drift of outputs along sequences. A whole sequence is added like a case in `Spreads`."""

    def __init__(self) -> None:
        self._outputs: dict[str, _Output] = {}

    def add(self, output: str, case: str, golden: bool, pair: tuple[Array, Array], samples: int) -> None:
        """Add an output of a sequence, (expected, actual) with steps along axis 0. An output with one entry (a final
        state, or a sequence of one step) is ignored, because it has no drift along steps.

        golden, samples: as in `Spreads.add`.
        """
        expected, actual = pair
        if not golden or samples < 2:
            return
        course = self._outputs.setdefault(output, _Output())
        course.decides &= is_exact(expected) or (expected.ndim > 2 and expected.shape[-1] > 1)
        steps, energies = np.arange(len(expected)), _Energies()
        for course_sums in (energies, course.free):
            course_sums.add(steps, expected, actual)
        level = _level(energies.signal, energies.error)
        course.sequences.append(SequenceDrift(case, len(steps), level, _first_other(expected, actual, course.decides)))

    def add_steps(self, output: str, steps: Sequence[int], pair: tuple[Array, Array]) -> None:
        """Add rows of single steps. steps: their positions; outputs without whole rows for each step are ignored."""
        expected, actual = pair
        rows, remainder = divmod(len(expected) if expected.ndim else 0, max(len(steps), 1))
        if rows and not remainder:
            self._outputs.setdefault(output, _Output()).single.add(np.repeat(steps, rows), expected, actual)

    def at(self, stage: str) -> tuple[FreeRunning, ...]:
        """The drift of each output with sequences, in decibels with four digits. stage: name for the result."""
        return tuple(_summarize(stage, name, course) for name, course in self._outputs.items() if course.sequences)


class StepSpreads(Spreads):
    """`Spreads` of golden cases whose rows are steps, which are also added to `along`. places: by case name, the
    positions of the rows in their sequences."""

    def __init__(self, along: Along, places: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._along, self._places = along, places

    def add(self, output: str, case: str, golden: bool, pair: tuple[Array, Array], samples: int) -> None:
        """Add an output of a case, as `Spreads.add` does."""
        super().add(output, case, golden, pair, samples)
        if golden and case in self._places:
            self._along.add_steps(output, self._places[case], pair)


def _summarize(stage: str, name: str, sums: _Output) -> FreeRunning:
    max_steps = max(sequence.steps for sequence in sums.sequences)
    width = -(-max_steps // PARTS)
    count = -(-max_steps // width)
    free_levels, single_levels = (
        tuple(float(f"{level:.4g}") for level in energies.levels(width, count)) for energies in (sums.free, sums.single)
    )
    starts = tuple(range(0, max_steps, width))
    return FreeRunning(stage, name, sums.decides, tuple(sums.sequences), starts, free_levels, single_levels)


def _first_other(expected: Array, actual: Array, decides: bool) -> int | None:
    """The first step whose decision differs; None if none does, or if there are no decisions."""
    if not decides:
        return None
    label_pair = (expected, actual) if is_exact(expected) else (expected.argmax(-1), actual.argmax(-1))
    differ_mask = (label_pair[0] != label_pair[1]).reshape(len(expected), -1).any(1)
    return int(differ_mask.argmax()) if differ_mask.any() else None
