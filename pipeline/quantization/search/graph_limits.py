"""The limits that a graph is judged by (the quantization stage), asked of the graphs that a search tries.

The golden set proves what was chosen and chooses nothing, so a trial is compared on calibration samples, in the way and
with the metrics of the graph's own checks. Those are other samples than the golden ones, and a search picks what is
good on them. So each limit has a margin, and must hold on each of a few parts of the samples: a golden set is no
larger than such a part, and in a part the few samples that have most of the error, or the few that an element of an
output is about, are not lost among the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from enginesmith.core.reports.proof import CHANGED, DECISIONS
from enginesmith.core.types import Tensors
from pipeline.quantization.search.quality import GraphLimits, SearchFloor
from validation.comparison.decisions import as_decided, decision_checks
from validation.comparison.selections import Selections
from validation.comparison.sessions import StageComparison
from validation.golden.golden_set import Case
from validation.limits.budget import Budgets, OutputLimits, default_budget
from validation.limits.rounding import MOST_CHANGED, NearTies
from validation.limits.terms import Budget
from validation.metrics.drift import Drift

T = TypeVar("T")

# Decibels by which a trial must be better than the limits of its graph: its SQNR on 48 calibration samples and on 16
# golden ones were 2 to 8 dB apart on a classifier with saturated outputs, and 1 dB on a sentence encoder.
MARGIN_DB = 5.0


# Parts of the runs that the limits must hold on; a trial ends with the first that fails.
PARTS = 3


def deal(runs: Sequence[T]) -> list[T]:
    """The runs, every third one first, so that each part has some of all."""
    return [run for part_index in range(PARTS) for run in runs[part_index::PARTS]]


def with_margin(floor: SearchFloor) -> SearchFloor:
    """The floor, with the SQNR of its graph's limits, which says where to search; one without such limits as it is."""
    return replace(floor, sqnr_db=budget_of(floor.graph).sqnr_db) if floor.graph else floor


def budget_of(limits: GraphLimits) -> Budget:
    """The documented limits of an int8 graph or the spec's, with the margin; shares of decisions have none."""
    base_limits = Budgets(default_budget("quantization", "int8")).override(limits.given).default
    factor = 10 ** (MARGIN_DB / 20)
    set_limits = {name: limit for name, limit in base_limits.items() if limit is not None}
    tight_limits = {name: limit + MARGIN_DB for name, limit in set_limits.items() if name.endswith("_db")}
    tight_limits |= {name: limit / factor for name, limit in set_limits.items() if name.startswith("max_")}
    tight_limits |= {name: 1 - (1 - limit) / factor**2 for name, limit in set_limits.items() if name == "cosine"}
    return base_limits.override(tight_limits)


class GraphJudge:
    """Takes what a trial answers, run after run, and counts the checks that it fails. runs: inputs."""

    def __init__(self, limits: GraphLimits, runs: Sequence[Tensors]) -> None:
        self.limits, self.runs = limits, runs
        self._parts = [
            StageComparison("quantization", None, {}, selections=Selections(limits.selected)) for _ in runs[:PARTS]
        ]

    def add(self, index: int, expected_outputs: Tensors, actual: Tensors) -> bool:
        """Take the outputs of float model and trial for a run; whether a part of the runs ends here and fails."""
        run_part = self._parts[self._part(index)]
        run_part.add(Case(str(index), "golden", self.runs[index], {}), expected_outputs, actual)
        is_last = index + 1 == len(self.runs) or self._part(index + 1) != self._part(index)
        return is_last and not all(check.passed for check in run_part.checks(self._limits))

    def _part(self, index: int) -> int:
        sizes = accumulate(len(self.runs[part_index::PARTS]) for part_index in range(PARTS))
        return next(part_index for part_index, end in enumerate(sizes) if index < end)

    @property
    def _limits(self) -> OutputLimits:
        exact_names = {
            name for run_part in self._parts for name, array in run_part.outputs.items() if array.dtype.kind in "biu"
        }
        near_ties = {} if DECISIONS in self.limits.given else dict.fromkeys(exact_names, NearTies())
        return OutputLimits(Budgets(budget_of(self.limits), decisions=near_ties))

    def missed(self) -> int:
        """How many checks fail. The share of changed decisions may be `MOST_CHANGED`, and one decision may change."""
        checks = [check for run_part in self._parts for check in run_part.checks(self._limits)]
        usual_drifts: dict[str, Drift] = {}
        for run_part in self._parts:
            for output, drift in run_part.usual().items():
                usual_drifts[output] = usual_drifts[output].merge(drift) if output in usual_drifts else drift
        decision_results = decision_checks(usual_drifts, self.limits.metrics, self.limits.given)
        judged_outputs = {
            check.output for check in decision_results if check.name == CHANGED and check.limit is not None
        }
        flipped_rows = [
            rows
            for output in judged_outputs
            if (rows := as_decided(usual_drifts[output]).rows) and rows.flips > max(1, MOST_CHANGED * rows.count)
        ]
        return sum(not check.passed for check in [*checks, *decision_results]) + len(flipped_rows)
