"""An output as a distribution: the engine's rows against the original model's.

The promise is about the original model, because errors of quantization and of the engine add up. The note of each
check has the graph's own value, which shows which of the two broke the promise. Beside divergences of rows
(`metrics.rows`) these are measured:

- ece    sum over bins of |share that is right - mean confidence| * share of rows, over 15 bins of equal width of the
         greatest probability (Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian Binning", 2015;
         Guo et al., "On Calibration of Modern Neural Networks", 2017, who use 15)
- brier  mean over the rows of sum_i (p_i - [i is the answer])^2 (Brier, "Verification of Forecasts Expressed in Terms
         of Probability", 1950); from 0 to 2
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Tensors
from validation.comparison.terms import RowLimits
from validation.contracts.sequences import rows_of
from validation.golden.golden_set import Case
from validation.metrics.drift import is_exact
from validation.metrics.rows import TOP_K, RowSums, measure_rows

BINS = 15


class Forecasts:
    """Rows of probabilities (n, classes), with the greatest of each row (`confidence`) and its index (`decision`)."""

    def __init__(self, probabilities: Array) -> None:
        self.probabilities = probabilities
        self.confidence, self.decision = probabilities.max(axis=1), probabilities.argmax(axis=1)

    def losses(self, answers: Array) -> Array:
        """The Brier loss of each row. answers: (n,), a class each; one that is no class counts as all classes wrong."""
        known = (answers >= 0) & (answers < self.probabilities.shape[1])
        at = np.where(known, answers, 0).astype(np.int64)[:, None]
        given = np.take_along_axis(self.probabilities, at, axis=1)[:, 0] * known
        return np.asarray(np.square(self.probabilities).sum(axis=1) - 2 * given + 1)


class CalibrationSums:
    """Sums over rows as they come. bins: number of rows, of right ones, and confidence, by bin of the confidence."""

    def __init__(self) -> None:
        self.bins = np.zeros((3, BINS))
        self.loss, self.broken = 0.0, 0

    def add(self, forecasts: Forecasts, answers: Array) -> None:
        """Add rows. answers: (n,), the right class of each row. A row with NaN makes both results NaN."""
        confidence = forecasts.confidence
        finite = np.isfinite(confidence)
        self.broken += int((~finite).sum())
        bins = np.minimum((confidence[finite] * BINS).astype(np.int64), BINS - 1)
        right = (forecasts.decision == answers)[finite].astype(np.float64)
        for index, weights in enumerate((np.ones(len(bins)), right, confidence[finite])):
            self.bins[index] += np.bincount(bins, weights, BINS)
        self.loss += float(forecasts.losses(answers)[finite].sum())

    @property
    def ece(self) -> float:
        """The expected calibration error; NaN when a row had NaN, 0 without rows."""
        rows, right, confidence = self.bins
        return self._mean(float(np.abs(right - confidence).sum()), float(rows.sum()))

    @property
    def brier(self) -> float:
        """The mean Brier score; NaN when a row had NaN, 0 without rows."""
        return self._mean(self.loss, float(self.bins[0].sum()))

    def _mean(self, total: float, count: float) -> float:
        return float("nan") if self.broken else total / count if count else 0.0


# Where a logit is -inf, how many nats below its row's greatest it counts: e^-200 is far below float32's smallest.
IMPOSSIBLE = 200.0
# The smallest positive float16: probabilities below it count as this one.
LEAST = 2.0**-24


class Likeness:
    """One output over the cases of a golden set. limits: what is checked.  labels: true classes of the golden rows."""

    def __init__(self, output: str, limits: RowLimits, labels: Array | None) -> None:
        self.output, self.limits = output, limits
        self.sides = {"engine": _Side(), "graph": _Side()}
        self.labels = None if labels is None else labels.reshape(-1)
        self.calibration = CalibrationSums(), CalibrationSums()
        self.rows = 0
        self.failure: Check | None = None

    def see(self, case: Case, graph: Tensors, engine: Tensors) -> None:
        """Take the outputs of the graph and of the engine in a case."""
        if self.failure is not None:
            return
        if told := self._unfit(case, graph, engine):
            self.failure = Check("engine", "contract output", self.output, case.name, None, None, False, told)
            return
        original, *sides = (as_logits(item[self.output], self.limits.values) for item in (case.expected, engine, graph))
        forecasts = [Forecasts(_softmax(item)) for item in (original, *sides)]
        answers = forecasts[0].decision
        for side, logits in zip(self.sides.values(), sides, strict=True):
            side.see(case, original, logits)
        if case.kind != "golden":
            return
        start, self.rows = self.rows, self.rows + len(answers)
        labels = self.labels[start : self.rows] if self.labels is not None and self.rows <= self.labels.size else None
        parts = self.calibration, *(side.calibration for side in self.sides.values())
        for (by_decisions, by_labels), forecast in zip(parts, forecasts, strict=True):
            by_decisions.add(forecast, answers)
            if labels is not None:
                by_labels.add(forecast, labels)

    def checks(self) -> Iterator[Check]:
        """A check for each limit that is set; a single failed one where a case had no such distribution."""
        if self.failure is not None:
            yield self.failure
            return
        labelled = self.labels is not None and self.rows == self.labels.size
        engine, graph = ({**side.values(), **self._calibration(side, labelled)} for side in self.sides.values())
        for name, (value, place, told) in engine.items():
            limit: float | None = getattr(self.limits, name)
            if limit is None:
                continue
            alone = graph[name][0]
            parts = (told, f"the graph alone has {alone:.3g}", "" if alone <= limit else "so it is the graph's")
            note = ", ".join(part for part in parts if part)
            yield Check("engine", f"contract {name}", self.output, place, value, limit, value <= limit, note)

    def _unfit(self, case: Case, graph: Tensors, engine: Tensors) -> str:
        """Why the output has no distributions that can be compared; '' where it has."""
        found = [item.get(self.output) for item in (case.expected, graph, engine)]
        arrays = [item for item in found if item is not None]
        if len(arrays) < len(found):
            return "there is no such output"
        if len({item.shape for item in arrays}) > 1:
            return f"the original has the shape {arrays[0].shape}, the engine {arrays[2].shape}"
        if any(map(is_exact, arrays)):
            return "integers are decisions and have no distribution; use structured.sequence or agreement"
        if arrays[0].ndim == 0 or arrays[0].shape[-1] < 2:
            return f"the last axis of {arrays[0].shape} holds no distribution: it takes two entries or more"
        return ""

    def _calibration(self, side: "_Side", labelled: bool) -> dict[str, tuple[float, str, str]]:
        """By how much ece and brier of a side differ from the original's, or are worse where there are labels."""
        before, after = self.calibration[labelled], side.calibration[labelled]
        what = "labels" if labelled else "the original's decisions"
        found = {}
        for name in ("ece", "brier"):
            old, new = getattr(before, name), getattr(after, name)
            worse = new - old if not labelled or math.isnan(new - old) else max(0.0, new - old)
            found[name] = (abs(worse), "golden", f"{new:.4f} against {old:.4f} by {what}")
        return found


class _Side:
    """The rows of the engine or of the graph, against the original's. calibration: by its decisions, and by labels."""

    def __init__(self) -> None:
        self.rows = RowSums()
        self.worst: tuple[float, str, str] = (0.0, "golden", "")
        self.calibration = CalibrationSums(), CalibrationSums()

    def see(self, case: Case, original: Array, logits: Array) -> None:
        """Take the logits (rows, classes) of a case."""
        k = min(TOP_K, logits.shape[1] - 1)  # all of them are always the same ones
        found = measure_rows(original, logits, k)
        js = found.js_max if found.finite == found.count else math.nan
        if not js <= self.worst[0] and not math.isnan(self.worst[0]):
            self.worst = (js, case.name, f"row {found.worst[0]}" if found.worst else "a row is not finite")
        if case.kind == "golden":
            self.rows = self.rows.merge(found)

    def values(self) -> Mapping[str, tuple[float, str, str]]:
        """(value, case, note) by the name of the limit."""
        rows = self.rows
        return {
            "kl": (rows.kl, "golden", f"mean of {rows.count} rows"),
            "js": self.worst,
            "flips": (rows.flips / max(rows.count, 1), "golden", f"{rows.flips} of {rows.count} rows"),
            "top_k": (round(1 - rows.top_k_agreement, 12), "golden", f"of the {rows.k} likeliest"),
        }


def as_logits(array: Array, values: str) -> Array:
    """The rows of an output (..., classes) as float64 logits (n, classes), whose softmax is the distribution.

    values: 'logits' or 'probabilities', of which a negative one gives NaN.
    """
    rows = rows_of(np.asarray(array, np.float64))
    if values == "probabilities":
        with np.errstate(invalid="ignore"):
            return np.where(rows >= 0, np.log(np.maximum(rows, LEAST)), np.nan)
    masked = np.isneginf(rows)
    if not masked.any():
        return rows
    greatest = np.where(masked, -np.inf, rows).max(axis=1, keepdims=True)
    return np.where(masked & np.isfinite(greatest), greatest - IMPOSSIBLE, rows)


def _softmax(logits: Array) -> Array:
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
