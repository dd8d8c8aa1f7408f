"""How one golden set differs from another: which cases, whose inputs, and by how much the expected outputs moved."""

import math
from dataclasses import dataclass

import numpy as np

from enginery.arrays import Array
from enginery.core.types import Tensors
from validation.golden.golden_set import Case, GoldenSet, case_names
from validation.metrics.drift import is_exact, measure


@dataclass(frozen=True)
class GoldenChange:
    """From `before` to `after`, which are digests. added, removed: names of cases.

    inputs, expected: names of cases that both have, and whose inputs, or expected outputs, differ.
    largest: of each output that moved, the greatest absolute difference (of integers, the share that differs) and
    where; infinite where it has another shape or kind.  labels, noise: whether those differ.
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

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self.before == self.after

    def __str__(self) -> str:
        if self.same:
            return "the same golden set"
        parts = [
            *_count_names(self.added, "case added", "cases added"),
            *_count_names(self.removed, "case removed", "cases removed"),
            *_count_names(self.inputs, *(f"of {self.cases} cases {verb} other inputs" for verb in ("has", "have"))),
            *_count_names(
                self.expected, *(f"of {self.cases} cases {verb} other expected outputs" for verb in ("has", "have"))
            ),
            *[f"{name} by up to {value:.4g} at {case}" for name, (value, case) in self.largest.items()],
            *(["other labels"] if self.labels else []),
            *(["another noise floor"] if self.noise else []),
        ]
        return "; ".join(parts) or "the same tensors, written by another version of the format"

    def to_json(self) -> dict[str, object]:
        """A JSON object; a difference without a number is null."""
        largest = {
            name: {"difference": value if math.isfinite(value) else None, "case": case}
            for name, (value, case) in self.largest.items()
        }
        lists = {name: list(getattr(self, name)) for name in ("added", "removed", "inputs", "expected")}
        ends = {"before": self.before, "after": self.after, "same": self.same, "cases": self.cases}
        return {**ends, **lists, "largest": largest, "labels": self.labels, "noise": self.noise, "summary": str(self)}


def change(before: GoldenSet, after: GoldenSet) -> GoldenChange:
    """Compare two golden sets, one case at a time. Cases are matched by name."""
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
            _keep_largest(largest, name, left, right)
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
    )


def _equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Array | None, right: Array | None) -> bool:
    """Whether two arrays are the same in every bit."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _keep_largest(largest: dict[str, tuple[float, str]], name: str, left: Case, right: Case) -> None:
    for output in left.expected.keys() | right.expected.keys():
        value = _difference(left.expected.get(output), right.expected.get(output))
        if value > largest.get(output, (0.0, ""))[0]:
            largest[output] = (value, name)


def _difference(left: Array | None, right: Array | None) -> float:
    if left is None or right is None or left.shape != right.shape or is_exact(left) != is_exact(right):
        return math.inf
    drift = measure(left, right)
    if is_exact(left):
        return 1 - drift.argmax_agreement
    return math.inf if drift.nonfinite else float(np.nan_to_num(drift.max_abs, nan=math.inf))


def _count_names(names: tuple[str, ...], one: str, several: str) -> list[str]:
    return [f"{len(names)} {one if len(names) == 1 else several}"] if names else []
