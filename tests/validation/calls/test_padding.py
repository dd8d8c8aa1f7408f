from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.reference import ReferenceSession
from enginesmith.core.state import Padding
from enginesmith.core.types import BuildRequest, ShapeProfile, Target, TensorSpec
from tests.pipeline.quantization.small_nets import build
from validation.calls.checks import next_sizes, padding_checks
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import StagedLimits, default_budget

SHAPE = ("batch", "n")
RULES = Padding({"x": {"batch": "repeat", "n": 3.0}, "mask": {"batch": "repeat", "n": 0.0}}, {"n": (4, 8)})
# Sums over the places that the mask shows; the mean over all places; a sum along the batch.
MASKED = "axes = Constant <value_ints = [1]> ()\nseen = Mul(x, mask)\ny = ReduceSum <keepdims = 0> (seen, axes)"
UNMASKED = "axes = Constant <value_ints = [1]> ()\nseen = Add(x, mask)\ny = ReduceMean <keepdims = 0> (seen, axes)"
ACROSS = "axes = Constant <value_ints = [0]> ()\nall = ReduceSum <keepdims = 1> (mask, axes)\nseen = Mul(x, mask)\n" + (
    "wide = Mul(seen, all)\nin = Constant <value_ints = [1]> ()\ny = ReduceSum <keepdims = 0> (wide, in)"
)


def request(high: tuple[int, int] = (4, 8)) -> BuildRequest:
    inputs = tuple(TensorSpec(name, "float32", SHAPE) for name in ("x", "mask"))
    profile = ShapeProfile(tuple((name, (1, 1), high, high) for name in ("x", "mask")))
    outputs = (TensorSpec("y", "float32", ("batch",)),)
    return BuildRequest("0" * 64, "fp32", Target("cpu"), "onnxruntime", inputs, outputs, (profile,))


def golden(*shapes: tuple[int, int]) -> GoldenSet:
    rng, cases = np.random.default_rng(0), []
    for index, shape in enumerate(shapes):
        x, mask = rng.standard_normal(shape, np.float32), (rng.random(shape) < 0.7).astype(np.float32)
        cases.append(Case(str(index), "golden" if index % 2 == 0 else "edge", {"x": x, "mask": mask}, {}))
    return GoldenSet(cases)


def check(path: Path, text: str, *shapes: tuple[int, int]):
    onnx.save(build("float[batch,n] x, float[batch,n] mask", "float[batch] y", text, {}), path)
    limits = StagedLimits.of(default_budget("engine", "fp32"))
    with ReferenceSession(path) as session:
        (result,) = padding_checks(session, request(), RULES, golden(*shapes), limits)
    return result


def test_a_model_that_uses_its_mask_passes(tmp_path: Path) -> None:
    checks = check(tmp_path / "m.onnx", MASKED, (2, 3), (1, 4), (4, 7))
    assert checks.passed and checks.value == 0.0 and checks.note == "3 padded cases"


@pytest.mark.parametrize("text", [UNMASKED, ACROSS])
def test_a_model_that_reads_padding_fails_and_the_first_case_is_named(tmp_path: Path, text: str) -> None:
    checks = check(tmp_path / "m.onnx", text, (2, 3), (1, 4))
    assert not checks.passed and checks.value == 2.0
    assert "0 padded to batch 3, n 4" in checks.note and "2 of 2 padded cases" in checks.note


def test_padding_rules_without_a_suitable_sample_are_not_proven(tmp_path: Path) -> None:
    checks = check(tmp_path / "m.onnx", MASKED, (4, 8))
    assert not checks.passed and "add smaller samples" in checks.note


def test_a_case_is_padded_to_the_next_edge_that_a_profile_holds() -> None:
    assert next_sizes(request(), RULES, {"batch": 1, "n": 3}) == {"batch": 2, "n": 4}
    assert next_sizes(request(), RULES, {"batch": 4, "n": 4}) == {"batch": 4, "n": 8}
    assert next_sizes(request((4, 6)), RULES, {"batch": 4, "n": 5}) is None
    assert next_sizes(request(), Padding({"x": {"n": 0.0}}), {"batch": 1, "n": 3}) == {"batch": 1, "n": 4}
