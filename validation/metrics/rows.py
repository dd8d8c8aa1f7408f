"""Decisions and distributions along an output's last axis: classes, tokens, anything that is ranked.

Definitions for a row with expected logits e and actual logits a, P = softmax(e), Q = softmax(a), natural logarithms:

- agreement     the argmax of a is also a maximum of e, so ties in e agree; a row with NaN agrees with nothing
- top_k         |top_k(e) and top_k(a)| / k, averaged over the rows
- kl            sum P log(P / Q), the Kullback-Leibler divergence (Kullback and Leibler, "On Information and
                Sufficiency", 1951), in nats
- js            (KL(P, M) + KL(Q, M)) / 2 with M = (P + Q) / 2, the Jensen-Shannon divergence (Lin, "Divergence Measures
                Based on the Shannon Entropy", 1991), in nats, at most log 2

A constant added to a row changes none of them.
"""

import math
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.pairs import blocks_of

# Elements of the rows that are compared at a time.
CHUNK = 1 << 16
TOP_K = 5
_SUMS = ("count", "agreeing", "shared", "finite", "kl_sum", "js_sum")


@dataclass(frozen=True)
class RowSums:
    """Sums and maxima over rows; `merge` of two parts gives those of the whole.

    count: rows.  agreeing: rows with the same decision.  shared: sum of top_k.  finite: rows whose values are all
    finite; kl_sum, js_sum, kl_max, js_max are over these.  worst: index of the row with the largest js.  k: of top_k,
    at most the length of a row.
    """

    count: int = 0
    agreeing: int = 0
    shared: float = 0.0
    finite: int = 0
    kl_sum: float = 0.0
    js_sum: float = 0.0
    kl_max: float = 0.0
    js_max: float = 0.0
    worst: tuple[int, ...] | None = None
    k: int = TOP_K

    @property
    def argmax_agreement(self) -> float:
        """Share of rows with the same decision; 1 without rows."""
        return self.agreeing / self.count if self.count else 1.0

    @property
    def flips(self) -> int:
        """Rows whose decision changed."""
        return self.count - self.agreeing

    @property
    def top_k_agreement(self) -> float:
        """Mean share of the k likeliest that both have; 1 without rows."""
        return self.shared / self.count if self.count else 1.0

    @property
    def kl(self) -> float:
        """Mean Kullback-Leibler divergence in nats; NaN when a row was not finite."""
        return self._average(self.kl_sum)

    @property
    def js(self) -> float:
        """Mean Jensen-Shannon divergence in nats; NaN when a row was not finite."""
        return self._average(self.js_sum)

    def _average(self, total: float) -> float:
        if self.finite < self.count:
            return math.nan
        return total / self.count if self.count else 0.0

    def merge(self, other: "RowSums") -> "RowSums":
        """The rows of both."""
        return RowSums(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            kl_max=max(self.kl_max, other.kl_max),
            js_max=max(self.js_max, other.js_max),
            worst=max(self, other, key=lambda part: (part.js_max, part.worst is not None)).worst,
            k=min(self.k, other.k) if self.count and other.count else self.k if self.count else other.k,
        )


def measure_rows(expected: Array, actual: Array, k: int = TOP_K, divergences: bool = True) -> RowSums:
    """Compare two floating-point arrays of one shape, row by row along the last axis; a scalar has no rows.

    divergences: without, only decisions are compared, in a fraction of the time, and top_k, kl and js are NaN.
    """
    if expected.ndim == 0 or expected.size == 0:
        return RowSums(k=k)
    length, shape = expected.shape[-1], expected.shape[:-1]
    total, start = RowSums(k=min(k, length)), 0
    for block in blocks_of(shape, max(1, CHUNK // length)):
        e, a = (array[block].reshape(-1, length) for array in (expected, actual))
        total = total.merge(_measure(e, a, start, shape, total.k, divergences))
        start += len(e)
    return total


def _measure(expected: Array, actual: Array, start: int, shape: tuple[int, ...], k: int, divergences: bool) -> RowSums:
    if not divergences:
        return RowSums(len(expected), _count_agreeing(expected, actual), math.nan, k=k)
    e, a = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(e).all(axis=1) & np.isfinite(a).all(axis=1)
    kl, js = _divergences(e[finite], a[finite])
    at = None
    if len(js):
        row = start + int(np.flatnonzero(finite)[np.argmax(js)])
        at = tuple(int(index) for index in np.unravel_index(row, shape)) if shape else ()
    return RowSums(
        len(e), _count_agreeing(e, a), _sum_top_k_share(e, a, k), int(finite.sum()), float(kl.sum()), float(js.sum()),
        float(kl.max(initial=0)), float(js.max(initial=0)), at, k,
    )  # fmt: skip


def _count_agreeing(e: Array, a: Array) -> int:
    chosen = np.argmax(a, axis=1)[:, None]
    same = np.take_along_axis(e, chosen, axis=1)[:, 0] == e.max(axis=1)
    return int((same & ~np.isnan(np.take_along_axis(a, chosen, axis=1)[:, 0])).sum())


def _sum_top_k_share(e: Array, a: Array, k: int) -> float:
    """Sum over the rows of the share of the k likeliest in `a` that are as likely as the k-th in `e`."""
    if k == e.shape[1]:
        return float((~np.isnan(a).any(axis=1)).sum())
    least = np.partition(e, -k, axis=1)[:, -k]
    top = np.argpartition(a, -k, axis=1)[:, -k:]
    inside = np.take_along_axis(e, top, axis=1) >= least[:, None]
    return float((inside & ~np.isnan(np.take_along_axis(a, top, axis=1))).sum() / k)


def _divergences(e: Array, a: Array) -> tuple[Array, Array]:
    log_p, log_q = _log_softmax(e), _log_softmax(a)
    p, q = np.exp(log_p), np.exp(log_q)
    kl = np.einsum("ij,ij->i", p, log_p - log_q)
    log_m = np.log(np.maximum((p + q) / 2, np.finfo(np.float64).tiny))  # where it is smaller, so are its factors
    js = (np.einsum("ij,ij->i", p, log_p - log_m) + np.einsum("ij,ij->i", q, log_q - log_m)) / 2
    return np.maximum(kl, 0), np.clip(js, 0, math.log(2))  # rounding may leave them a little outside


def _log_softmax(values: Array) -> Array:
    shifted = values - values.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
