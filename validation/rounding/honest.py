"""How far an honest kernel's answers lie from its graph's: measured by running the graph with other roundings in it.

One element that lies on the edge between two numbers of a grid, and falls to the other side, is what a correct kernel
on another machine may show, and everything behind it is quantized anew: in a deep graph two correct kernels end as far
apart as two quantizations do. In a small net no such element need be among the golden data. So each graph with
quantized tensors is also run with MANY elements of each tensor falling elsewhere, and the energy of that error is
divided to that of FEW elements of each tensor in all of the data.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from builders.errors import EngineryError
from builders.types import Precision, Session, Tensors
from validation.compare import run
from validation.drift import Drift, is_exact, measure
from validation.golden import Case, GoldenSet, case_kinds
from validation.rounding.figures import Honest
from validation.rounding.graph import FLIPS, SKIP, traits, with_rounding

# Golden cases and edges, of a small model: its rounding is a matter of few elements, and it takes no time.
MOST_CASES, MOST_EDGES, SMALL_BYTES, SMALL_INPUTS = 12, 8, 1 << 20, 1 << 14
# Of any other: two golden cases, and the smallest and the greatest edge.
# Elements of each quantized tensor that fall elsewhere: in all of the data, and in a run that shows what many do.
FEW, MANY = 1.0, 4.0

Opener = Callable[[Path], AbstractContextManager[Session]]


@dataclass(frozen=True)
class _Run:
    """One way to round: the two inputs of the perturbed graph, and the share of its error's energy that counts."""

    skip: bool
    flips: float
    share: float = 1.0


def honest_rounding(
    graph: Path,
    golden: GoldenSet,
    reference: Session,
    opens: Opener,
    workdir: Path,
    *,
    half: Precision | None = None,
    activation_blocks: bool = False,
) -> Honest:
    """Run a graph with an honest kernel's roundings and compare it with itself, on some cases of the golden set.

    reference: the graph as it is.  opens: runs a file as it is written.  half: 'fp16' or 'bf16', where the graph is an
    fp32 one and the kernel is to compute in that.  activation_blocks: see `with_rounding`.
    """
    import onnx

    path = workdir / "rounding.onnx"
    try:
        model = onnx.load(graph)
        perturbed = with_rounding(model, half, activation_blocks)
        onnx.save(perturbed, path)
        with opens(path) as rounding:
            ways = traits(perturbed)
            return Honest(dict(_measured(_chosen(golden, graph), golden, (reference, rounding), ways)))
    except (EngineryError, ValueError) as error:
        return Honest(reason=str(error).splitlines()[0][:200])


def _measured(
    chosen: tuple[list[Case], list[Case]], golden: GoldenSet, pair: tuple[Session, Session], ways: tuple[bool, bool]
) -> Iterator[tuple[tuple[str, str], Drift]]:
    found: dict[tuple[str, str], list[Drift]] = {}
    parts = case_kinds(golden).count("golden")
    groups = [("golden", chosen[0], parts), *(("edge", [case], 1) for case in chosen[1])]
    for kind, cases, among in groups:
        for output, drift in _worst(cases, *pair, list(_runs(*ways, among))).items():
            found.setdefault((output, kind), []).append(drift)
    for key, drifts in found.items():
        yield key, min(drifts, key=lambda drift: drift.sqnr_db)


def _runs(halves: bool, grids: bool, parts: int) -> Iterator[_Run]:
    """parts: among how many such cases the few elements that fall elsewhere are to be found."""
    few = FEW / parts
    yield _Run(False, few)
    if halves:
        yield _Run(True, few)
    if grids:
        yield _Run(halves, MANY, few / MANY)


def _worst(cases: Sequence[Case], reference: Session, rounding: Session, runs: Sequence[_Run]) -> dict[str, Drift]:
    """Of each output, the drift of the run that moves it most; slices of the last, in which most elements move."""
    found: dict[str, list[Drift]] = {}
    totals: list[dict[str, Drift]] = [{} for _ in runs]
    for case in cases:
        expected = run(reference, case.inputs)
        for way, total in zip(runs, totals, strict=True):
            actual = run(rounding, {**case.inputs, SKIP: np.array(way.skip), FLIPS: np.array(way.flips, np.float32)})
            for name, drift in _drifts(expected, actual):
                total[name] = total.get(name, Drift()).merge(drift)
    for way, total in zip(runs, totals, strict=True):
        for name, drift in total.items():
            if drift.count:
                found.setdefault(name, []).append(replace(drift, error_sq=drift.error_sq * way.share))
    return {
        name: replace(
            max(items, key=lambda item: item.error_sq), slices=items[-1].slices, max_abs=max(i.max_abs for i in items)
        )
        for name, items in found.items()
    }


def _drifts(expected: Tensors, actual: Tensors) -> Iterator[tuple[str, Drift]]:
    for name, array in expected.items():
        if not is_exact(array) and array.shape == actual[name].shape:
            yield name, measure(array, actual[name])


def _chosen(golden: GoldenSet, graph: Path) -> tuple[list[Case], list[Case]]:
    """The golden cases and the edges to measure on."""
    places = [index for index, kind in enumerate(case_kinds(golden)) if kind == "edge"]
    sizes = {index: sum(array.size for array in golden.cases[index].inputs.values()) for index in places}
    ordered = sorted(places, key=lambda index: sizes[index])
    small = graph.stat().st_size < SMALL_BYTES and max(sizes.values(), default=0) < SMALL_INPUTS
    edges = ordered[: MOST_EDGES - 1] if small else ordered[:1]
    cases = list(islice(golden.of_kind("golden"), MOST_CASES if small else 2))
    return cases, [golden.cases[index] for index in dict.fromkeys([*edges, *ordered[-1:]])]
