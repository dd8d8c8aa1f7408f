"""Sizes and repeated calls that an engine is proven with beside its golden set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import discovery, profile_bounds
from enginery.core.types import BuildRequest, Dim
from pipeline.values import ModelShapes

if TYPE_CHECKING:
    from enginery.core.reports.proof import Check
    from validation.fuzz.outcome import FuzzSides
    from validation.golden.golden_set import GoldenSet


@dataclass(frozen=True)
class Calls:
    """Calls beside the golden set that a spec asks for. seconds: None for a share of the comparison's time.

    bitwise: whether the contract promises bits.  shapes: of the model.
    """

    seconds: float | None
    bitwise: bool
    shapes: ModelShapes


def tried_calls(
    calls: Calls | None,
    request: BuildRequest,
    pair: "FuzzSides",
    golden: "GoldenSet",
    graph: Path,
    compared: "tuple[Sequence[Check], float]",
) -> "tuple[Check, ...]":
    """Checks of the calls that a spec asks for; none where it asks for none.

    compared: checks of the comparison on the golden set, and the seconds it took. Sizes between those of
    the golden set are tried only where its own passed.
    """
    from validation.calls.allowance import Allowance
    from validation.calls.checks import call_checks

    if calls is None:
        return ()
    checks, took = compared
    allowance = Allowance.of(calls.seconds, took)
    shapes = calls.shapes.inputs, calls.shapes.dims
    passed = all(check.passed for check in checks)

    def bits() -> bool:
        return calls.bitwise or repeats_bits(request, graph)

    return tuple(call_checks(pair, shapes, golden, seed_of(request), allowance, bits, passed))


def cases_of(sizes: Sequence[str], golden: "GoldenSet", request: BuildRequest) -> "GoldenSet":
    """The cases of a failed check of sizes, as edges of a golden set without expected outputs."""
    from validation.calls.sizes import VALUES_SEED
    from validation.fuzz.cases import parse_only
    from validation.fuzz.groups import Groups
    from validation.fuzz.values import make
    from validation.golden.golden_set import Case, GoldenSet

    dims = [Dim(name, low, low, high) for name, (low, high) in profile_bounds.sizes(request).items()]
    groups = Groups(golden)
    made = {
        text: make(parse_only(text, dims), request.inputs, groups, VALUES_SEED, request.precision) for text in sizes
    }
    return GoldenSet([Case(text, "edge", inputs, {}) for text, inputs in made.items()], noise=golden.noise)


def seed_of(request: BuildRequest) -> int:
    """The seed of a build: the same for the same build, another for another one."""
    return int(request.key[:8], 16)


def repeats_bits(request: BuildRequest, graph: Path) -> bool:
    """Whether equal inputs must have equal bits: of a backend whose builds give the same answers, on a CPU, unless the
    graph draws numbers. On a GPU kernels may add up in another order each time."""
    import onnx

    from validation.limits.float64 import random_operator

    backend = discovery.configure(request.backend, dict(request.options))
    if backend.capabilities.determinism == "budget" or not request.target.is_cpu:
        return False
    return random_operator(onnx.load(graph, load_external_data=False)) is None
