"""Audio: how far a signal is from the wanted one, whatever its loudness."""

import math

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.tasks.scores import NOTHING, Score, TaskValue, align, output_of
from validation.metrics.tasks.terms import SignalTerms

# What equal signals have, and the most that counts: beyond the range of 16 bits, 98 dB, a mean would say little of the
# signals that are not equal.
MOST_DB = 100.0


class Signals(Score[Array, Array]):
    """Scale-invariant signal-to-distortion ratio of each signal along the last axis, in decibels, -100 to 100.

    10 log10(|a s|^2 / |a s - x|^2) of the answer x and the wanted s, with a = <x, s> / |s|^2 (Le Roux et al.,
    "SDR - half-baked or well done?", 2019, equation 5). Means are not removed. si_sdr_db: mean over the signals.
    least_si_sdr_db: of the worst. A silent s counts only where x is not silent, and is then the worst.
    """

    def __init__(self, terms: SignalTerms) -> None:
        self.terms = terms
        self._ratios: list[float] = []

    def read_wanted(self, outputs: Tensors) -> Array:
        """Signals [samples, .., time]."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim:
            raise DataError(f"metric output {self.terms.output!r} is a single number; si_sdr takes signals")
        return value.reshape(1, -1) if value.ndim == 1 else value

    def read_answers(self, outputs: Tensors) -> Array:
        """Signals [samples, .., time]."""
        return self.read_wanted(outputs)

    def read_labels(self, labels: Array) -> Array:
        """Signals [samples, .., time]."""
        return labels

    def add(self, wanted: Array, answers: Array) -> None:
        """Measure each signal of a case. Labels and answers may differ in axes of one."""
        wanted = align(wanted, answers)
        length = wanted.shape[-1]
        for one, other in zip(*(side.reshape(-1, max(length, 1)) for side in (wanted, answers)), strict=True):
            if one.any() or other.any():
                self._ratios.append(si_sdr_db(one.astype(np.float64), other.astype(np.float64)))

    def values(self) -> list[TaskValue]:
        """Mean and least."""
        names = "si_sdr_db", "least_si_sdr_db"
        if not self._ratios:
            return [TaskValue(name, None, NOTHING) for name in names]
        found = float(np.mean(self._ratios)), float(np.min(self._ratios))
        return [TaskValue(name, value) for name, value in zip(names, found, strict=True)]


def si_sdr_db(wanted: Array, answer: Array) -> float:
    """The ratio of two signals [time] in float64; NaN where one of them has NaN."""
    energy = float(wanted @ wanted)
    target = wanted * (float(answer @ wanted) / energy) if energy else wanted
    kept, lost = float(target @ target), float(np.square(target - answer).sum())
    if math.isnan(lost) or math.isinf(lost):
        return math.nan
    if not lost or not kept:
        return MOST_DB if kept else -MOST_DB
    return max(min(10 * math.log10(kept / lost), MOST_DB), -MOST_DB)
