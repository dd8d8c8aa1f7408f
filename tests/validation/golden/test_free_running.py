from dataclasses import replace

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import TensorSpec
from tests.validation.comparison.fakes import Fake
from validation.comparison.tasks import FREE_RUNNING, free_running_checks
from validation.golden.free_running import FreeRunningSession, stack_steps
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet
from validation.limits.budget import budgets
from validation.limits.noise_floor import Noise
from validation.metrics.tally import Along

STATES = (State("h", "hn"),)


class Sum(Fake):
    """A running sum that is off by `gain` in each step."""

    inputs = (TensorSpec("x", "float32", ("batch", 3)), TensorSpec("h", "float32", ("batch", 3)))
    outputs = (TensorSpec("y", "float32", ("batch", 3)), TensorSpec("hn", "float32", ("batch", 3)))

    def __init__(self, gain=1.0):
        super().__init__(lambda inputs: self.step(inputs, gain))

    def step(self, inputs, gain):
        total = ((inputs["h"] + inputs["x"]) * np.float32(gain)).astype(np.float32)
        return {"y": total, "hn": total}


def sequences(steps=200):
    x = np.random.default_rng(0).random((steps, 1, 3)).astype(np.float32)
    cases = tuple(Case(f"sequence {index}", "golden", {"x": x[: steps // (index + 1)]}, {}) for index in range(2))
    return GoldenSequences(STATES, {}, GoldenSet(cases, noise=Noise()))


def test_a_sequence_runs_with_the_models_own_states():
    golden_sequences = sequences()
    session, (case, *_) = FreeRunningSession(Sum(), golden_sequences), golden_sequences.golden.cases
    result = session.run(case.inputs)
    np.testing.assert_array_equal(result["hn"], result["y"][-1:], "of a state what the last step left")
    np.testing.assert_allclose(result["y"], np.cumsum(case.inputs["x"], axis=0), rtol=1e-5)
    np.testing.assert_array_equal(session.run(case.inputs)["y"], result["y"], "each run begins anew")
    assert [spec.shape for spec in session.outputs] == [("step", "batch", 3)] * 2
    session = FreeRunningSession(Fake(lambda inputs: {"hn": inputs["h"] + inputs["x"]}), golden_sequences)
    session.roller = replace(session.roller, inputs=Sum.inputs)
    assert session.run(case.inputs)["hn"].shape == (200, 1, 3), "all steps, where every output is a state"
    with pytest.raises(DataError, match="without steps"):
        session.run({"x": case.inputs["x"][:0]})


def test_an_input_of_no_axes_stays_an_array_in_each_step():
    class Scaled(Sum):
        inputs = (*Sum.inputs, TensorSpec("rate", "int64", ()))

        def step(self, inputs, gain):
            assert isinstance(inputs["rate"], np.ndarray) and inputs["rate"].shape == ()
            return super().step({**inputs, "x": inputs["x"] * inputs["rate"]}, gain)

    x = np.ones((3, 1, 3), np.float32)
    case = Case("sequence 0", "golden", {"x": x, "rate": np.array([1, 2, 3])}, {})
    golden_sequences = GoldenSequences(STATES, {}, GoldenSet((case,), noise=Noise()))
    assert FreeRunningSession(Scaled(), golden_sequences).run(case.inputs)["y"][:, 0, 0].tolist() == [1, 3, 6]


def test_an_error_in_a_state_that_no_output_shows_is_caught():
    class Hidden(Sum):
        def step(self, inputs, gain):
            result = super().step(inputs, gain)
            return {"y": inputs["x"], "hn": result["hn"]}

    golden_sequences = sequences()
    pair = (FreeRunningSession(Hidden(gain), golden_sequences) for gain in (1.0, 1.002))
    checks = free_running_checks("engine", *pair, golden_sequences.golden, budgets("engine", "fp16", None))
    assert {check.output for check in checks if not check.passed} == {"hn"}


def test_the_sequence_check_names_the_worst_and_the_first_other_decision():
    actual = sequences()
    pair = (FreeRunningSession(Sum(gain), actual) for gain in (1.0, 0.99))
    along_metric = Along()
    checks = free_running_checks("engine", *pair, actual.golden, budgets("engine", "fp16", None), along_metric)
    (note,) = {check.note for check in checks if check.name == "sqnr_db" and check.output == "y"}
    (result,) = along_metric.at("engine")
    assert result.output == "y", "what a state was left as has no course"
    assert note.startswith(result.text) and result.worst.case == "sequence 0"
    assert result.free_db[0] > result.free_db[-1] + 6 and len(result.free_db) == 8


@pytest.mark.parametrize(("gain", "passed"), [(1.0, True), (1.002, False)])
def test_an_error_that_single_steps_allow_is_caught_when_carried(gain, passed):
    result = sequences()
    expected, actual = (FreeRunningSession(Sum(value), result) for value in (1.0, gain))
    limits = budgets("engine", "fp16", None)
    checks = free_running_checks("engine", expected, actual, result.golden, limits)
    assert all(check.passed for check in checks) is passed
    assert {check.case for check in checks} == {FREE_RUNNING}
    rows = {"x": np.ones((1, 3), np.float32), "h": np.full((1, 3), 50, np.float32)}
    single_outputs = (Sum(value).run(rows)["y"] for value in (1.0, gain))
    assert np.isclose(*single_outputs, rtol=0.003).all(), "a step alone has 54 dB, where 45 are asked for"


def test_answers_of_several_sizes_are_stacked_without_another_argmax():
    steps = [np.array([[-3.0, -1.0, -2.0][:size]]) for size in (1, 3, 2)]
    actual = stack_steps(steps)
    assert actual.shape == (3, 1, 3)
    assert [*actual.argmax(-1)[:, 0]] == [step.argmax(-1)[0] for step in steps]
    assert stack_steps([np.ones((1, 0)), np.ones((1, 2))]).shape == (2, 1, 2)


def test_sequences_survive_the_file(tmp_path):
    actual = sequences(8)
    golden = GoldenSet((Case("golden 0", "golden", {"x": np.ones(2)}, {"y": np.ones(2)}),), sequences=actual)
    digest = golden.save(tmp_path / "golden.safetensors")
    read_golden = GoldenSet.load(tmp_path / "golden.safetensors")
    assert read_golden.digest == golden.digest == digest
    assert read_golden.sequences is not None
    assert (read_golden.sequences.states, read_golden.sequences.golden.noise) == (STATES, Noise())
    assert read_golden.sequences.lengths == (8, 4)
    for result, expected in zip(read_golden.sequences.golden.cases, actual.golden.cases, strict=True):
        assert result.name == expected.name
        np.testing.assert_array_equal(result.inputs["x"], expected.inputs["x"])
    assert [*read_golden.cases[0].inputs] == ["x"], "sequences are no cases"
    assert GoldenSet(golden.cases).save(tmp_path / "plain.safetensors") != digest


def test_template_inputs_are_not_empty():
    def case(size):
        return Case(f"golden {size}", "golden", {"past": np.ones((1, size))}, {})

    assert GoldenSet((case(0), case(3))).real_inputs["past"].shape == (1, 3)
    assert GoldenSet((case(0),)).real_inputs["past"].shape == (1, 0)
    with pytest.raises(DataError, match="no case of kind 'golden'"):
        _ = GoldenSet(()).real_inputs
