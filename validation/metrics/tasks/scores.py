"""What every kind of task metric answers, and how class indices are read from outputs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, InputError
from enginesmith.core.types import Tensors
from validation.metrics.drift import is_exact

# The class of a row with NaN, which has no answer: its argmax would be the place of the NaN, which may be right. The
# reference's and the candidate's differ, so that two such rows are not equal.
NO_WANTED, NO_ANSWER = -1, -2
NOTHING = "there is nothing to compare"

W = TypeVar("W", bound=Sized)
A = TypeVar("A", bound=Sequence[object] | Array)


@dataclass(frozen=True)
class TaskValue:
    """One value of a task metric. value: None where it is not defined, for the reason in `note`.

    count, total: of a share over independent samples, which has an interval.
    """

    name: str
    value: float | None
    note: str = ""
    count: int | None = None
    total: int | None = None


class Score(ABC, Generic[W, A]):
    """What was compared so far, case by case. The wanted answers of a case have the length of its answers.

    takes_negative: whether a label below 0 has a meaning, such as a place without one.
    """

    takes_negative: ClassVar[bool] = True

    @abstractmethod
    def read_wanted(self, outputs: Tensors) -> W:
        """The answers that the original model's outputs hold. Raises InputError for an output that is missing,
        DataError for one of another shape than the metric takes."""

    @abstractmethod
    def read_answers(self, outputs: Tensors) -> A:
        """The answers of what is judged. Raises as `read_wanted`."""

    @abstractmethod
    def read_labels(self, labels: Array) -> W | Array:
        """The labels of all golden samples as wanted answers. Raises DataError for those of another shape."""

    def count_classes(self, outputs: Tensors) -> int | None:  # noqa: ARG002 - of use to kinds whose labels are classes
        """How many classes the original model's outputs have, whose indices labels are; None where nothing says it."""
        return None

    def join(self, wanted: W, labels: Any) -> W:  # noqa: ARG002 - of use to kinds that look at both
        """What is wanted of a case that has labels, and of the original model `wanted`: the labels."""
        return cast("W", labels)

    @abstractmethod
    def add(self, wanted: W, answers: A) -> None:
        """Take the answers of a case. Raises DataError where they cannot be compared with the wanted ones."""

    @abstractmethod
    def values(self) -> list[TaskValue]:
        """What was measured, in the order of `terms.VALUES`."""


def output_of(outputs: Tensors, name: str, *ranks: int) -> Array:
    """An output. ranks: numbers of axes that it may have, any if there are none.

    Raises InputError for one that the model lacks, DataError for another number of axes.
    """
    if name not in outputs:
        raise InputError(f"metric output {name!r} is not an output; known: {', '.join(outputs)}")
    found = outputs[name]
    if ranks and found.ndim not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise DataError(f"metric output {name!r} has the shape {found.shape}; the metric takes {wanted} axes")
    return found


def class_count(value: Array) -> int | None:
    """How many classes the last axis of scores has; None for classes themselves."""
    return None if is_exact(value) or not value.ndim else value.shape[-1]


def classes_of(value: Array, none: int, axis: int = -1) -> Array:
    """Class indices: integers as they are, else the argmax over an axis. none: class of a row with NaN."""
    if is_exact(value):
        return value.astype(np.int64)
    missing = np.isnan(value).any(axis=axis)
    return np.where(missing, none, np.argmax(value, axis=axis)) if value.shape[axis] else np.full(missing.shape, none)


def share(name: str, count: int, total: int, independent: bool = False) -> TaskValue:
    """A share as a value. independent: whether it is one of samples, and has an interval."""
    if not total:
        return TaskValue(name, None, NOTHING)
    return TaskValue(name, count / total, "", *((count, total) if independent else ()))


def align(wanted: Array, answers: Array) -> Array:
    """The wanted values in the answers' shape, from which they may differ in axes of one. Raises DataError for shapes
    that differ otherwise."""
    if wanted.size == answers.size:
        wanted = wanted.reshape(answers.shape)
    must_fit(wanted.shape, answers.shape)
    return wanted


def must_fit(shape: Sequence[int], other: Sequence[int]) -> None:
    """Raises DataError for shapes that differ."""
    if tuple(shape) != tuple(other):
        raise DataError(f"expected the shape {tuple(shape)}, got {tuple(other)}")
