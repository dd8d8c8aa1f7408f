"""The drift of honest kernels (correct kernels with other rounding), measured with perturbed rounding of the graph.

On another machine a correct kernel may quantize an element between two grid points to the other point (a flip). All
later results then change: in a deep graph two correct kernels end as far apart as two quantizations. In a small net the
golden data need not have such an element. Therefore each graph with quantized tensors is also run with MANY flips in
each tensor, and the error energy is scaled to FEW flips of each tensor in all of the data. The numbers of changed
samples and decisions are measured without such additional flips.
"""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np

from builders.execution.process import held_mib
from builders.onnx_graphs.bodies import graph_bytes
from enginesmith.arrays import Array
from enginesmith.core.types import Session
from validation.comparison.sessions import run
from validation.data.batches import leading_dim
from validation.golden.golden_set import Case, GoldenSet, case_kinds
from validation.limits.measured import of_golden
from validation.limits.rounding import Decisions, Honest, greatest, sqnr_of_most, sqnr_of_worst, with_chance
from validation.metrics.drift import Drift, is_exact, measure
from validation.metrics.slices import fit_length
from validation.metrics.tally import samples_of
from validation.perturbation.graph import FLIPS, SKIP, Perturbed

# A small model (file of under SMALL_BYTES, inputs of under SMALL_INPUTS elements) runs on up to MOST_CASES golden and
# MOST_EDGES edge cases: its rounding depends on few elements, and its runs are quick.
MOST_CASES, MOST_EDGES, SMALL_BYTES, SMALL_INPUTS = 12, 8, 1 << 16, 1 << 12
# Any other model runs on SAMPLES samples, at most MOST_SAMPLES of one golden case, on the smallest edge case, and on
# the greatest edge no larger than these. If that does not explain a drift, each edge is measured separately: an edge
# has crops of golden samples, whose rounding other crops do not show.
SAMPLES, MOST_SAMPLES = 8, 4
# Saturated outputs of a classifier change in few samples, and a flip in a convolutional net changes few rows of an
# image. If rounding on SAMPLES does not explain a drift, it is measured on this many (for a small model, cases).
THOROUGH_SAMPLES = 64
# The number of draws in that measurement; the worst of each slice counts. Some of a softmax's thousand classes are
# uncertain at a single place, whose rounding is a single draw. A text recogniser's fp16 graph (6,625 classes) exceeds
# four times the energy of one draw in 110 classes, and of the worst of six draws in 9, by 2 dB at most.
THOROUGH_DRAWS = 4
# Bounds of all runs: seconds, and MiB beside `WEIGHTS` times the model's file (weights in shards are mapped, and do not
# count). Bounds are checked before a run; a run that has begun is finished.
MOST_S, BASE_MIB, WEIGHTS = 300.0, 4096, 8
# Flips in each quantized tensor: in all of the data, and in a run with many of them.
FEW, MANY = 1.0, 4.0


@dataclass(frozen=True)
class _Way:
    """One way to round: the inputs SKIP and FLIPS of the perturbed graph.

    share: factor for the energy of the error.  natural: whether changed samples and decisions are counted, because
    there are hardly more flips than in an honest kernel.  draw: number of the repetition of the same way.
    """

    skip: bool
    flips: float
    share: float = 1.0
    natural: bool = True
    draw: int = 0


@dataclass
class _Sums:
    """The drift of one output by one way to round, over some cases. filled, magnitudes: as in `with_chance`.  together,
    case: as in `Decisions`."""

    drift: Drift = field(default_factory=Drift)
    filled: int = 0
    magnitudes: dict[int, Array] = field(default_factory=dict)
    together: int = 0
    case: int = 0

    def add(self, expected: Array, actual: Array, samples: int) -> None:
        """Add the outputs of a case."""
        self.drift = self.drift.merge(measure(expected, actual, samples=samples))
        self.filled += int(np.count_nonzero(np.logical_or(expected, actual)))
        if self.drift.slices and not is_exact(expected):
            errors = np.abs(np.nan_to_num(actual.astype(np.float64) - expected, posinf=0.0, neginf=0.0))
            for axis in self.drift.slices.axes:
                axis_magnitudes = errors.sum(axis=tuple(index for index in range(errors.ndim) if index != axis))
                stored_sums = self.magnitudes.get(axis, axis_magnitudes[:0])
                size = max(len(axis_magnitudes), len(stored_sums))
                self.magnitudes[axis] = fit_length(stored_sums, size, 0.0) + fit_length(axis_magnitudes, size, 0.0)
        if is_exact(expected):
            moved_counts = np.count_nonzero((expected != actual).reshape(samples, -1), axis=1)
            self.together = max(self.together, int(moved_counts.max(initial=0)))
            self.case = max(self.case, expected.size)


@dataclass(frozen=True)
class _Group:
    """Cases whose drift is measured together. kind: 'golden', 'edge', or the name of one edge.  parts: size of all data
    over the size of these cases.  small: whether the model is small."""

    kind: str
    cases: Sequence[Case]
    parts: float
    small: bool


def measure_rounding(
    graphs: Sequence[Path],
    perturbed: AbstractContextManager[Perturbed],
    golden: GoldenSet,
    reference: Session,
    *,
    thorough: bool = False,
    whole: bool = False,
) -> Iterator[Honest]:
    """The drift of honest kernels of a graph, or of a chain of graphs, on some cases of the golden set.

    For a large model, two results are yielded: from one way of rounding, then from all, which only loosens limits; most
    engines pass with the first. thorough: whether a graph with 16-bit or quantized tensors then runs THOROUGH_DRAWS
    times on THOROUGH_SAMPLES, and on the edges left out so far, each under its name, with a result after each draw; a
    small model only if it has more golden cases or edges, or runs on whole cases.  graphs: ONNX files, whose sizes
    bound the runs.  perturbed: a context that opens the perturbed graph.  reference: a session of the original graph.
    whole: whether all golden cases run uncut, as sequences do.
    It stops after `MOST_S`, or if the runs take too much memory. Then, and if a graph cannot be perturbed or run, the
    last result is partial and has the reason.
    """
    partial_result, bounds = Honest(), _Bounds.of(graphs)
    is_small = sum(map(graph_bytes, graphs)) < SMALL_BYTES
    try:
        with perturbed as perturbed_graph:
            groups = _groups(golden, is_small, reference, SAMPLES, whole)
            ways = [list(_ways(perturbed_graph.halves, perturbed_graph.grids, group)) for group in groups]
            way_slices = [slice(0, 1), slice(1, None)] if groups and not groups[0].small else [slice(None)]
            passes = [[group_ways[way_slice] for group_ways in ways] for way_slice in way_slices]
            for partial_result in _measure(groups, passes, reference, perturbed_graph.session, bounds):
                yield partial_result
            is_sampled = groups and (whole or not groups[0].small or groups[0].parts > len(groups[0].cases))
            other_edges = _other_edges(golden, groups)
            if thorough and (is_sampled or other_edges) and (perturbed_graph.halves or perturbed_graph.grids):
                groups = [*_groups(golden, is_small, reference, THOROUGH_SAMPLES, whole), *other_edges]
                ways = [list(_ways(perturbed_graph.halves, perturbed_graph.grids, group)) for group in groups]
                is_late = [group.kind not in ("golden", "edge") for group in groups]
                ways = [[way for way in group_ways if not way.draw] for group_ways in ways]
                passes = [
                    [
                        [replace(way, draw=draw) for way in ways[index] if is_late[index] == late]
                        for index in range(len(ways))
                    ]
                    for late in (False, True)
                    for draw in range(THOROUGH_DRAWS)
                ]
                for partial_result in _measure(groups, passes, reference, perturbed_graph.session, bounds):
                    yield partial_result
    except Exception as error:  # of onnx, numpy or a rewrite, too: then the documented limits count
        lines = str(error).splitlines()
        yield replace(partial_result, reason=(lines[0] if lines else type(error).__name__)[:200])


def _measure(
    groups: Sequence[_Group],
    passes: Iterable[Sequence[Sequence[_Way]]],
    reference: Session,
    rounding: Session,
    bounds: "_Bounds",
) -> Iterator[Honest]:
    """The result after each pass. passes: for each group, the ways to round that run on it. Raises as `_run`."""
    group_sums: list[dict[tuple[str, _Way], _Sums]] = [{} for _ in groups]
    for pass_ways in passes:
        if any(pass_ways):
            for group, ways, run_sums in zip(groups, pass_ways, group_sums, strict=True):
                run_sums.update(_run(group, reference, rounding, ways, bounds) if ways else {})
            yield _collect_honest(groups, group_sums)


@dataclass(frozen=True)
class _Bounds:
    """The end of all runs: at `end` of the monotonic clock, or once they take over `extra_mib` besides `held_mib`."""

    end: float
    held_mib: float
    extra_mib: int

    @classmethod
    def of(cls, graphs: Sequence[Path]) -> Self:
        """Bounds that start now. graphs: the ONNX files, whose sizes determine the memory."""
        extra_mib = BASE_MIB + WEIGHTS * (sum(graph.stat().st_size for graph in graphs) >> 20)
        return cls(time.monotonic() + MOST_S, held_mib(os.getpid()), extra_mib)

    def check(self) -> None:
        """Raise ValueError once a bound is reached."""
        if time.monotonic() > self.end:
            raise ValueError(f"its runs were ended after {MOST_S:g} s")
        if held_mib(os.getpid()) > self.held_mib + self.extra_mib:
            raise ValueError(f"its runs were ended when they held over {self.extra_mib} MiB")


def _collect_honest(groups: Sequence[_Group], group_runs: Sequence[Mapping[tuple[str, _Way], _Sums]]) -> Honest:
    drift_lists: dict[tuple[str, str], list[Drift]] = {}
    golden: dict[str, dict[_Way, _Sums]] = {}
    # The size of the unmeasured data over the size of the measured data.
    ratios = (max(group.parts / len(group.cases) - 1, 0.0) for group in groups if group.kind == "golden")
    unmeasured_ratio = next(ratios, 0.0)
    for group, run_sums in zip(groups, group_runs, strict=True):
        for (output, way), sums in run_sums.items():
            if group.kind == "golden":
                golden.setdefault(output, {})[way] = sums
            if sums.drift.mismatches is None:
                drift = with_chance(sums.drift, sums.filled, sums.magnitudes)
                drift = replace(drift, error_sq=drift.error_sq * way.share)
                drift_lists.setdefault((output, group.kind), []).append(drift)
    drifts: dict[tuple[str, str], Drift] = {}
    for (output, kind), known_drifts in drift_lists.items():
        golden_case_drifts = drift_lists.get((output, "golden"), known_drifts)
        # Edge cases have few of the golden samples; their drift is at least that of the golden cases. A single edge had
        # the limits of all edges before; its drift is at least theirs, and its limits only loosen.
        edge_drifts = [*golden_case_drifts, *drift_lists.get((output, "edge"), [])]
        all_drifts = known_drifts if kind == "golden" else [*known_drifts, *edge_drifts]
        drifts[output, kind] = greatest(all_drifts, golden_case_drifts[0])
    floats = {output: run_sums for output, run_sums in golden.items() if (output, "golden") in drift_lists}
    decisions = {}
    for output, way_sums in golden.items():
        if output not in floats:  # integers, by the way to round that changes most of them
            natural_sums = [sums for way, sums in way_sums.items() if way.natural]
            sums = max(natural_sums, key=lambda sums: sums.drift.mismatches or 0)
            unmeasured_count = round(unmeasured_ratio * sums.drift.count)
            counts = sums.drift.mismatches or 0, sums.drift.count
            decisions[output] = Decisions(*counts, max(sums.together, 1), unmeasured_count, sums.case)
    return Honest(drifts, {output: _most_samples(run_sums) for output, run_sums in floats.items()}, decisions)


def _most_samples(runs: Mapping[_Way, _Sums]) -> float:
    """The SQNR in dB of most samples in the worst way to round; with few samples, of all samples in every way."""
    drifts = {way: of_golden(sums.drift) for way, sums in runs.items()}
    majority_sqnr = [sqnr_of_most(drift) for way, drift in drifts.items() if way.natural]
    sqnr_values = [sqnr_db for sqnr_db in majority_sqnr if sqnr_db is not None]
    return min(sqnr_values) if sqnr_values else min(map(sqnr_of_worst, drifts.values()))


def _ways(halves: bool, grids: bool, group: _Group) -> Iterator[_Way]:
    """The ways to round in which a group of cases runs.

    In a small model FEW flips are more than in an honest kernel; it is also run without flips. A large model has more
    elements near a tie; MANY flips are drawn twice for it, because few samples show their effect.
    """
    least_count = FEW / group.parts
    skips = (False, True) if halves else (False,)
    for skip in skips:
        yield _Way(skip, least_count, natural=not (grids and group.small))
    if not grids:
        return
    for draw in range(2 if group.kind == "golden" and not group.small else 1):
        yield _Way(halves, MANY, least_count / MANY, natural=False, draw=draw)
    if group.kind == "golden" and group.small:
        yield from (_Way(skip, 0.0) for skip in skips)


def _run(
    group: _Group, reference: Session, rounding: Session, ways: Sequence[_Way], bounds: "_Bounds"
) -> dict[tuple[str, _Way], _Sums]:
    """The drift of each output by each way to round, over the cases of a group. Raises ValueError once the runs are out
    of bounds."""
    way_sums: dict[tuple[str, _Way], _Sums] = {}
    # For a small model, floats by sample are measured once for all cases: measuring takes longer than the runs.
    pairs_by_shape: dict[tuple[str, _Way, tuple[int, ...]], list[tuple[Array, Array]]] = {}
    for case in group.cases:
        outputs = run(reference, case.inputs)
        for index, way in enumerate(ways):
            if not (group.small and index):
                bounds.check()
            controls = {SKIP: np.array(way.skip), FLIPS: np.array(way.flips, np.float32)}
            actual = run(rounding, {**case.inputs, **controls})
            for name, array in outputs.items():
                if array.size and array.shape == actual[name].shape:
                    sample_count = samples_of(case.inputs.values(), array)
                    if group.small and sample_count > 1 and not is_exact(array):
                        pairs_by_shape.setdefault((name, way, array.shape[1:]), []).append((array, actual[name]))
                    else:
                        way_sums.setdefault((name, way), _Sums()).add(array, actual[name], sample_count)
    for (name, way, _), pairs in pairs_by_shape.items():
        expected, rounded = map(np.concatenate, zip(*pairs, strict=True))
        way_sums.setdefault((name, way), _Sums()).add(expected, rounded, len(expected))
    return {key: sums for key, sums in way_sums.items() if sums.drift.count}


def _groups(golden: GoldenSet, is_small: bool, reference: Session, samples: int, uncut: bool) -> list[_Group]:
    """A group of the golden cases to measure, and a group for each edge case. is_small: whether the graphs are small.
    samples: in all (at least MOST_CASES cases for a small model).  uncut: `whole` of `measure_rounding`."""
    kinds = case_kinds(golden)
    sizes = {index: _size(golden.cases[index]) for index, kind in enumerate(kinds) if kind == "edge"}
    is_small = is_small and max(sizes.values(), default=0) < SMALL_INPUTS
    max_cases = None if uncut else max(MOST_CASES, samples) if is_small else samples
    whole_cases = list(islice(golden.of_kind("golden"), max_cases))
    cases = whole_cases if is_small or uncut else [_first_samples(case, reference) for case in whole_cases]
    if not (is_small or uncut):
        counts = itertools.accumulate(_count_samples(case) for case in cases)
        case_count = next((index for index, count in enumerate(counts, 1) if count >= samples), len(cases))
        whole_cases, cases = whole_cases[:case_count], cases[:case_count]
    max_size = max(map(_size, cases), default=0)
    order = sorted(sizes, key=lambda index: sizes[index])
    small_indices = [index for index in order if sizes[index] <= max_size]
    edge_indices = [*order[: MOST_EDGES - 1], *order[-1:]] if is_small else [*order[:1], *small_indices[-1:]]
    part_count = kinds.count("golden") * sum(map(_size, whole_cases)) / max(sum(map(_size, cases)), 1)
    edge_groups = [_Group("edge", [golden.cases[index]], 1, is_small) for index in dict.fromkeys(edge_indices)]
    return [_Group("golden", cases, part_count, is_small), *edge_groups] if cases else edge_groups


def _other_edges(golden: GoldenSet, groups: Sequence[_Group]) -> list[_Group]:
    """The edges that `groups` lack, each uncut as a group under its name: one sample may have all the drift."""
    is_small, names = bool(groups) and groups[0].small, {case.name for group in groups for case in group.cases}
    return [_Group(case.name, [case], 1, is_small) for case in golden.of_kind("edge") if case.name not in names]


def _first_samples(case: Case, reference: Session) -> Case:
    """A case cut to its first samples, if the first axis of all inputs is one dynamic dim; else the case."""
    if leading_dim(reference.inputs) is not None:
        return replace(case, inputs={name: array[:MOST_SAMPLES] for name, array in case.inputs.items()})
    return case


def _count_samples(case: Case) -> int:
    """The number of samples of a case: the length of axis 0 if all inputs have the same length there, else 1."""
    lengths = {array.shape[0] if array.ndim else 0 for array in case.inputs.values()}
    return max(lengths) if len(lengths) == 1 else 1


def _size(case: Case) -> int:
    return sum(array.size for array in case.inputs.values())
