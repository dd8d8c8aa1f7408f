"""Rows that a graph selects itself (TopK, NonMaxSuppression), compared as sets.

Rounding changes the order of rows with nearly equal scores, and the choice of the last selected rows. Therefore each
row is compared with its match: a row with the same classes and nearly the same numbers. A row without a match is
weighted by the distance of its score from the least selected score.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import GraphProto

from builders.onnx_graphs.structure import find_selected
from enginesmith.arrays import Array
from enginesmith.core.reports.proof import DECISIONS, SELECTED, Check
from enginesmith.core.types import Rows, Tensors
from validation.comparison.decisions import classes_check
from validation.golden.golden_set import Case
from validation.limits.rounding import LEVEL
from validation.metrics.drift import is_exact
from validation.metrics.tasks.boxes import OVERLAPS, overlaps, to_corners
from validation.metrics.tasks.terms import TaskMetric
from validation.statistics.rates import lower

# Rows match up to this root mean square distance, relative to their columns' root mean square; boxes must also overlap
# by at least a half (COCO's least). The limits on drift apply to the matched rows.
NEAR = 0.5
# The greatest share of the selected rows that may change, tested by a lower bound.
MOST_SELECTED = 0.1
# A class is judged if one of its rows has at least this share of the mean weight; otherwise all its rows are near ties.
_CLEAR = 0.5
# Whole numbers are classes if each number has at least this many rows on average.
_ROWS_OF_CLASS = 8
# The number of columns of a box; their integers are coordinates, not classes.
_BOX = 4


def selected_of(graph: GraphProto, limits: Mapping[str, object], metrics: Sequence[TaskMetric]) -> dict[str, Rows]:
    """The outputs of a graph that are judged as sets: none if a limit or metric of the spec judges decisions."""
    return {} if DECISIONS in limits or any(metric.decides for metric in metrics) else find_selected(graph)


@dataclass
class Selections:
    """The outputs with selected rows, by case. kinds: layout of the rows by output.  checks: filled by `settle`."""

    kinds: Mapping[str, Rows]
    cases: list[tuple[Case, Tensors, Tensors]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def take(self, case: Case, expected: Tensors, actual: Tensors) -> set[str]:
        """Store the outputs that can be compared as sets; returns their names."""
        names = {name for name in self.kinds if name in expected and name in actual}
        names = {name for name in names if _fit(expected[name], actual[name], self.kinds[name])}
        if names:
            tensor_pair = [{name: tensors[name] for name in names} for tensors in (expected, actual)]
            self.cases.append((case, tensor_pair[0], tensor_pair[1]))
        return names

    def settle(self) -> Iterator[tuple[Case, str, tuple[Array, Array]]]:
        """The matched rows [rows, ...] of both sides by case and output. Removes the stored cases, and adds the checks
        of rows without a match."""
        cases, self.cases = self.cases, []
        boxes = {n for n in self.kinds if all(_is_box(expected[n]) for _, expected, _ in cases if n in expected)}
        sized_pairs = [
            [{n: _as_sizes(rows) if n in boxes else rows for n, rows in tensors.items()} for tensors in tensor_pair]
            for _, *tensor_pair in cases
        ]
        cases = [(case, e, a) for (case, *_), (e, a) in zip(cases, sized_pairs, strict=True)]
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, kind in self.kinds.items():
            pairs = [(e[name], a[name]) for _, e, a in cases if name in e]
            if pairs and kind == "count":
                changed_weight = sum(float(np.abs(e.astype(np.float64) - a).sum()) for e, a in pairs)
                total = sum(float(np.maximum(np.abs(e), np.abs(a)).sum()) for e, a in pairs)
                self._check(name, changed_weight, total, total)
            elif pairs:  # outputs with equal numbers of rows in all cases are columns of one table
                groups[kind, *(rows.shape[: 1 + (kind == "each")] for pair in pairs for rows in pair)].append(name)
        for names in groups.values():
            yield from self._settle(names, [(case, e, a) for case, e, a in cases if names[0] in e], boxes)

    def _settle(
        self, names: Sequence[str], cases: Sequence[tuple[Case, Tensors, Tensors]], boxes: set[str]
    ) -> Iterator[tuple[Case, str, tuple[Array, Array]]]:
        kind = self.kinds[names[0]]
        tables = [[_tables(tensors, names, kind) for tensors in tensor_pair] for _, *tensor_pair in cases]
        columns = _Columns.of(cases[0][1], names, kind, [table for expected, _ in tables for table in expected], boxes)
        row_parts: list[tuple[Array, Array, Array]] = []
        for (case, *tensor_pair), pairs in zip(cases, tables, strict=True):
            places, starts = [np.zeros((2, 0), int)], np.zeros((2, 1), int)
            for e, a in zip(*pairs, strict=True):
                matches = columns.match(e, a)
                row_parts += columns.weigh(e, a, matches)
                places.append(matches + starts)
                starts += np.array([[len(e)], [len(a)]])
            expected_rows, actual_rows = np.concatenate(places, axis=1)
            for name in names if len(expected_rows) else ():
                e, a = (
                    tensors[name].reshape(-1, *tensors[name].shape[1 + (kind == "each") :]) for tensors in tensor_pair
                )
                yield case, name, (e[expected_rows], a[actual_rows])
        rows, weights, change_mask = (np.concatenate(arrays) for arrays in zip(*row_parts, strict=True))
        independent_count = float(weights.sum() ** 2 / max(np.square(weights).sum(), 1e-300))
        self._check(names[0], float(weights[change_mask].sum()), float(weights.sum()), independent_count)
        for column in np.flatnonzero(columns.exact):
            self._check_classes(names[0], rows[:, column], weights, change_mask)

    def _check(self, name: str, changed_weight: float, total: float, independent: float) -> None:
        share = changed_weight / total if total else 0.0
        least_share = lower(share * independent, independent, LEVEL)
        note = f"{share:.1%} of the selection changed, by score; the true share is at least this, with 99 % confidence"
        is_within = least_share <= MOST_SELECTED
        self.checks.append(Check("quantization", SELECTED, name, "all", least_share, MOST_SELECTED, is_within, note))

    def _check_classes(self, name: str, classes: Array, weights: Array, change_mask: Array) -> None:
        rows, lost_rows = dict[int, int](), dict[int, int]()
        distinct_classes = np.unique(classes).tolist()
        for index in distinct_classes if len(distinct_classes) * _ROWS_OF_CLASS <= len(classes) else ():
            class_weights = weights * (classes == index)
            if class_weights.max() >= _CLEAR * weights.mean():
                rows[int(index)] = count = max(1, round(class_weights.sum() ** 2 / np.square(class_weights).sum()))
                lost_rows[int(index)] = round(count * class_weights[change_mask].sum() / class_weights.sum())
        if len(rows) > 1:
            self.checks.append(classes_check(name, rows, lost_rows, "all", "what is selected"))


@dataclass(frozen=True)
class _Columns:
    """The columns of a table of selected rows. owners: index of each column's output.  exact: bool, for classes.

    score: the column of scores, or None.  least: the least score; None if each list is sorted by score.  boxes: the
    first column of each box (centre and size).
    """

    owners: Array
    exact: Array
    scale: Array
    score: int | None
    least: float | None
    boxes: Sequence[int]

    @classmethod
    def of(
        cls, outputs: Tensors, names: Sequence[str], kind: Rows, tables: Sequence[Array], boxes: set[str]
    ) -> "_Columns":
        """The columns of the expected rows' tables."""
        rows = np.concatenate(tables)
        widths = [math.prod(outputs[name].shape[1 + (kind == "each") :]) for name in names]
        owners = np.repeat(np.arange(len(names)), widths)
        box_mask = np.repeat([width == _BOX for width in widths], widths)
        integer_mask = np.repeat([is_exact(outputs[name]) for name in names], widths)
        whole_mask = (rows == np.round(rows)).all(axis=0) & (rows != rows[:1]).any(axis=0)
        exact_mask = ~box_mask & (integer_mask | whole_mask)
        falling_mask = np.all([(np.diff(table, axis=0) <= 0).all(axis=0) for table in tables], axis=0)
        score_mask = ~exact_mask & (kind == "each") & falling_mask
        score_columns = np.flatnonzero(
            score_mask if score_mask.any() else ~exact_mask & (np.repeat(widths, widths) == 1)
        )
        scale = np.sqrt(np.square(rows).mean(axis=0)) if len(rows) else np.ones(len(owners))
        score_column = int(score_columns[0]) if len(score_columns) else None
        least_score = (
            None if score_column is None or score_mask.any() else float(rows[:, score_column].min(initial=np.inf))
        )
        starts = [sum(widths[:index]) for index, name in enumerate(names) if name in boxes]
        return cls(owners, exact_mask, np.where(scale > 0, scale, 1.0), score_column, least_score, starts)

    def match(self, e: Array, a: Array) -> Array:
        """Indices of the matching rows, int (2, pairs), in the order of `e`; the nearest rows are matched first."""
        squares = np.square((e[:, None] - a[None]) / self.scale)
        outputs = [self.owners == index for index in range(self.owners[-1] + 1)]
        means = [
            squares[..., columns & ~self.exact].mean(axis=2) for columns in outputs if (columns & ~self.exact).any()
        ]
        distance = np.max(means, axis=0) if means else np.zeros(squares.shape[:2])
        distance = np.where((squares[..., self.exact] > 0).any(axis=2), np.inf, distance)
        for start in self.boxes:
            shared_areas = overlaps(*(to_corners(table[:, start : start + _BOX], "cxcywh") for table in (e, a)))
            distance = np.where(shared_areas >= OVERLAPS[0], distance, np.inf)
        pairs: dict[int, int] = {}
        candidates = np.flatnonzero(distance <= NEAR**2)
        for flat_index in candidates[np.argsort(distance.flat[candidates], kind="stable")].tolist():
            row, column = divmod(flat_index, len(a))
            if row not in pairs and column not in pairs.values():
                pairs[row] = column
        return np.array(sorted(pairs.items()), int).reshape(-1, 2).T

    def weigh(self, e: Array, a: Array, places: Array) -> list[tuple[Array, Array, Array]]:
        """For each side: its rows, the weight of each row, and whether it has no match."""
        floor = e[:, self.score].min(initial=np.inf) if self.score is not None and self.least is None else self.least
        entries = []
        for rows, pairs in zip((e, a), places, strict=True):
            weights = np.ones(len(rows)) if self.score is None else np.maximum(rows[:, self.score] - (floor or 0.0), 0)
            entries.append((rows, weights, ~np.isin(np.arange(len(rows)), pairs)))
        return entries


def _tables(outputs: Tensors, names: Sequence[str], kind: Rows) -> list[Array]:
    """The table of each list of selected rows in a case, float64 [rows, columns]."""
    arrays = [outputs[name] if kind == "each" else outputs[name][None] for name in names]
    flat_arrays = [array.reshape(*array.shape[:2], math.prod(array.shape[2:])) for array in arrays]
    return [*np.concatenate(flat_arrays, axis=2).astype(np.float64)]


def _is_box(rows: Array) -> bool:
    """Whether rows begin with the two corners of a box, whose error counts relative to size, not to position."""
    return rows.shape[-1] in (4, 6, 7) and bool((rows[..., 2:4] >= rows[..., :2]).all())


def _as_sizes(rows: Array) -> Array:
    """Rows [.., 4 or more] with corners converted to centre and size."""
    low, high = rows[..., :2].astype(np.float64), rows[..., 2:4].astype(np.float64)
    return np.concatenate([(low + high) / 2, high - low, rows[..., 4:]], axis=-1).astype(rows.dtype)


def _fit(e: Array, a: Array, kind: Rows) -> bool:
    """Whether two outputs are finite, and have equal kinds and shapes, except for the number of rows."""
    axis = 1 if kind == "each" else 0
    is_same = (
        e.ndim == a.ndim > axis and e.shape[:axis] == a.shape[:axis] and e.shape[axis + 1 :] == a.shape[axis + 1 :]
    )
    is_same = e.shape == a.shape if kind == "count" else is_same
    return bool(is_same and is_exact(e) == is_exact(a) and np.isfinite(e).all() and np.isfinite(a).all())
