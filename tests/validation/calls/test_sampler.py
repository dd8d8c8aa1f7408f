"""The check of an engine's sampler finds one that draws otherwise than the reference."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.onnx_graphs.sampler import append_sampler
from builders.reference import ReferenceSession
from tests.decoding import SAMPLING, VOCABULARY, WIDTH, make_decoder
from validation.calls.sampler import sampler_checks
from validation.golden.golden_set import Case, GoldenSet


def golden() -> GoldenSet:
    rng = np.random.default_rng(0)
    made = [rng.integers(VOCABULARY, size=(2, 1)) for _ in range(6)]
    cases = [{"ids": ids, "past": rng.normal(size=(2, 3, WIDTH)).astype(np.float32)} for ids in made]
    return GoldenSet([Case(str(at), "golden", inputs, {}) for at, inputs in enumerate(cases)])


def check(path: Path, fault: str = "") -> float:
    model = make_decoder()
    append_sampler(model, SAMPLING)
    for node in model.graph.node:
        if fault and node.name.endswith(fault):
            before = node.op_type
            node.op_type = {"Div": "Mul", "Exp": "Sigmoid", "Less": "LessOrEqual", "And": "Or"}[before]
    onnx.save(model, path)
    with ReferenceSession(path) as session:
        (found,) = sampler_checks(session, SAMPLING, golden(), 0)
    assert found.passed == (found.value == 1.0)
    return float(found.value)


def test_the_sampler_of_a_graph_is_right(tmp_path: Path) -> None:
    assert check(tmp_path / "model.onnx") == 1.0


@pytest.mark.parametrize("fault", ["_Div", "_Exp", "_And"])
def test_a_planted_fault_is_found(tmp_path: Path, fault: str) -> None:
    assert check(tmp_path / "model.onnx", fault) < 1.0


@pytest.mark.parametrize("branches", [("lowered", "lowered"), ("raised", "raised"), ("lowered", "raised")])
def test_a_penalty_on_the_wrong_side_of_zero_is_found(tmp_path: Path, branches: tuple[str, str]) -> None:
    model = make_decoder()
    append_sampler(model, SAMPLING)
    (penalized,) = [node for node in model.graph.node if "enginesmith/Sample/penalized" in node.output]
    penalized.input[1:] = [f"enginesmith/Sample/{name}" for name in branches]
    onnx.save(model, tmp_path / "model.onnx")
    with ReferenceSession(tmp_path / "model.onnx") as session:
        assert not sampler_checks(session, SAMPLING, golden(), 0)[0].passed


def test_a_state_that_forgets_is_found(tmp_path: Path) -> None:
    model = make_decoder()
    append_sampler(model, SAMPLING)
    (scatter,) = [node for node in model.graph.node if node.op_type == "ScatterElements"]
    scatter.op_type, scatter.input[2] = "ScatterElements", "enginesmith/Sample/none"  # writes 0 for what was read
    onnx.save(model, tmp_path / "model.onnx")
    with ReferenceSession(tmp_path / "model.onnx") as session:
        assert not sampler_checks(session, SAMPLING, golden(), 0)[0].passed
