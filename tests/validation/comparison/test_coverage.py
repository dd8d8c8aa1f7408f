import numpy as np
import pytest

from tests.validation.comparison.fakes import DIMS, SPECS
from validation.comparison.tasks import unmeasured_checks
from validation.golden.golden_set import freeze
from validation.metrics.tasks.terms import AccuracyMetric, DetectionMetric, SegmentationMetric, TextMetric

NAN = np.nan


def golden(run, labels=None, groups=2):
    x = np.random.default_rng(3).standard_normal((8, 3)).astype(np.float32)
    return freeze([{"x": part} for part in np.split(x, groups)], SPECS, DIMS, run, labels)


def notes(run, dependences=None, metrics=(), **more):
    return {check.output: check.note for check in unmeasured_checks(golden(run, **more), dependences or {}, metrics)}


def same(value, dtype="float32", shape=(2,)):
    return lambda inputs: {"y": np.full((len(inputs["x"]), *shape), value, dtype)}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (same(0), "the same in all 8"),
        (same(0.25), "the same in all 8"),
        (same(True, "bool"), "the same in all 8"),
        (same(3, "int64", ()), "the same in all 8"),
        (same(np.inf), "infinite in all 8"),
        (same(0, shape=(0, 4)), "empty in all 8"),
        # The last bits of a saturated number are rounding, and no answer.
        (lambda inputs: {"y": np.float32(1) - np.abs(inputs["x"]) * np.float32(1e-9)}, "the same in all 8"),
    ],
)
def test_an_output_that_golden_data_does_not_vary_is_not_measured(run, reason):
    assert notes(run)["y"].startswith(reason)
    assert "give golden data that varies it" in notes(run)["y"]


@pytest.mark.parametrize(
    "run",
    [
        lambda inputs: {"y": inputs["x"]},
        lambda inputs: {"y": (inputs["x"] > 1).any(1)},
        lambda inputs: {"y": inputs["x"].argmax(1)},
        lambda inputs: {"y": np.where(inputs["x"] > 0, -np.inf, inputs["x"])},
        lambda inputs: {"y": 1e3 + inputs["x"]},
        same(NAN),  # never passes: `nonfinite` fails
    ],
)
def test_an_output_that_varies_is_measured(run):
    assert notes(run) == {}


def test_a_single_sample_varies_by_its_elements():
    fields = [{"x": np.ones((1, 3), np.float32)}]

    def found(value):
        return [*unmeasured_checks(freeze(fields, SPECS, [], lambda _: {"y": np.array([value])}), {})]

    assert found([1.0, 2.0]) == found([3.7]) == []
    assert [check.note[:10] for check in (*found([0.0]), *found([2.0, 2.0]))] == ["0 througho", "2 througho"]


@pytest.mark.parametrize("dependence", ["constant", "handed on"])
def test_outputs_that_cannot_vary_are_exempt(dependence):
    assert notes(same(1), {"y": dependence}) == {}
    assert notes(same(1), {"y": "computed"}) != {}


def test_labels_of_one_class_measure_nothing():
    def run(inputs):
        return {"y": inputs["x"]}

    metric = AccuracyMetric("y", floor=0.9, against="labels")
    assert notes(run, metrics=[metric], labels=np.array([2] * 8))["y"].startswith("accuracy: all 8 labels are equal")
    assert notes(run, metrics=[metric], labels=np.array([2] * 7 + [1])) == {}


def test_equal_answers_of_the_original_model_measure_nothing():
    def shifted(inputs):  # the class is always 1, though the numbers vary
        return {"y": inputs["x"] + np.array([0, 9, 0], np.float32)}

    def silence(inputs):
        return {"y": np.stack([inputs["x"] + np.array([9, 0, 0], np.float32)] * 3, 1)}

    def nothing(inputs):
        return {"y": np.concatenate([inputs["x"], inputs["x"][:, :1]], 1)[:, None], "s": inputs["x"][:, :1] * 0}

    assert "all 8 answers" in notes(shifted, metrics=[AccuracyMetric("y")])["y"]
    assert "all 8 answers" in notes(silence, metrics=[TextMetric("y")])["y"]
    assert "all 8 answers" in notes(nothing, metrics=[DetectionMetric("y", scores="s", least_score=0.5)])["y"]
    assert "all 24 answers" in notes(shifted, metrics=[SegmentationMetric("y", threshold=-99.0)])["y"]
