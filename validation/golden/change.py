"""The difference of two golden sets: which cases, whose inputs, and by how much the expected outputs changed."""

import math
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.text import pluralize
from enginesmith.core.types import Tensors
from validation.golden.golden_set import GoldenSet, case_names
from validation.metrics.drift import is_exact, measure


@dataclass(frozen=True)
class GoldenChange:
    """The change from one golden set to another. before, after: their digests.  cases: the number of cases after.

    added, removed: names of cases.  inputs, expected: names of cases of both sets whose inputs, or outputs, differ.
    largest: by output, the greatest absolute difference (of integers, the share of elements that differ) and its case;
    infinite where the output has another shape or kind, or one is not finite.  labels, noise, sequences: whether those
    differ.
    """

    before: str
    after: str
    cases: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    inputs: tuple[str, ...]
    expected: tuple[str, ...]
    largest: dict[str, tuple[float, str]]
    labels: bool
    noise: bool
    sequences: bool

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self.before == self.after

    def __str__(self) -> str:
        if self.same:
            return "the same golden set"
        of = f"of {self.cases} cases"
        counts = [
            (self.added, "case added", "cases added"),
            (self.removed, "case removed", "cases removed"),
            (self.inputs, f"{of} has other inputs", f"{of} have other inputs"),
            (self.expected, f"{of} has other expected outputs", f"{of} have other expected outputs"),
        ]
        parts = [
            *[pluralize(len(names), one, several) for names, one, several in counts if names],
            *[_describe(name, value, case) for name, (value, case) in self.largest.items()],
            *(["other labels"] if self.labels else []),
            *(["another noise floor"] if self.noise else []),
            *(["other sequences, or other states handed on in them"] if self.sequences else []),
        ]
        return "; ".join(parts) or "the same tensors, written by another version of the format"

    def to_json(self) -> dict[str, object]:
        """A JSON object; an infinite difference is null."""
        largest = {
            name: {"difference": value if math.isfinite(value) else None, "case": case}
            for name, (value, case) in self.largest.items()
        }
        lists = {name: list(getattr(self, name)) for name in ("added", "removed", "inputs", "expected")}
        ends = {"before": self.before, "after": self.after, "same": self.same, "cases": self.cases}
        others = {name: getattr(self, name) for name in ("labels", "noise", "sequences")}
        return {**ends, **lists, "largest": largest, **others, "summary": str(self)}


def change(before: GoldenSet, after: GoldenSet) -> GoldenChange:
    """The change from one golden set to another, compared case by case, by name."""
    old = {case: index for index, case in enumerate(case_names(before))}
    new = {case: index for index, case in enumerate(case_names(after))}
    inputs, expected = list[str](), list[str]()
    largest: dict[str, tuple[float, str]] = {}
    for name in new.keys() & old.keys() if before.digest != after.digest else ():
        left, right = before.cases[old[name]], after.cases[new[name]]
        if not _equal(left.inputs, right.inputs):
            inputs.append(name)
        if not _equal(left.expected, right.expected):
            expected.append(name)
            for output in left.expected.keys() | right.expected.keys():
                value = _difference(left.expected.get(output), right.expected.get(output))
                if value > largest.get(output, (0.0, ""))[0]:
                    largest[output] = (value, name)
    return GoldenChange(
        before.digest,
        after.digest,
        len(new),
        tuple(name for name in new if name not in old),
        tuple(name for name in old if name not in new),
        tuple(name for name in new if name in inputs),
        tuple(name for name in new if name in expected),
        dict(sorted(largest.items())),
        not _same(before.labels, after.labels),
        before.noise != after.noise,
        _sequences(before) != _sequences(after),
    )


def _describe(output: str, difference: float, case: str) -> str:
    if math.isinf(difference):
        return f"{output} of another shape or kind, or not finite, at {case}"
    return f"{output} by up to {difference:.4g} at {case}"


def _sequences(golden: GoldenSet) -> tuple[object, ...]:
    held = golden.sequences
    return (held.states, held.ends, held.golden.digest) if held else ()


def _equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Array | None, right: Array | None) -> bool:
    """Whether two arrays are equal in every bit."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _difference(left: Array | None, right: Array | None) -> float:
    if left is None or right is None or left.shape != right.shape or is_exact(left) != is_exact(right):
        return math.inf
    drift = measure(left, right)
    if is_exact(left):
        return 1 - drift.agreement
    return math.inf if drift.nonfinite else float(np.nan_to_num(drift.max_abs, nan=math.inf))
