"""Outputs of integers behind a lower precision: near ties that honest kernels decide otherwise, and what is wrong."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from enginesmith.core.types import TensorSpec
from pipeline.compile.steps import proofs
from pipeline.quantization.schemes.cast import cast_float
from tests.faults.bench import Bench
from tests.faults.plants import weighted
from tests.pipeline.quantization.small_nets import build
from tests.validation.attribution.planted import weight, with_names, with_weight
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budgets, budgets, default_budget, strictest
from validation.limits.rounding import Decisions, Honest, NearTies

WIDTH = 8
SPECS = (TensorSpec("x", "float32", ("batch", WIDTH)),)
BEST = {
    "TopK": ("values, y = TopK(s, k)", "int64[batch,5] y"),
    "ArgMax": ("y = ArgMax<axis=1,keepdims=0>(s)", "int64[batch] y"),
}


def ranking(operator: str, seed: int) -> onnx.ModelProto:
    """The best of 64 scores, of which some are nearer to each other than fp16 tells apart."""
    rng, (text, output) = np.random.default_rng(seed), BEST[operator]
    weights = {"w": rng.normal(size=(WIDTH, 32)), "v": rng.normal(size=(32, 64)) / 6, "k": np.array([5])}
    return with_names(
        build(f"float[batch,{WIDTH}] x", output, f"h = MatMul(x, w) a = Tanh(h) s = MatMul(a, v) {text}", weights)
    )


def bench_of(folder: Path, model: onnx.ModelProto, seed: int) -> Bench:
    x = np.random.default_rng(seed + 1).normal(size=(48, WIDTH)).astype(np.float32)
    return Bench(folder, model, {"x": x}, SPECS)


def agreements(checks: list) -> dict[str, float]:  # type: ignore[type-arg]
    return {check.case: check.value for check in checks if check.name == "agreement" and not check.passed}


# Seeds with near ties: with a limit of 1 each fails in the graph, and TopK in the engine too.
@pytest.mark.parametrize(("operator", "seed"), [("TopK", 2), ("TopK", 6), ("ArgMax", 2)])
def test_near_ties_of_fp16_are_no_errors(operator: str, seed: int, tmp_path: Path) -> None:
    bench = bench_of(tmp_path, ranking(operator, seed), seed)
    graph = cast_float(bench.canonical(), "fp16")[0]
    in_graph = bench.graph_checks(graph, "fp16")
    assert min(check.value for check in in_graph if check.name == "agreement") < 1
    assert agreements(in_graph) == agreements(bench.engine(None, graph, "fp16").checks()) == {}
    (line,) = [check for check in in_graph if (check.name, check.case) == ("agreement", "golden")]
    assert "honest rounding decides" in line.note and "elements otherwise; twice that, and no less than" in line.note
    asked = bench.engine(None, graph, "fp16").checks(limits={"argmax_agreement": 1.0})
    assert operator == "ArgMax" or agreements(asked), "what a person wrote wins"


@pytest.mark.parametrize("operator", BEST)
def test_an_engine_that_decides_by_other_weights_fails(operator: str, tmp_path: Path) -> None:
    bench = bench_of(tmp_path, ranking(operator, 2), 2)
    graph = cast_float(bench.canonical(), "fp16")[0]
    name = weighted(graph)[-1][1]
    values = weight(graph, name).copy()
    values[:, [0, 1]] = values[:, [1, 0]]
    assert "golden" in agreements(bench.engine(with_weight(graph, name, values), graph, "fp16").checks())


@pytest.mark.parametrize(
    ("found", "golden"),
    [
        (Decisions(0, 1000), 0.998),  # a near tie that no run has shown: two elements change places
        (Decisions(1, 1000), 0.997),
        (Decisions(20, 1000), 0.96),  # twice what was measured
        (Decisions(5, 1000, 5), 0.99),
        (Decisions(0, 50, 1, 950), 0.9144),  # of 50 elements without one, up to 8.8 % of the others
        (Decisions(0, 0), 0.0),
    ],
)
def test_the_limit_of_golden_cases(found: Decisions, golden: float) -> None:
    assert found.limit("golden", 0) == golden


def test_edges_are_strict_where_no_golden_sample_holds_a_near_tie() -> None:
    assert Decisions(0, 1000).limit("edge", 5) == 1
    assert Decisions(20, 1000, 2).limit("edge", 1) < 0.5 < Decisions(20, 1000, 2).limit("edge", 400) < 0.96
    assert Decisions(0, 50, 1, 950).limit("edge", 400) < 0.9144


def test_a_near_tie_of_a_case_is_as_often_in_an_edge_as_the_case() -> None:
    found = Decisions(2, 240, 2, case=20)
    assert found.limit("edge", 80) == found.limit("edge", 20) <= 1 - 2 / 20


def test_edges_with_few_elements_seldom_hold_more_than_they_may() -> None:
    """Errors that come one by one, at the rate that was measured."""
    rng, found = np.random.default_rng(0), Decisions(20, 1000)
    for count in (1, 4, 30, 400):
        agreement = 1 - rng.binomial(count, 0.02, 4000) / count
        assert np.mean(agreement < found.limit("edge", count)) <= 0.01


def test_limits_are_of_integers_alone_and_a_person_s_win() -> None:
    honest = Honest(decisions={"y": Decisions(20, 1000)})
    found = budgets("engine", "int8", None, honest)
    assert found.of("y", "golden").argmax_agreement == 0.96 and found.of("z", "golden") == found.default
    assert found.override({"sqnr_db": 20.0}).of("y", "golden").argmax_agreement == 0.96
    asked = found.override({"argmax_agreement": 0.999})
    assert asked.of("y", "golden").argmax_agreement == 0.999 and not asked.notes
    assert budgets("quantization", "fp16", None, honest).of("y", "golden").argmax_agreement == 0.96
    exact: Budgets = budgets("engine", "fp32", None, honest)
    assert exact.of("y", "golden") == default_budget("engine", "fp32")
    assert strictest("engine", "int8", None).of("y", "golden").argmax_agreement is None  # all must be equal


@pytest.mark.parametrize(
    ("asked", "metric", "expected"),
    [
        ({}, None, {"p": proofs.WEAK, "y": str(NearTies())}),
        ({}, {"name": "accuracy"}, {"y": str(NearTies())}),
        ({"argmax_agreement": 0.9}, None, {"p": proofs.WEAK}),
        ({"sqnr_db": 20.0, "argmax_agreement": 0.9}, None, {}),
    ],
)
def test_the_note_of_integers_behind_quantization_names_what_helps(asked, metric, expected) -> None:
    """A task metric changes nothing for them, and a limit of 1 is not weak."""
    reference = Mock(outputs=(TensorSpec("p", "float32", ("batch", 9)), TensorSpec("y", "int64", ("batch", 3))))
    found = proofs.WrittenLimits(Path(), "int8", asked, metric, Path())(reference, GoldenSet(()))
    assert {output: note for (output, _), note in found.current.budgets.notes.items()} == expected
