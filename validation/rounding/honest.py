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
from validation.rounding.figures import Honest, greatest, with_chance
from validation.rounding.graph import FLIPS, SKIP, traits, with_rounding
from validation.tally import samples_of

# Golden cases and edges, of a small model: its rounding is a matter of few elements, and it takes no time.
MOST_CASES, MOST_EDGES, SMALL_BYTES, SMALL_INPUTS = 12, 8, 1 << 16, 1 << 12
# Of any other: the first samples of two golden cases, the smallest edge, and the greatest that is no more than those.
FEW_CASES, MOST_SAMPLES = 2, 4
# Elements of each quantized tensor that fall elsewhere: in all of the data, and in a run that shows what many do.
FEW, MANY = 1.0, 4.0

Opener = Callable[[Path], AbstractContextManager[Session]]


@dataclass(frozen=True)
class _Way:
    """One way to round: the two inputs of the perturbed graph, and the share of its error's energy that counts."""

    skip: bool
    flips: float
    share: float = 1.0


@dataclass(frozen=True)
class _Group:
    """Cases that are judged together. parts: how many such cases all of the data is."""

    kind: str
    cases: Sequence[Case]
    parts: float


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
            return Honest(dict(_measured(_groups(golden, graph, reference), (reference, rounding), ways)))
    except (EngineryError, ValueError) as error:
        return Honest(reason=str(error).splitlines()[0][:200])


def _measured(
    groups: Sequence[_Group], pair: tuple[Session, Session], ways: tuple[bool, bool]
) -> Iterator[tuple[tuple[str, str], Drift]]:
    found: dict[tuple[str, str], list[Drift]] = {}
    for group in groups:
        for way in _runs(*ways, group.parts):
            for output, drift in _run(group.cases, *pair, way).items():
                found.setdefault((output, group.kind), []).append(drift)
    for (output, kind), drifts in found.items():
        golden = found.get((output, "golden"), drifts)
        # Sizes are tried with any golden sample, and edges hold few of them: no less than those show.
        yield (output, kind), greatest(drifts if kind == "golden" else [*drifts, *golden], golden[0])


def _runs(halves: bool, grids: bool, parts: float) -> Iterator[_Way]:
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
    filled: dict[str, int] = {}
    for case in cases:
        expected = run(reference, case.inputs)
        actual = run(rounding, {**case.inputs, SKIP: np.array(way.skip), FLIPS: np.array(way.flips, np.float32)})
        for name, array in expected.items():
            if not is_exact(array) and array.shape == actual[name].shape:
                drift = measure(array, actual[name], samples=samples_of(case.inputs.values(), array))
                total[name] = total[name].merge(drift) if name in total else drift
                filled[name] = filled.get(name, 0) + int(np.count_nonzero(np.logical_or(array, actual[name])))
    found = {name: with_chance(drift, filled[name]) for name, drift in total.items() if drift.count}
    return {name: replace(drift, error_sq=drift.error_sq * way.share) for name, drift in found.items()}


def _groups(golden: GoldenSet, graph: Path, reference: Session) -> list[_Group]:
    """What to measure on."""
    kinds = case_kinds(golden)
    sizes = {index: _size(golden.cases[index]) for index, kind in enumerate(kinds) if kind == "edge"}
    small = graph.stat().st_size < SMALL_BYTES and max(sizes.values(), default=0) < SMALL_INPUTS
    whole = list(islice(golden.of_kind("golden"), MOST_CASES if small else FEW_CASES))
    cases = whole if small else [_first_samples(case, reference) for case in whole]
    most = max(map(_size, cases), default=0)
    ordered = sorted(sizes, key=lambda index: sizes[index])
    within = [index for index in ordered if sizes[index] <= most]
    edges = [*ordered[: MOST_EDGES - 1], *ordered[-1:]] if small else [*ordered[:1], *within[-1:]]
    parts = kinds.count("golden") * sum(map(_size, whole)) / max(sum(map(_size, cases)), 1)
    single = [_Group("edge", [golden.cases[index]], 1) for index in dict.fromkeys(edges)]
    return [_Group("golden", cases, parts), *single] if cases else single


def _first_samples(case: Case, reference: Session) -> Case:
    """A case with a few of its samples, where all inputs have a batch of any size in front."""
    leading = {spec.shape[0] if spec.shape else None for spec in reference.inputs}
    if len(leading) == 1 and all(isinstance(dim, str) for dim in leading):
        return replace(case, inputs={name: array[:MOST_SAMPLES] for name, array in case.inputs.items()})
    return case


def _size(case: Case) -> int:
    return sum(array.size for array in case.inputs.values())
