"""Metrics of drift between two outputs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.slice_sums import SliceSums, exponent_of, flat_parts, sampled_parts
from validation.metrics.slices import Slices, blocks_of, worst_slice

# Decisions and distributions along an output's last axis: classes, tokens, anything that is ranked.
#
# Definitions for a row with expected logits e and actual logits a, P = softmax(e), Q = softmax(a), natural logarithms:
#
# - agreement     the argmax of a is also a maximum of e: any of several equal maxima agrees; NaN agrees with nothing
# - top_k         |top_k(e) and top_k(a)| / k, averaged over the rows
# - kl            sum P log(P / Q), the Kullback-Leibler divergence (Kullback and Leibler, "On Information and
#                 Sufficiency", 1951), in nats
# - js            (KL(P, M) + KL(Q, M)) / 2 with M = (P + Q) / 2, the Jensen-Shannon divergence (Lin, "Divergence
#                 Measures Based on the Shannon Entropy", 1991), in nats, at most log 2
#
# A constant added to a row changes none of them.
#
# For decisions: the number of rows by class in the expected output, and the number of these rows that changed. The lead
# of a row is its greatest value less the next one. A row is clear if its lead is at least the row's standard deviation:
# one in nine rows of ten normal numbers is clear, and most rows of a trained classifier. The decision of a single value
# is its side of 0, or of 0.5 if all values are from 0 to 1. A row of one or two values is clear if its lead is at least
# a quarter of the root mean square of the leads of all cases: relative to its own case, a single row is always clear.

# The number of elements that are compared at a time.
CHUNK = 1 << 16
TOP_K = 5
_SUMS = ("count", "agreeing", "shared", "finite", "kl_sum")
# Upper limits: rows of an array whose lead is measured; changed rows of an output whose lead is stored; distinct
# integers that count as classes.
MOST_LOOKED_AT, MOST_AHEAD, MOST_CLASSES = 256, 64, 1 << 16
# The most leads of a class that are stored over all arrays.
MOST_LEADS = 4096
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class RowSums:
    """Sums and maxima over rows; `merge` of two parts returns those of the whole.

    count: rows.  agreeing: rows with the same decision.  shared: sum of top_k.  finite: rows whose values are all
    finite; kl_sum, kl_max, js_max are over these rows.  worst: index of the row with the largest js.  k: of top_k, at
    most the length of a row.  named: number of rows by expected class.  changed: number of rows with another decision,
    by expected class.  ahead: the greatest expected leads of changed rows, at most `MOST_AHEAD`.  leads: expected leads
    by class, of the first rows of each array; for three or more values, in units of the row's standard deviation.
    classes: number of values in a row; 0 for integers.
    """

    count: int = 0
    agreeing: int = 0
    shared: float = 0.0
    finite: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    js_max: float = 0.0
    worst: tuple[int, ...] | None = None
    k: int = TOP_K
    named: Mapping[int, int] = field(default_factory=dict)
    changed: Mapping[int, int] = field(default_factory=dict)
    ahead: tuple[float, ...] = ()
    leads: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    classes: int = 0

    @property
    def looked_at(self) -> dict[int, int]:
        """The number of rows with a measured lead, by class."""
        return {name: len(leads) for name, leads in self.leads.items()}

    @property
    def clear(self) -> dict[int, int]:
        """The number of clear rows among those of `looked_at`, by class."""
        least_lead = 1.0
        if self.classes < 3:
            leads = [lead for class_leads in self.leads.values() for lead in class_leads]
            least_lead = max(math.sqrt(sum(lead * lead for lead in leads) / max(len(leads), 1)) / 4, _TINY)
        return {name: sum(lead >= least_lead for lead in leads) for name, leads in self.leads.items()}

    @property
    def names_classes(self) -> bool:
        """Whether the rows are decisions between classes: several classes occur, and at least half of rows are
        clear."""
        return len(self.named) > 1 and 2 * sum(self.clear.values()) >= sum(self.looked_at.values())

    @property
    def argmax_agreement(self) -> float:
        """Share of rows with the same decision; 1 without rows."""
        return self.agreeing / self.count if self.count else 1.0

    @property
    def flips(self) -> int:
        """The number of changed decisions, including those of single values, whose argmax cannot change."""
        return sum(self.changed.values()) if self.named else self.count - self.agreeing

    @property
    def top_k_agreement(self) -> float:
        """Mean share of the k likeliest classes that are the same on both sides; 1 without rows."""
        return self.shared / self.count if self.count else 1.0

    @property
    def kl(self) -> float:
        """Mean Kullback-Leibler divergence in nats; NaN when a row was not finite."""
        if self.finite < self.count:
            return math.nan
        return self.kl_sum / self.count if self.count else 0.0

    def merge(self, other: "RowSums") -> "RowSums":
        """The sums over the rows of both parts."""
        return RowSums(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            kl_max=max(self.kl_max, other.kl_max),
            js_max=max(self.js_max, other.js_max),
            worst=max(self, other, key=lambda part: (part.js_max, part.worst is not None)).worst,
            k=min(self.k, other.k) if self.count and other.count else self.k if self.count else other.k,
            named=Counter(self.named) + Counter(other.named),
            changed=Counter(self.changed) + Counter(other.changed),
            leads={
                name: (self.leads.get(name, ()) + other.leads.get(name, ()))[:MOST_LEADS]
                for name in {**self.leads, **other.leads}
            },
            ahead=tuple(sorted((*self.ahead, *other.ahead), reverse=True)[:MOST_AHEAD]),
            classes=max(self.classes, other.classes),
        )


def measure_rows(
    expected: Array, actual: Array, k: int = TOP_K, divergences: bool = True, counted: Array | None = None
) -> RowSums:
    """Compare two floating-point arrays of one shape, row by row along the last axis; a scalar has no rows.

    divergences: if False, only decisions are compared, in a fraction of the time; top_k and kl are then NaN.
    counted: bool, of the rows' shape; decisions of rows with False are left out.
    expected, actual: [.., classes].  k: of the top-k agreement.
    """
    if expected.ndim == 0 or expected.size == 0:
        return RowSums(k=k)
    length, shape = expected.shape[-1], expected.shape[:-1]
    start, k = 0, min(k, length)
    total = RowSums(k=k) if divergences else None  # whose merge leaves out a divergence that is NaN
    for block in blocks_of(shape, max(1, CHUNK // length)):
        e, a = (array[block].reshape(-1, length) for array in (expected, actual))
        if divergences:
            sums = _measure(e, a, start, shape, k)
        else:
            if counted is not None:
                e, a = (flat[counted[block].reshape(-1)] for flat in (e, a))
            max_rows = max(0, MOST_LOOKED_AT - sum(total.looked_at.values())) if total else MOST_LOOKED_AT
            sums = _measure_decisions(e, a, k, max_rows)
        total = total.merge(sums) if total else sums
        start += len(e)
    return total or RowSums(k=k)


def _measure(expected: Array, actual: Array, start: int, shape: tuple[int, ...], k: int) -> RowSums:
    e, a = expected.astype(np.float64), actual.astype(np.float64)
    finite_mask = np.isfinite(e).all(axis=1) & np.isfinite(a).all(axis=1)
    kl, js = _divergences(e[finite_mask], a[finite_mask])
    worst_index = None
    if len(js):
        row = start + int(np.flatnonzero(finite_mask)[np.argmax(js)])
        worst_index = tuple(int(index) for index in np.unravel_index(row, shape)) if shape else ()
    return RowSums(
        len(e), int(_agree(e, a).sum()), _sum_top_k_share(e, a, k), int(finite_mask.sum()), float(kl.sum()),
        float(kl.max(initial=0)), float(js.max(initial=0)), worst_index, k,
    )  # fmt: skip


def _measure_decisions(e: Array, a: Array, k: int, max_rows: int) -> RowSums:
    """The sums of decisions of rows [rows, classes]. max_rows: number of rows whose lead is measured."""
    agree_mask, class_count, threshold = _agree(e, a), e.shape[1], 0.0
    if class_count == 1:
        threshold = 0.5 if e.min(initial=0.0) >= 0 and e.max(initial=1.0) <= 1 else 0.0
        decisions = (e[:, 0] > threshold).astype(int)
        agreement = agree_mask & ((e > threshold) == (a > threshold))[:, 0]
    else:
        decisions, agreement = np.argmax(e, axis=1), agree_mask
    with np.errstate(invalid="ignore", over="ignore"):
        lead, lost_leads = _lead(e[:max_rows], threshold), np.sort(_lead(e[~agreement], threshold))[::-1][:MOST_AHEAD]
        lead = lead / np.maximum(e[:max_rows].std(axis=1), _TINY) if class_count > 2 else lead
    leads = dict[int, list[float]]()
    for name, value in zip(decisions[:max_rows].tolist(), lead.tolist(), strict=True):
        leads.setdefault(name, []).append(value)
    return RowSums(
        len(e), int(agree_mask.sum()), math.nan, k=k, named=count_by_class(decisions),
        changed=count_by_class(decisions[~agreement]), ahead=tuple(lost_leads.tolist()), classes=class_count,
        leads={name: tuple(leads[name]) for name in sorted(leads)},
    )  # fmt: skip


def _lead(rows: Array, middle: float) -> Array:
    """The greatest value of each row less the next one, float64 (rows,). For single values: the distance from `middle`
    times the root of 2, because its error is that of one number and not of two."""
    if rows.shape[1] == 1:
        return np.asarray(math.sqrt(2) * np.abs(rows[:, 0].astype(np.float64) - middle))
    top_two = np.partition(rows, -2, axis=1)[:, -2:].astype(np.float64)
    return np.asarray(top_two[:, 1] - top_two[:, 0])


def measure_ids(expected: Array, actual: Array) -> RowSums | None:
    """The sums of decisions of integers, each a class; None with more than `MOST_CLASSES` classes."""
    e, agreement = expected.reshape(-1), (expected == actual).reshape(-1)
    id_counts = count_by_class(e)
    if len(id_counts) > MOST_CLASSES:
        return None
    return RowSums(e.size, int(agreement.sum()), math.nan, named=id_counts, changed=count_by_class(e[~agreement]))


def count_by_class(classes: Array) -> dict[int, int]:
    """The number of occurrences of each class."""
    if not classes.size:
        return {}
    class_ids, counts = np.unique(classes, return_counts=True)
    return dict(zip(class_ids.tolist(), counts.tolist(), strict=True))


def _agree(e: Array, a: Array) -> Array:
    """Whether the argmax of each row of `a` is also a maximum of the expected row, bool (rows,)."""
    chosen = np.arange(len(a)), np.argmax(a, axis=1)
    return np.asarray((e[chosen] == e.max(axis=1)) & ~np.isnan(a[chosen]))


def _sum_top_k_share(e: Array, a: Array, k: int) -> float:
    """Sum over the rows of the share of the k greatest values of `a` whose values in `e` are among its k greatest."""
    if k == e.shape[1]:
        return float((~np.isnan(a).any(axis=1)).sum())
    least_values = np.partition(e, -k, axis=1)[:, -k]
    top_indices = np.argpartition(a, -k, axis=1)[:, -k:]
    member_mask = np.take_along_axis(e, top_indices, axis=1) >= least_values[:, None]
    return float((member_mask & ~np.isnan(np.take_along_axis(a, top_indices, axis=1))).sum() / k)


def _divergences(e: Array, a: Array) -> tuple[Array, Array]:
    """KL and Jensen-Shannon divergence of each row, [rows] each, from finite logits [rows, classes]."""
    log_p, log_q = log_softmax(e), log_softmax(a)
    p, q = np.exp(log_p), np.exp(log_q)
    kl = np.einsum("ij,ij->i", p, log_p - log_q)
    # A mean below the least normal number is raised to that number; its factor is as small, and the product negligible.
    log_m = np.log(np.maximum((p + q) / 2, np.finfo(np.float64).tiny))
    js = (np.einsum("ij,ij->i", p, log_p - log_m) + np.einsum("ij,ij->i", q, log_q - log_m)) / 2
    return np.maximum(kl, 0), np.clip(js, 0, math.log(2))  # rounding may leave them a little outside


def log_softmax(logits: Array) -> Array:
    """Logarithms of the probabilities [rows, classes]; NaN in rows with NaN or +inf."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted_logits = logits - logits.max(axis=1, keepdims=True)
        return np.asarray(shifted_logits - np.log(np.exp(shifted_logits).sum(axis=1, keepdims=True)))


# The drift of an output: metrics over pairs of arrays, in one pass; parts merge into the drift of the whole.
#
# Definitions (e expected, a actual, sums over all finite elements, float64 throughout):
#
# - max_abs   max |a - e|
# - max_rel   max |a - e| / max |e|: relative to the output's peak. The element-wise ratio |a - e| / |e| is unbounded
#             wherever e crosses zero and says nothing there.
# - sqnr_db   10 log10(sum e^2 / sum (a - e)^2), the signal-to-quantization-noise ratio (Widrow and Kollar,
#             "Quantization Noise", 2008); +inf for identical arrays
# - cosine    sum e a / sqrt(sum e^2 sum a^2); 1 when both are zero
# - centered_sqnr_db  10 log10(sum (e - m)^2 / sum (a - e)^2) = -10 log10(1 - R^2), m the mean of that feature over the
#             samples: an offset, however large, is no signal
# - slice_sqnr_db     sqnr_db of the worst slice: of one index of one axis (`slices`)
# - quartile_sqnr_db  centered_sqnr_db that three of four samples reach: the variation of all samples over the mean
#             squared error of a sample. A few samples with much greater errors do not affect it (`SampleErrors`)
#
# The last three need the number of samples. Decisions along the last axis cost more and are measured on request.
#
# Sums of float64 squares that would overflow or underflow are computed in units of a power of two (`exponent`).
#
# A pair of elements counts as non-finite, and never passes, unless both are finite or the same infinity (a mask). Equal
# infinities are left out of the sums. Integers and booleans are decisions, which are compared for equality.
#
# The arrays are read once, in order, and never copied whole.

# The number of bins of `SampleErrors` per factor of two: 0.1 dB each.
STEPS = 32


@dataclass(frozen=True)
class SampleErrors:
    """A logarithmic histogram of the samples' mean squared errors (as HdrHistogram: Tene, 2012).

    counts: samples by floor(STEPS log2(mean squared error)).  exact: number of samples without an error. A few samples
    rightly have much greater errors, because an element rounded to the other quantization step; they change a mean, but
    not a quantile. The histogram has at most some ten thousand bins, for any number of samples.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    exact: int = 0

    @classmethod
    def of(cls, energies: Array, exponent: int) -> "SampleErrors":
        """The histogram of the mean squared errors `energies` (samples,), given in units of 2^(2 exponent)."""
        positive_energies = energies[(energies > 0) & np.isfinite(energies)]
        keys = np.floor(STEPS * (np.log2(positive_energies) + 2 * exponent)).astype(np.int64)
        least_key = int(keys.min(initial=0))
        counts = np.bincount(keys - least_key)
        bin_indices = np.flatnonzero(counts)
        zeros = len(energies) - int(np.count_nonzero(energies))
        return cls(dict(zip((bin_indices + least_key).tolist(), counts[bin_indices].tolist(), strict=True)), zeros)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.exact + sum(self.counts.values())

    def merge(self, other: "SampleErrors") -> "SampleErrors":
        """The histogram of both parts' samples."""
        return SampleErrors(Counter(self.counts) + Counter(other.counts), self.exact + other.exact)

    def log2_at(self, rank: int) -> float:
        """log2 of the mean squared error that `rank` samples do not exceed; -inf if these samples have no error."""
        if rank <= self.exact:
            return -math.inf
        sample_count = self.exact
        for key in sorted(self.counts):
            if (sample_count := sample_count + self.counts[key]) >= rank:
                return (key + 1) / STEPS
        return math.inf


_SQUARES = ("error_sq", "expected_sq", "actual_sq", "dot", "centered_sq")
_ERROR_SUMS = ("count", "error_sq", "expected_sq", "actual_sq", "dot", "nonfinite", "infinite")


@dataclass(frozen=True)
class Drift:
    """Sums and maxima over compared elements; `merge` of two parts returns the drift of the whole.

    count: elements compared.  peak: max |e|.  error_sq, expected_sq, actual_sq, dot: sums.  centered_sq: sum of
    (e - m)^2, m the mean of that feature over the samples.  nonfinite: pairs with NaN, or an infinity that the other
    side lacks.  infinite: equal infinities, left out.  worst_index: of max_abs, or of the first non-finite element.
    mismatches: unequal elements of an integer output; None for floating point.  rows, elements: decisions of rows and
    of elements, on request.  slices, samples: if the number of samples is known.  exponent: sums of squares and of
    products are in units of 2^(2 exponent).
    """

    count: int = 0
    max_abs: float = 0.0
    peak: float = 0.0
    error_sq: float = 0.0
    expected_sq: float = 0.0
    actual_sq: float = 0.0
    dot: float = 0.0
    centered_sq: float = 0.0
    nonfinite: int = 0
    infinite: int = 0
    worst_index: tuple[int, ...] | None = None
    mismatches: int | None = None
    rows: RowSums | None = None
    elements: RowSums | None = None
    slices: Slices | None = field(default=None, compare=False)
    samples: SampleErrors | None = field(default=None, compare=False)
    exponent: int = 0

    @property
    def max_rel(self) -> float:
        """Greatest error relative to the greatest expected magnitude."""
        return self.max_abs / self.peak if self.peak else math.inf if self.max_abs else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; +inf without error, -inf without signal."""
        return _decibels(self.expected_sq, self.error_sq)

    @property
    def centered_sqnr_db(self) -> float:
        """SQNR against the variation over the samples; +inf without error, -inf without variation."""
        return _decibels(self.centered_sq, self.error_sq)

    @property
    def slice_sqnr_db(self) -> float:
        """SQNR of the worst slice by `worst_slice` without a limit; +inf without slices."""
        weakest_slice = worst_slice(self.slices, None) if self.slices else None
        return math.inf if weakest_slice is None else weakest_slice.sqnr_db

    @property
    def quartile_sqnr_db(self) -> float:
        """The SQNR against the variation that three of four samples reach, in decibels; +inf without an error."""
        return self.sample_sqnr_db(-(-3 * self.samples.samples // 4)) if self.samples else math.inf

    def sample_sqnr_db(self, rank: int) -> float:
        """The SQNR against the variation that `rank` samples reach, in decibels."""
        log2 = self.samples.log2_at(rank) if self.samples else -math.inf
        if log2 == -math.inf:
            return math.inf
        mean = self.centered_sq / self.count if self.count else 0.0
        return 10 * (math.log10(mean) + (2 * self.exponent - log2) * math.log10(2)) if mean else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two outputs as vectors."""
        norm = math.sqrt(self.expected_sq) * math.sqrt(self.actual_sq)
        return self.dot / norm if norm else float(self.expected_sq == self.actual_sq)

    @property
    def argmax_agreement(self) -> float:
        """Share of rows with the same argmax; for integer outputs, share of equal elements. 1 without rows or elements.

        NaN, which passes no limit, for floating point without measured decisions.
        """
        if self.mismatches is not None:
            return self.agreement
        return self.rows.argmax_agreement if self.rows else math.nan if self.count else 1.0

    @property
    def agreement(self) -> float:
        """The share of equal elements of an integer output; 1 for an output without elements."""
        return 1 - (self.mismatches or 0) / self.count if self.count else 1.0

    def scale_to(self, exponent: int) -> "Drift":
        """The same drift in units of 2^exponent."""
        if exponent == self.exponent:
            return self
        factor = math.ldexp(1.0, min(self.exponent - exponent, 400))
        sums = {name: getattr(self, name) * factor * factor for name in _SQUARES}
        slices = self.slices.scale(factor) if self.slices else None
        return replace(self, **sums, slices=slices, exponent=exponent)

    def merge(self, other: "Drift") -> "Drift":
        """The drift of both parts together."""
        if self.exponent != other.exponent:
            common_exponent = max((drift.exponent for drift in (self, other) if drift.peak or drift.max_abs), default=0)
            return self.scale_to(common_exponent).merge(other.scale_to(common_exponent))
        slices = _merge(self.slices, other.slices)
        worst_side = max(self, other, key=lambda part: (part.nonfinite > 0, part.max_abs, part.worst_index is not None))
        mismatches = (self.mismatches or 0) + (other.mismatches or 0)
        return Drift(
            **{name: getattr(self, name) + getattr(other, name) for name in _ERROR_SUMS},
            max_abs=max(self.max_abs, other.max_abs),
            peak=max(self.peak, other.peak),
            worst_index=worst_side.worst_index,
            mismatches=None if self.mismatches is None and other.mismatches is None else mismatches,
            rows=_merge(self.rows, other.rows),
            elements=_merge(self.elements, other.elements),
            centered_sq=slices.centered_sq if slices else self.centered_sq + other.centered_sq,
            slices=slices,
            samples=_merge(self.samples, other.samples),
            exponent=self.exponent,
        )


def measure(
    expected: Array,
    actual: Array,
    decisions: bool = False,
    threads: int = 0,
    samples: int | None = None,
    counted: Array | None = None,
    elements: bool = False,
) -> Drift:
    """The drift of an output from the expected one.

    decisions: whether to also compare the argmax of rows along the last axis, or the classes of integers.
    counted: as in `measure_rows`.  elements: whether each value may be a decision; `counted` then has the elements'
    shape.  threads: number of threads; 0 for as many as save time.  samples: number of samples along axis 0, or 1 if
    the whole array is one sample; if set, slices and the variation over the samples are measured.
    expected, actual: arrays of one shape, which may be memory-mapped.
    Raises ValueError when shapes or kinds differ, and for complex numbers.
    """
    expected, actual = np.asanyarray(expected), np.asanyarray(actual)
    if expected.shape != actual.shape:
        raise ValueError(f"expected shape {expected.shape}, got {actual.shape}")
    if expected.dtype.kind == actual.dtype.kind == "c":
        raise ValueError(
            "complex numbers are not compared; give their real and imaginary parts as outputs of their own"
        )
    if is_exact(expected) != is_exact(actual) or "c" in expected.dtype.kind + actual.dtype.kind:
        raise ValueError(f"expected {expected.dtype}, got {actual.dtype}")
    is_integer = is_exact(expected)
    exponent = exponent_of(expected, actual)
    pair, more = (expected, actual, exponent, threads), dict[str, Any]()
    sums = None if samples is None else SliceSums(expected.shape, samples)
    energies = np.zeros(sums.samples if sums else 0)
    parts = sampled_parts(*pair, sums, energies) if sums else flat_parts(*pair)
    total = reduce(_merge, (Drift(**fields) for fields in parts), None)
    total = total or Drift(mismatches=0 if is_integer else None, exponent=exponent)
    if sums:
        slices = sums.slices()
        errors = SampleErrors.of(energies * (sums.samples / max(expected.size, 1)), exponent)
        more = {"slices": slices, "centered_sq": slices.centered_sq, "samples": errors}
    if decisions and is_integer:
        more["rows"] = measure_ids(expected, actual)
    elif decisions:
        column_pair = (expected[..., None], actual[..., None])
        row_pair = column_pair if expected.ndim == 1 and samples == len(expected) else (expected, actual)
        more["rows"] = measure_rows(*row_pair, TOP_K, False, None if elements else counted)
        more["elements"] = measure_rows(*column_pair, TOP_K, False, counted) if elements else None
    return replace(total, **more)


def is_exact(array: Array) -> bool:
    """Whether the array holds decisions (integers, booleans), which are compared for equality."""
    return array.dtype.kind in "biu"


Part = TypeVar("Part", Slices, RowSums, SampleErrors, Drift)


def _merge(left: Part | None, right: Part | None) -> Part | None:
    return left.merge(right) if left and right else left or right


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
