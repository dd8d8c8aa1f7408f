import numpy as np
import pytest

from enginesmith.core.reports.proof import describe
from enginesmith.core.types import Dim, TensorSpec
from validation.comparison.sessions import drift_checks
from validation.golden.golden_set import GoldenSet, freeze
from validation.limits.budget import Budgets, OutputLimits, default_budget
from validation.limits.terms import Budget
from validation.metrics.drift import measure

SPECS = [TensorSpec("x", "float32", ("batch", 8))]
DIMS = [Dim("batch", 1, 4, 16)]
COLUMNS, SAMPLES, SEEDS = 16, 48, range(40)
INT8, FP16 = default_budget("quantization", "int8"), Budget(sqnr_db=50, centered_sqnr_db=50, slice_sqnr_db=50)


class Net:
    """Relu of a product; most of what is before it is below zero. before: changes that.  after: changes the answer."""

    inputs = SPECS
    outputs = (TensorSpec("y", "float32", ("batch", COLUMNS)),)

    def __init__(self, seed, before=lambda h: h, after=lambda y: y, bias=-2.5):
        rng = np.random.default_rng(seed)
        self.w, self.b = rng.normal(size=(8, COLUMNS)) / np.sqrt(8), bias + rng.normal(size=COLUMNS) / 2
        self.before, self.after = before, after

    def run(self, inputs):
        h = self.before(inputs["x"] @ self.w + self.b)
        return {"y": self.after(np.maximum(h, 0)).astype(np.float32)}


def rounded(step, phase=0.0):
    """An error of so many units at most, another one for each number."""
    return lambda h: h + step * np.sin(1e5 * h + phase)


def samples(seed, count=SAMPLES):
    return np.random.default_rng(1000 + seed).normal(size=(count, 8)).astype(np.float32)


def frozen(net, seed) -> GoldenSet:
    x = samples(seed)
    return freeze([{"x": part} for part in np.split(x, SAMPLES // 4)], SPECS, DIMS, net.run)


def broken(reference, candidate, limits, seed):
    checks = drift_checks("quantization", reference, candidate, frozen(reference, seed), limits)
    return [describe(check) for check in checks if not check.passed]


@pytest.mark.parametrize(
    ("precision", "step", "after"),
    [
        ("int8", 0.02, lambda y: y),
        ("bf16", 0.005, lambda y: y),
        pytest.param("bf16", 0.01, lambda y: 6 - y, marks=pytest.mark.slow),
    ],
    ids=["int8", "bf16", "held at 6"],
)
def test_rounding_before_relu_passes(precision, step, after):
    budget, result = default_budget("quantization", precision), []
    for seed in SEEDS:
        result += broken(Net(seed, after=after), Net(seed, rounded(step), after), budget, seed)
    assert result == []


def test_rounding_before_relu_passes_with_limits_from_honest_rounding():
    items = []
    for seed in SEEDS:
        reference, candidate = Net(seed), Net(seed, rounded(1e-3, 1.0))
        expected, honest_output = (net.run({"x": samples(seed)})["y"] for net in (reference, Net(seed, rounded(1e-3))))
        drift = measure(expected, honest_output, samples=SAMPLES)
        limit = drift.sqnr_db - 12
        budget = Budget(sqnr_db=limit, slice_sqnr_db=limit, centered_sqnr_db=drift.centered_sqnr_db - 12)
        limits = OutputLimits(Budgets(budget), {("y", "golden"): drift, ("y", "edge"): drift})
        items += broken(reference, candidate, limits, seed)
    assert items == []


def dead(column):
    return lambda y: y * (np.arange(COLUMNS) != column)


@pytest.mark.parametrize("budget", [INT8, FP16], ids=["int8", "fp16"])
def test_a_dead_column_that_a_few_samples_fill_is_caught(budget):
    reference = Net(0)
    y = reference.run({"x": samples(0)})["y"]
    filled_counts = np.count_nonzero(y, axis=0)
    energy = np.square(y).sum(axis=0)
    few_indices = np.flatnonzero((filled_counts < 8) & (energy > 0.5 * energy.mean()))
    assert len(few_indices)
    for column in few_indices:
        message = broken(reference, Net(0, after=dead(column)), Budget(slice_sqnr_db=budget.slice_sqnr_db), 0)
        assert "slice_sqnr_db of y at golden: 0" in message[0] and f"(axis 1, index {column})" in message[0]


def test_a_small_column_that_many_samples_fill_is_caught():
    """A hundredth of the others, and in every sample: its own energy is what counts."""
    small = np.where(np.arange(COLUMNS) == 3, 0.01, 1)
    reference = Net(0, after=lambda y: y * small, bias=1.0)
    for fault in (lambda y: dead(3)(y * small), lambda y: y * small * np.where(np.arange(COLUMNS) == 3, 2, 1)):
        (message,) = broken(reference, Net(0, after=fault, bias=1.0), INT8, 0)
        assert "slice_sqnr_db of y at golden" in message and "index 3" in message


def test_an_edge_of_samples_that_are_nearly_zero_is_measured_against_the_golden_set():
    """What the first sample fills is less than a rounding, or nothing."""
    small_function = lambda y: y * (1e-3 if len(y) == 1 else 1)  # noqa: E731 - as short as it is
    none = lambda y: y * (0 if len(y) == 1 else 1)  # noqa: E731
    for quiet in (small_function, none):
        candidate = Net(0, after=lambda y, quiet=quiet: quiet(y) + 1e-3, bias=1.0)
        assert broken(Net(0, after=quiet, bias=1.0), candidate, INT8, 0) == []
        wrong_net = Net(0, after=lambda y, quiet=quiet: quiet(y) + (len(y) == 1), bias=1.0)
        assert [item.partition(" of ")[0] for item in broken(Net(0, after=quiet, bias=1.0), wrong_net, INT8, 0)]


def test_an_edge_of_the_worst_golden_sample_is_judged_by_it():
    """One sample beyond what was calibrated: the golden set keeps the limit, an edge of that sample alone does not."""
    first_sample = samples(0)[0]

    class Clipped(Net):
        def __init__(self, share, alone):
            super().__init__(0, bias=1.0)
            self.share, self.alone = share, alone

        def run(self, inputs):
            y, x = super().run(inputs)["y"], inputs["x"]
            lost_share = self.alone if len(x) == 1 else self.share
            return {"y": y * np.where((x == first_sample).all(axis=1), lost_share, 1)[:, None].astype(np.float32)}

    assert broken(Net(0, bias=1.0), Clipped(0.75, 0.75), INT8, 0) == []
    assert any("sqnr_db of y at batch=1" in note for note in broken(Net(0, bias=1.0), Clipped(0.75, 0.4), INT8, 0))
    checks = drift_checks("engine", Net(0, bias=1.0), Clipped(0.75, 0.75), frozen(Net(0, bias=1.0), 0), INT8)
    assert [check.case for check in checks if check.name == "sqnr_db" and not check.passed] == ["batch=1"]
