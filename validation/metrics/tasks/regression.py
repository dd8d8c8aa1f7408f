"""Numbers: by how much they differ, relative to what they should be."""

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Tensors
from validation.metrics.tasks.scores import NOTHING, Score, TaskValue, align, output_of
from validation.metrics.tasks.terms import RegressionTerms


class Regression(Score[Array, Array]):
    """Errors e = answer - wanted, summed in float64 over all elements.

    r2: 1 - sum(e^2) / sum((wanted - mean)^2), the coefficient of determination.  relative_error: sum |e| / sum |wanted|
    (WAPE: Kolassa and Schuetz, "Advantages of the MAD/Mean Ratio over the MAPE", 2007), which zeros do not break.
    largest_error: max |e| / max |wanted|.
    """

    def __init__(self, terms: RegressionTerms) -> None:
        self.terms, self._count, self._mean, self._spread = terms, 0, 0.0, 0.0
        self._sums, self._squares, self._most = np.zeros(2), 0.0, np.zeros(2)

    def read_wanted(self, outputs: Tensors) -> Array:
        """Numbers [samples, ..]."""
        return np.atleast_1d(output_of(outputs, self.terms.output)).astype(np.float64)

    def read_answers(self, outputs: Tensors) -> Array:
        """Numbers [samples, ..]."""
        return self.read_wanted(outputs)

    def read_labels(self, labels: Array) -> Array:
        """Numbers [samples, ..]."""
        return labels.astype(np.float64)

    def add(self, wanted: Array, answers: Array) -> None:
        """Take the errors of a case."""
        wanted = align(wanted, answers)
        if not wanted.size:
            return
        errors = answers - wanted
        self._sums += [np.abs(errors).sum(), np.abs(wanted).sum()]
        self._squares += float(np.square(errors).sum())
        self._most = np.maximum(self._most, [np.abs(errors).max(), np.abs(wanted).max()])
        self._merge(wanted.size, float(wanted.mean()), float(np.square(wanted - wanted.mean()).sum()))

    def _merge(self, count: int, mean: float, spread: float) -> None:
        """Take a case's mean and squared deviations (Chan, Golub and LeVeque 1979)."""
        total, apart = self._count + count, mean - self._mean
        self._spread += spread + apart * apart * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    def values(self) -> list[TaskValue]:
        """The three; not defined where their denominators are 0."""
        (errors, numbers), (worst, peak) = self._sums.tolist(), self._most.tolist()
        explained = _over("r2", self._squares, self._spread, "the wanted numbers are all equal")
        r2 = TaskValue("r2", None if explained.value is None else 1 - explained.value, explained.note)
        relative = _over("relative_error", errors, numbers, "the wanted numbers are all 0")
        found = [r2, relative, _over("largest_error", worst, peak, "the wanted numbers are all 0")]
        return found if self._count else [TaskValue(item.name, None, NOTHING) for item in found]


def _over(name: str, part: float, whole: float, note: str) -> TaskValue:
    if not whole and part:
        return TaskValue(name, None, note)
    return TaskValue(name, float(part / whole) if whole else 0.0)
