"""Applies the limits of a graph's own checks (the quantization stage) to the graphs that a search tries.

The golden set only proves a choice, so a trial is compared on calibration samples, with the methods and metrics of the
graph's own checks. These are other samples than the golden ones, and a search chooses a graph that is good on them. So
each limit has a margin, and must hold on each of a few parts of the samples. A golden set is no larger than such a
part, and in a part, the few samples with most of the error, or that an element of an output depends on, still count.
The graph's own checks have edges of other sizes too, so trials run at them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import CHANGED, DECISIONS
from enginesmith.core.types import Dim, Tensors, TensorSpec
from pipeline.quantization.search.quality import GraphLimits, SearchFloor
from validation.comparison.decisions import as_decided, decision_checks
from validation.comparison.selections import Selections
from validation.comparison.sessions import StageComparison, edge_checks
from validation.data.batches import leading_dim
from validation.data.samples import resize
from validation.golden.golden_set import Case, edge_sizes
from validation.limits.budget import Budgets, OutputLimits, default_budget
from validation.limits.rounding import MOST_CHANGED, NearTies
from validation.limits.terms import Budget
from validation.metrics.drift import Drift, is_exact, measure

T = TypeVar("T")

# Decibels by which a trial must be better than the limits of its graph: its SQNR on 48 calibration samples and on 16
# golden ones were 2 to 8 dB apart on a classifier with saturated outputs, and 1 dB on a sentence encoder.
MARGIN_DB = 5.0


# Parts of the runs that the limits must hold on; a trial ends with the first that fails.
PARTS = 3
# The number of samples that a trial runs at the sizes of each edge, if all edges together have at most MOST_EDGES. Of
# twenty lines of text cut to another size, an int8 classifier misses its limits on five, at random.
EDGE_SAMPLES, MOST_EDGES = 4, 48
# The most bytes of inputs and outputs of all edges, which a search holds in memory.
MOST_EDGE_BYTES = 256 << 20


def deal(runs: Sequence[T]) -> list[T]:
    """The runs in another order: each of `PARTS` consecutive parts has every third run."""
    return [run for part_index in range(PARTS) for run in runs[part_index::PARTS]]


def with_margin(floor: SearchFloor) -> SearchFloor:
    """The floor, with the SQNR of its graph's limits, which guides the search; a floor without such limits is
    unchanged."""
    return replace(floor, sqnr_db=budget_of(floor.graph).sqnr_db) if floor.graph else floor


def budget_of(limits: GraphLimits) -> Budget:
    """The documented limits of an int8 graph or the spec's, with the margin; shares of decisions have no margin."""
    base_limits = _plain_budget(limits)
    factor = 10 ** (MARGIN_DB / 20)
    set_limits = {name: limit for name, limit in base_limits.items() if limit is not None}
    tight_limits = {name: limit + MARGIN_DB for name, limit in set_limits.items() if name.endswith("_db")}
    tight_limits |= {name: limit / factor for name, limit in set_limits.items() if name.startswith("max_")}
    tight_limits |= {name: 1 - (1 - limit) / factor**2 for name, limit in set_limits.items() if name == "cosine"}
    return base_limits.override(tight_limits)


def _plain_budget(limits: GraphLimits) -> Budget:
    return Budgets(default_budget("quantization", "int8")).override(limits.given).default


def make_edges(
    runs: Sequence[Tensors], inputs: Sequence[TensorSpec], dims: Sequence[Dim], outputs: Sequence[Tensors] = ()
) -> list[dict[str, Array]]:
    """Samples of the runs, resized to the edge sizes of a golden set, with the least batch.

    outputs: of the runs; they estimate the output bytes per input byte at the edges. Samples beyond `MOST_EDGE_BYTES`
    are left out.
    """
    batch_dim = next((dim for dim in dims if dim.name == leading_dim(inputs)), None)
    least_batch = {batch_dim.name: batch_dim.min} if batch_dim else {}
    edges = [edge | least_batch for edge in edge_sizes(inputs, dims) if runs and edge.keys() - least_batch.keys()]
    distinct_edges = list({tuple(sizes.items()): sizes for sizes in edges}.values())
    sample_count = max(1, min(EDGE_SAMPLES, MOST_EDGES // max(len(distinct_edges), 1), len(runs)))
    factor, bytes_left = 1 + _count_bytes(*outputs) / max(_count_bytes(*runs), 1), float(MOST_EDGE_BYTES)
    samples = list[dict[str, Array]]()
    for shift, (index, sizes) in itertools.product(range(sample_count), enumerate(distinct_edges)):
        sample = resize(runs[(index + shift) % len(runs)], inputs, sizes)
        if (sample_bytes := factor * _count_bytes(sample)) <= bytes_left:
            samples.append(sample)
            bytes_left -= sample_bytes
    return samples


def _count_bytes(*tensors: Tensors) -> int:
    return sum(array.nbytes for arrays in tensors for array in arrays.values())


class GraphJudge:
    """Receives a trial's outputs, run by run, and counts failed checks. runs: inputs.  edges: inputs of the later runs,
    at other sizes. Each edge must keep the graph's limits, without a margin: a golden set may lack the hard samples by
    which its edges would be judged."""

    def __init__(self, limits: GraphLimits, runs: Sequence[Tensors], edges: Sequence[Tensors] = ()) -> None:
        self.limits, self.runs, self._edges, self._edge_failures = limits, runs, edges, 0
        self._edge_drifts: dict[str, Drift] = {}
        self._parts = [
            StageComparison("quantization", None, {}, selections=Selections(limits.selected)) for _ in runs[:PARTS]
        ]

    def add(self, index: int, expected_outputs: Tensors, actual: Tensors) -> bool:
        """Add the outputs of float model and trial for a run; return whether a part of the runs, or an edge, failed."""
        if self.is_edge(index):
            inputs = self._edges[index - len(self.runs)]
            pairs = {name: (values, actual[name]) for name, values in expected_outputs.items()}
            self._edge_failures += sum(not self._holds_at_edge(name, inputs, pair) for name, pair in pairs.items())
            return self._edge_failures > 0
        run_part = self._parts[self._part(index)]
        run_part.add(Case(str(index), "golden", self.runs[index], {}), expected_outputs, actual)
        is_last = index + 1 == len(self.runs) or self._part(index + 1) != self._part(index)
        return is_last and not all(check.passed for check in run_part.checks(self._limits(budget_of(self.limits))))

    def is_edge(self, index: int) -> bool:
        """Whether a run is one of the edges."""
        return index >= len(self.runs)

    def _holds_at_edge(self, output: str, inputs: Tensors, pair: tuple[Array, Array]) -> bool:
        """Whether an output keeps the graph's limits at an edge; True for an output that is judged by its rows."""
        if output in self.limits.selected:
            return True
        usual_drift = self._usual.get(output)
        limits = self._limits(_plain_budget(self.limits)).at(output, "edge", pair[0].size)
        try:
            usual_drift = usual_drift and replace(usual_drift, samples=None)
            checks = edge_checks("quantization", ("edge", inputs.values()), output, pair, usual_drift, limits)
        except ValueError:  # another shape
            return False
        if is_exact(pair[0]):
            self._edge_drifts[output] = self._edge_drifts.get(output, Drift()).merge(measure(*pair))
        return all(check.passed for check in checks)

    def _part(self, index: int) -> int:
        sizes = itertools.accumulate(len(self.runs[part_index::PARTS]) for part_index in range(PARTS))
        return next(part_index for part_index, end in enumerate(sizes) if index < end)

    def _limits(self, budget: Budget) -> OutputLimits:
        exact_names = {
            name for run_part in self._parts for name, array in run_part.outputs.items() if array.dtype.kind in "biu"
        }
        near_ties = {} if DECISIONS in self.limits.given else dict.fromkeys(exact_names, NearTies())
        return OutputLimits(Budgets(budget, decisions=near_ties))

    @cached_property
    def _usual(self) -> dict[str, Drift]:
        """The drift of all runs, by output; read only after all runs were added."""
        usual_drifts: dict[str, Drift] = {}
        for run_part in self._parts:
            for output, drift in run_part.usual().items():
                usual_drifts[output] = usual_drifts[output].merge(drift) if output in usual_drifts else drift
        return usual_drifts

    def missed(self) -> int:
        """The number of failed checks. A share of `MOST_CHANGED` of the decisions may change, and always one."""
        limits, usual_drifts = self._limits(budget_of(self.limits)), self._usual
        checks = [check for run_part in self._parts for check in run_part.checks(limits)]
        decision_results = decision_checks(usual_drifts, self.limits.metrics, self.limits.given)
        judged_outputs = {
            check.output for check in decision_results if check.name == CHANGED and check.limit is not None
        }
        decision_counts = [
            (rows.flips, rows.count) for output in judged_outputs if (rows := as_decided(usual_drifts[output]).rows)
        ]
        if DECISIONS not in self.limits.given:
            # A larger size repeats a sample with its near ties: half as many decisions may change there.
            weighted_drifts = [(1, drift) for drift in usual_drifts.values()]
            weighted_drifts += [(2, drift) for drift in self._edge_drifts.values()]
            decision_counts += [
                (weight * drift.mismatches, drift.count)
                for weight, drift in weighted_drifts
                if drift.mismatches is not None
            ]
        excesses = [flips for flips, count in decision_counts if flips > max(1, MOST_CHANGED * count)]
        return sum(not check.passed for check in [*checks, *decision_results]) + len(excesses) + self._edge_failures
