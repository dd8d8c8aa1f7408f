"""Whether probabilities mean what they say: calibration error and Brier score of rows of probabilities.

- ece    sum over bins of |share that is right - mean confidence| * share of rows, over 15 bins of equal width of the
         greatest probability (Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian Binning", 2015;
         Guo et al., "On Calibration of Modern Neural Networks", 2017, who use 15)
- brier  mean over the rows of sum_i (p_i - [i is the answer])^2 (Brier, "Verification of Forecasts Expressed in Terms
         of Probability", 1950); from 0 to 2
"""

from dataclasses import dataclass

import numpy as np

from enginery.arrays.arrays import Array

BINS = 15


@dataclass(frozen=True, eq=False)
class Forecasts:
    """Of rows of probabilities: confidence (the greatest), decision (its index) and squares (sum of p^2) of each."""

    probabilities: Array

    @property
    def confidence(self) -> Array:
        """The greatest probability of each row."""
        return np.asarray(self.probabilities.max(axis=1))

    @property
    def decision(self) -> Array:
        """The index of the greatest probability of each row."""
        return np.asarray(self.probabilities.argmax(axis=1))

    def right(self, answers: Array) -> Array:
        """Whether each row decides for its answer. answers: an index per row."""
        return np.asarray(self.decision == answers)

    def losses(self, answers: Array) -> Array:
        """The Brier loss of each row; an answer that is no class costs as if every class were wrong."""
        known = (answers >= 0) & (answers < self.probabilities.shape[1])
        at = np.where(known, answers, 0).astype(np.int64)[:, None]
        given = np.take_along_axis(self.probabilities, at, axis=1)[:, 0] * known
        return np.asarray(np.square(self.probabilities).sum(axis=1) - 2 * given + 1)


class CalibrationSums:
    """Sums over rows as they come; `ece` and `brier` of all of them. bins: rows, right ones and confidence by bin."""

    def __init__(self) -> None:
        self.bins = np.zeros((3, BINS))
        self.loss, self.broken = 0.0, 0

    def add(self, forecasts: Forecasts, answers: Array) -> None:
        """More rows, with the index that is right for each. Rows with NaN make both results NaN."""
        confidence = forecasts.confidence
        finite = np.isfinite(confidence)
        self.broken += int((~finite).sum())
        bins = np.minimum((confidence[finite] * BINS).astype(np.int64), BINS - 1)
        right = forecasts.right(answers)[finite].astype(np.float64)
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
