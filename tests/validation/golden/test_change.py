import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.state import State
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, Linear
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet, change, freeze
from validation.limits.noise_floor import Noise, OutputFloor


@pytest.fixture(scope="module")
def before() -> GoldenSet:
    return freeze(GOLDEN, SPECS, DIMS, Linear().run, np.arange(12))


def test_the_same_set_is_unchanged_in_memory_and_in_a_file(before: GoldenSet, tmp_path: Path) -> None:
    before.save(tmp_path / "golden")
    result = change(before, GoldenSet.load(tmp_path / "golden"))
    assert result.same
    assert str(result) == "the same golden set"


def test_expected_outputs_that_moved_are_counted_and_the_largest_is_named(before: GoldenSet) -> None:
    moved_module = Linear(lambda x, y: y + np.float32(0.5 if len(x) == 16 else 0))
    result = change(before, freeze(GOLDEN, SPECS, DIMS, moved_module.run, np.arange(12)))
    assert (result.inputs, result.expected, result.labels) == ((), ("batch=16",), False)
    assert result.largest["y"][0] == pytest.approx(0.5, rel=1e-5)
    assert str(result) == "1 of 7 cases has other expected outputs; y: by up to 0.5, in case batch=16"


def test_changes_of_data_cases_labels_and_floor_are_reported(before: GoldenSet) -> None:
    other_fields = [{"x": GOLDEN[0]["x"] + 1}, *GOLDEN[1:], GOLDEN[0]]
    after = replace(
        freeze(other_fields, SPECS, (DIMS[0],), Linear().run, np.zeros(16)),
        noise=Noise({"y": {"golden": OutputFloor(130.0, 1e-7)}}),
    )
    result = change(before, after)
    assert (result.added, result.removed) == (("golden 3",), ())
    assert "golden 0" in result.inputs
    assert "other labels" in str(result)
    assert "another noise floor" in str(result)
    assert change(after, before).removed == ("golden 3",)
    for item, other_fields in ((before, replace(before, labels=None)), (replace(before, labels=None), before)):
        assert change(item, other_fields).labels
    assert not change(replace(before, labels=None), replace(after, labels=None)).labels
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["summary"] == str(result)


def test_an_output_of_another_shape_has_no_finite_difference(before: GoldenSet) -> None:
    flat_golden = freeze(GOLDEN, SPECS, DIMS, lambda inputs: {"y": Linear().run(inputs)["y"][:, :1]}, np.arange(12))
    result = change(before, flat_golden)
    assert result.largest["y"][0] == np.inf
    assert "y: another shape or kind of numbers, or values that are not finite, in case " in str(result)
    assert result.to_json()["largest"]["y"]["difference"] is None


def test_other_sequences_are_reported(before: GoldenSet) -> None:
    def held(steps: int) -> GoldenSet:
        case = Case("sequence 0", "golden", {"x": np.ones((steps, 1))}, {"y": np.ones((steps, 1))})
        return replace(before, sequences=GoldenSequences((State("h", "hn"),), {}, GoldenSet((case,))))

    assert "other sequences" in str(change(held(2), held(3)))
    assert change(before, held(2)).sequences
    assert not change(held(2), held(2)).sequences
