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
from builders.types import Precision, Session
from validation.compare import run
from validation.drift import Drift, is_exact, measure
from validation.golden import Case, GoldenSet, case_kinds
from validation.rounding.figures import Honest, greatest
from validation.rounding.graph import FLIPS, SKIP, traits, with_rounding
from validation.tally import samples_of

# Golden cases and edges, of a small model: its rounding is a matter of few elements, and it takes no time.
MOST_CASES, MOST_EDGES, SMALL_BYTES, SMALL_INPUTS = 12, 8, 1 << 20, 1 << 14
# Of any other: two golden cases, and the smallest and the greatest edge.
# Elements of each quantized tensor that fall elsewhere: in all of the data, and in a run that shows what many do.
FEW, MANY = 1.0, 4.0

Opener = Callable[[Path], AbstractContextManager[Session]]


@dataclass(frozen=True)
class _Way:
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
    parts = case_kinds(golden).count("golden")
    groups = [("golden", chosen[0], parts), *(("edge", [case], 1) for case in chosen[1])]
    found: dict[tuple[str, str], list[Drift]] = {}
    for kind, cases, among in groups:
        for way in _runs(*ways, among):
            for output, drift in _run(cases, *pair, way).items():
                found.setdefault((output, kind), []).append(drift)
    for (output, kind), drifts in found.items():
        yield (output, kind), greatest(drifts, found.get((output, "golden"), drifts)[0])


def _runs(halves: bool, grids: bool, parts: int) -> Iterator[_Way]:
    """parts: among how many such cases the few elements that fall elsewhere are to be found."""
    few = FEW / parts
    yield _Way(False, few)
    if halves:
        yield _Way(True, few)
    if grids:
        yield _Way(halves, MANY, few / MANY)


def _run(cases: Sequence[Case], reference: Session, rounding: Session, way: _Way) -> dict[str, Drift]:
    """Of each output in floating point, the drift over some cases; slices keep the energy of all that moved."""
    total: dict[str, Drift] = {}
    for case in cases:
        expected = run(reference, case.inputs)
        actual = run(rounding, {**case.inputs, SKIP: np.array(way.skip), FLIPS: np.array(way.flips, np.float32)})
        for name, array in expected.items():
            if not is_exact(array) and array.shape == actual[name].shape:
                drift = measure(array, actual[name], samples=samples_of(case.inputs.values(), array))
                total[name] = total[name].merge(drift) if name in total else drift
    return {name: replace(drift, error_sq=drift.error_sq * way.share) for name, drift in total.items() if drift.count}


def _chosen(golden: GoldenSet, graph: Path) -> tuple[list[Case], list[Case]]:
    """The golden cases and the edges to measure on."""
    places = [index for index, kind in enumerate(case_kinds(golden)) if kind == "edge"]
    sizes = {index: sum(array.size for array in golden.cases[index].inputs.values()) for index in places}
    ordered = sorted(places, key=lambda index: sizes[index])
    small = graph.stat().st_size < SMALL_BYTES and max(sizes.values(), default=0) < SMALL_INPUTS
    edges = ordered[: MOST_EDGES - 1] if small else ordered[:1]
    cases = list(islice(golden.of_kind("golden"), MOST_CASES if small else 2))
    return cases, [golden.cases[index] for index in dict.fromkeys([*edges, *ordered[-1:]])]
