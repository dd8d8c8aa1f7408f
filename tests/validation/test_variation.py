import math

import numpy as np
import pytest

from enginesmith.core.reports.proof import describe
from enginesmith.core.types import Dim, TensorSpec
from validation.comparison.sessions import drift_checks, expected_checks
from validation.golden.golden_set import Case, GoldenSet, freeze
from validation.limits.budget import Budgets, OutputLimits
from validation.limits.terms import Budget
from validation.metrics.drift import measure
from validation.metrics.slices import worst_slice

SPECS = [TensorSpec("x", "float32", ("batch", 8))]
DIMS = [Dim("batch", 1, 4, 24)]
X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
W = (np.random.default_rng(1).normal(size=(8, 10)) * 0.4 / np.sqrt(8)).astype(np.float32)
LIFTED = Budget()
LIMITS = {
    "fp32": Budget(sqnr_db=80, centered_sqnr_db=40, slice_sqnr_db=60, max_rel=1e-3),
    "fp16": Budget(sqnr_db=45, centered_sqnr_db=10, slice_sqnr_db=30, max_rel=0.03),
    "bf16": Budget(sqnr_db=25, centered_sqnr_db=10, slice_sqnr_db=15, max_rel=0.2),
    "int8": Budget(sqnr_db=15, centered_sqnr_db=3, slice_sqnr_db=8, max_rel=0.6),
}


class Fake:
    inputs = SPECS

    def __init__(self, function, dtype="float32"):
        self.function = function
        self.outputs = (TensorSpec("y", dtype, ("batch", 10)),)

    def run(self, inputs):
        result = self.function(inputs["x"])
        return result if isinstance(result, dict) else {"y": result}


def offset(x):
    """Logits of 288 and a signal of 0.4."""
    return 288 + x @ W


def frozen(function=offset, x=X, dims=DIMS) -> GoldenSet:
    parts = [{"x": part} for part in np.split(x, 8)]
    return freeze(parts, SPECS, dims, lambda inputs: Fake(function).run(inputs))


def broken(checks):
    return [check for check in checks if not check.passed]


def names(checks):
    return {check.name for check in broken(checks)}


def truncated(values, bits):
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(23 - bits) << np.uint32(23 - bits)).view(np.float32)


def test_the_model_itself_is_proven_in_every_precision():
    for limits in LIMITS.values():
        assert not broken(expected_checks("engine", Fake(offset), frozen(), limits))
    half_runner = Fake(lambda x: offset(x).astype(np.float16), "float16")
    assert not broken(expected_checks("quantization", half_runner, frozen(), LIMITS["fp16"]))


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("stage", ["export", "quantization", "engine"])
def test_an_offset_alone_is_not_proven(precision, stage):
    for answer in (lambda x: np.full((len(x), 10), 288, np.float32), lambda x: 288 + 0 * offset(x)):
        checks = drift_checks(stage, Fake(offset), Fake(answer), frozen(), LIMITS[precision])
        assert {"constant", "centered_sqnr_db"} <= names(checks)
    if precision != "fp32":
        assert "sqnr_db" not in names(checks)


def test_a_constant_answer_is_never_proven():
    constant = Fake(lambda x: np.full((len(x), 10), 288, np.float32))
    (check,) = broken(expected_checks("engine", constant, frozen(), LIFTED))
    assert check.name == "constant" and check.note == "the same for every sample, where the expected output differs"
    assert check.output == "y" and check.case == "golden"


def test_roundings_that_swallow_the_signal_are_not_proven():
    coarse = Fake(lambda x: truncated(offset(x), 7))
    checks = expected_checks("quantization", coarse, frozen(), LIMITS["bf16"])
    assert "centered_sqnr_db" in names(checks) and "sqnr_db" not in names(checks)
    tf32 = Fake(lambda x: truncated(offset(x), 10))
    lenient_budget = LIMITS["fp32"].override({"sqnr_db": 60, "slice_sqnr_db": 60, "max_rel": None})
    assert names(expected_checks("engine", tf32, frozen(), lenient_budget)) == {"centered_sqnr_db", "slice_sqnr_db"}


def test_constant_outputs_pass():
    def anchored(x):
        grid = np.tile(np.arange(10, dtype=np.float32), (len(x), 1))
        norms = 1 + 1e-7 * np.sin(1e4 * x @ W)
        return {"y": offset(x), "grid": grid, "ids": grid.astype(np.int64), "zero": 0 * grid, "norms": norms}

    limits = LIMITS["fp32"]
    other_runner = Fake(
        lambda x: {**anchored(x), "norms": np.ones((len(x), 10), np.float32), "grid": anchored(x)["grid"] + 1e-6}
    )
    for candidate in (Fake(anchored), other_runner):
        checks = expected_checks("export", candidate, frozen(anchored), limits)
        assert not broken(checks), [describe(check) for check in broken(checks)]
    quiet = [check for check in checks if check.output == "grid" and check.name == "centered_sqnr_db"]
    assert quiet[0].value is None and quiet[0].note == "the expected output does not vary over the samples"


def test_one_constant_output_of_several_is_named():
    def two(x):
        return {"y": offset(x), "classes": np.argmax(x @ W, axis=1)}

    stuck = Fake(lambda x: {**two(x), "classes": np.zeros(len(x), np.int64)})
    budget = Budget(argmax_agreement=0.0)
    assert [check.output for check in broken(expected_checks("engine", stuck, frozen(two), budget))] == ["classes"]
    assert not broken(expected_checks("engine", Fake(two), frozen(two), budget))


def test_an_honest_kernels_rounding_is_no_variation():
    def norms(x):
        return 1 + 1e-3 * np.sin(1e4 * x @ W)

    ones = Fake(lambda x: np.ones((len(x), 10), np.float32))
    reference = Fake(norms)
    expected = norms(X)
    honest_measurement = measure(expected, np.ones_like(expected), samples=len(X))
    noise = {("y", "golden"): honest_measurement, ("y", "edge"): honest_measurement}
    limits = LIMITS["fp16"]
    assert "constant" in names(drift_checks("engine", reference, ones, frozen(norms), limits))
    assert not broken(drift_checks("engine", reference, ones, frozen(norms), OutputLimits(Budgets(limits), noise)))


def test_an_edge_is_measured_against_the_variation_of_the_golden_set():
    def wrong_alone(x):
        return offset(x) if len(x) > 1 else np.float32(288) + 0 * offset(x)

    checks = expected_checks("engine", Fake(wrong_alone), frozen(), LIMITS["fp16"])
    (check,) = [check for check in broken(checks) if check.name == "centered_sqnr_db"]
    assert check.case == "batch=1" and check.value < 10
    near_median = np.median(offset(X), axis=0)

    def still(x):
        return offset(x) if len(x) > 1 else near_median[None] + 0 * offset(x)

    noisy = Fake(lambda x: still(x) + 0.01 * np.cos(1e5 * x @ W))
    assert not broken(expected_checks("engine", noisy, frozen(still), LIMITS["fp16"]))


def test_one_sample_is_measured_within_itself():
    golden = frozen(x=np.repeat(X[:1], 8, axis=0)[:8], dims=[])
    one_set = GoldenSet((golden.cases[0],))
    ruined = Fake(lambda x: np.full((len(x), 10), 288, np.float32))
    check = next(item for item in expected_checks("export", ruined, one_set, LIFTED) if item.name == "centered_sqnr_db")
    assert check.value < 1 and check.limit is None and check.note == "too few samples to judge"
    wide = freeze([{"x": X[:1]}], SPECS, [], lambda i: {"y": np.tile(offset(i["x"]), (1, 4)) + np.arange(40) / 40})
    check = next(c for c in expected_checks("export", ruined_wide(wide), wide, LIMITS["fp16"]) if "centered" in c.name)
    assert not check.passed and check.note == "of one sample: within the output"


def ruined_wide(golden):
    return Fake(lambda x: np.full_like(golden.cases[0].expected["y"], 288))


def detections(x):
    """Boxes of 0 to 640 and a score of 0 to 1, in one output."""
    rng = np.abs(np.sin(np.outer(x[:, 0] * 1e3, np.arange(1, 101))).reshape(-1, 20, 5))
    return (rng * np.array([640, 640, 640, 640, 1])).astype(np.float32)


def boxes(function, **more):
    return GoldenSet(
        tuple(Case(f"g{index}", "golden", {"x": x}, {"y": function(x)}) for index, x in enumerate(np.split(X, 8)))
    )


RUINED = {
    "scores": lambda y: y * np.where(np.arange(5) == 4, 0.5 + np.sin(7e3 * y), 1),
    "a dead column": lambda y: y * (np.arange(5) != 2),
    "a dead row": lambda y: y * (np.arange(20) != 7)[:, None],
}


@pytest.mark.parametrize("fault", RUINED)
@pytest.mark.parametrize("precision", LIMITS)
def test_a_ruined_slice_is_caught_and_named(fault, precision):
    candidate = Fake(lambda x: RUINED[fault](detections(x)).astype(np.float32))
    checks = expected_checks("engine", candidate, boxes(detections), LIMITS[precision])
    (check,) = [check for check in broken(checks) if check.name == "slice_sqnr_db"]
    field = {"scores": "axis 2, index 4", "a dead column": "axis 2, index 2", "a dead row": "axis 1, index 7"}[fault]
    assert check.note.startswith(field) and field in describe(check)
    if fault == "scores":
        assert "sqnr_db" not in names(checks) or precision == "fp32"


def test_a_slice_whose_offset_hides_it_is_caught():
    def columns(x):
        return np.concatenate([100 * x, 288 + x @ W[:, :1]], axis=1).astype(np.float32)

    stuck_runner = Fake(lambda x: np.where(np.arange(9) == 8, np.float32(288), columns(x)))
    checks = expected_checks("quantization", stuck_runner, frozen(columns), LIMITS["fp16"])
    check = next(check for check in broken(checks) if check.case == "golden")
    assert check.name == "slice_sqnr_db"
    assert check.note == "axis 1, index 8, less than half of its variation is explained"


@pytest.mark.parametrize("precision", LIMITS)
def test_dead_channels_pass(precision):
    def channels(x):
        y = np.tile(x[:, :, None], (1, 1, 6)) * np.array([1, 1, 1, 0, 1e-7, 1])
        return y.astype(np.float32)

    noise = 1e-7 * np.sin(1e5 * channels(X[:4]) + np.arange(6))
    candidate = Fake(lambda x: (channels(x) + np.resize(noise, channels(x).shape)).astype(np.float32))
    checks = expected_checks("engine", candidate, frozen(channels), LIMITS[precision])
    assert not broken(checks), [describe(check) for check in broken(checks)]


def test_samples_of_several_sizes_are_measured_together():
    rng = np.random.default_rng(5)
    cases = []
    for index, length in enumerate((3, 9, 5, 7)):
        x = rng.normal(size=(4, length)).astype(np.float32)
        y = (np.arange(6) * 50 + rng.normal(size=(4, length, 6))).astype(np.float32)
        cases.append(Case(f"golden {index}", "golden", {"x": x}, {"y": y}))
    golden, answers = GoldenSet(tuple(cases)), {case.inputs["x"].tobytes(): case.expected["y"] for case in cases}
    right_runner = Fake(lambda x: answers[x.tobytes()] + np.float32(1e-4))
    assert not broken(expected_checks("engine", right_runner, golden, LIMITS["fp16"]))
    offsets = Fake(lambda x: 0 * answers[x.tobytes()] + np.arange(6, dtype=np.float32) * 50)
    checks = expected_checks("engine", offsets, golden, LIMITS["int8"])
    assert next(check for check in checks if check.name == "centered_sqnr_db").value == pytest.approx(0, abs=1)
    assert not math.isnan(next(check for check in checks if check.name == "slice_sqnr_db").value)


def test_a_constant_answer_fails_with_a_variation_of_a_few_units():
    """Of float32's unit too: an offset of a million hides a signal of 0.4 from every ratio."""
    golden = frozen(lambda x: (1e6 + 1e6 * 3e-7 * np.sign(x @ W)).astype(np.float64))
    silent_runner = Fake(lambda x: np.full((len(x), 10), 1e6), "float64")
    assert "constant" in names(expected_checks("export", silent_runner, golden, LIFTED))


def test_under_a_coarse_limit_a_slice_is_judged_by_its_variation() -> None:
    rng = np.random.default_rng(0)
    expected = (rng.normal(size=(400, 10)) * np.array([1.0] * 9 + [0.4]) - 8).astype(np.float32)
    actual = expected.copy()
    actual[:, 9] = -8  # its variation is lost, at 26 dB of its energy
    drift = measure(expected, actual, samples=len(expected))
    worst = worst_slice(drift.slices, 8.0)
    assert worst and (worst.axis, worst.index) == (1, 9) and worst.margin_db < 0 and worst.of_variation
    faint_expected = (expected + 8) * np.array([1.0] * 9 + [0.1], np.float32) - 8
    lost_expected = faint_expected.copy()
    lost_expected[:, 9] = -8
    drift = measure(faint_expected, lost_expected, samples=len(faint_expected))
    assert worst_slice(drift.slices, 8.0).margin_db > 0, "a class that no sample shows"
