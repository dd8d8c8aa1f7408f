import numpy as np
import pytest
from onnx import TensorProto, helper, save

from builders.backends.onnxruntime import OrtSession
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import judge
from tests.validation.comparison.fakes import SPECS, Fake, original
from validation.comparison.sessions import drift_checks, expected_checks, run
from validation.comparison.tasks import task_checks
from validation.golden.golden_set import GoldenSet, freeze
from validation.limits.terms import Budget
from validation.metrics.tasks.terms import TopKMetric

LIMITS = Budget(sqnr_db=80)


def golden(function=original, count=6) -> GoldenSet:
    x = np.random.default_rng(3).standard_normal((count, 3)).astype(np.float32)
    return freeze([{"x": x[:4]}, {"x": x[4:]}], SPECS, [], function, np.zeros(count))


def broken(checks):
    return [(check.name, check.note) for check in checks if not check.passed]


def raises(inputs):
    raise ValueError("a bad stride")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raises, "the session raised ValueError: a bad stride"),
        (lambda i: None, "answered a NoneType"),
        (lambda i: [i["x"]], "answered a list"),
        (lambda i: {"y": [1.0, 2.0]}, "answered a dict of list"),
        (lambda i: {"y": None}, "answered a dict of NoneType"),
        (lambda i: i["x"].no_such, "AttributeError"),
        (lambda i: {"y": i["x"].astype(object)}, "answered an array of Python objects for y"),
        (lambda i: {"y": np.ma.masked_array(i["x"], mask=True)}, "answered a masked array for y"),
    ],
    ids=["raises", "none", "list", "lists", "nones", "attribute", "objects", "masked"],
)
def test_every_error_of_a_session_is_a_failed_check(answer, message):
    for checks in (
        drift_checks("engine", Fake(original), Fake(answer), golden(), LIMITS),
        expected_checks("engine", Fake(answer), golden(), LIMITS),
        task_checks(Fake(answer), golden(), [TopKMetric("y")]),
    ):
        assert checks and not any(check.passed for check in checks)
        assert message in checks[0].note
    with pytest.raises(EnginesmithError, match=message.split(":")[0]):
        run(Fake(answer), {"x": np.ones((1, 3), np.float32)})


def test_a_silent_reference_raises():
    with pytest.raises(EnginesmithError, match="answered a NoneType"):
        drift_checks("engine", Fake(lambda i: None), Fake(original), golden(), LIMITS)


@pytest.mark.parametrize(
    ("dtype", "declared", "passes"),
    [
        ("float32", "float32", True),
        ("complex64", "float32", False),
        ("complex64", "complex64", False),
        ("float16", "float32", False),
        ("float16", "float16", True),
        ("float64", "float32", False),
        ("int64", "int64", False),
    ],
)
def test_an_answer_has_the_expected_or_another_declared_float_type(dtype, declared, passes):
    def ones(inputs):
        return {"y": np.ones((len(inputs["x"]), 3), np.float32)}

    answer = Fake(lambda i: {"y": ones(i)["y"].astype(dtype)}, declared)
    checks = expected_checks("engine", answer, golden(ones), LIMITS)
    assert (not broken(checks)) is passes
    if not passes:
        assert broken(checks)[0] == ("outputs", f"expected float32, got {dtype}")


def test_integers_keep_their_width():
    def classes(dtype):
        return lambda i: {"y": np.argmax(i["x"], axis=1).astype(dtype)}

    checks = expected_checks("engine", Fake(classes(np.int32)), golden(classes(np.int64)), LIMITS)
    assert broken(checks)[0] == ("outputs", "expected int64, got int32")


def test_an_output_that_the_model_lacks_fails():
    checks = expected_checks("engine", Fake(lambda i: {**original(i), "debug": i["x"]}), golden(), LIMITS)
    assert broken(checks) == [("outputs", "the model has no such output")] * 2


def test_empty_outputs_alone_prove_nothing():
    def none_found(inputs):
        return {"boxes": np.zeros((0, 6), np.float32)}

    def some(inputs):
        return {**none_found(inputs), **original(inputs)}

    checks = expected_checks("engine", Fake(none_found), golden(none_found), LIMITS)
    assert broken(checks) == [
        ("measured", "nothing was measured: every output is empty; give golden data with answers")
    ]
    assert judge(checks)[0] == "failed"
    checks = expected_checks("engine", Fake(some), golden(some), LIMITS)
    assert not broken(checks)
    assert {check.note for check in checks if check.output == "boxes"} == {"nothing was measured: it is empty"}
    missing = Fake(lambda i: {"boxes": np.zeros((0, 6), np.float32), "y": original(i)["y"][:0]})
    assert "expected shape (4, 3), got (0, 3)" in broken(expected_checks("engine", missing, golden(some), LIMITS))[0][1]


def test_infinities_alone_prove_nothing():
    def biased(inputs):
        return {"y": inputs["x"] + np.float32(np.inf), "z": inputs["x"]}

    checks = expected_checks("engine", Fake(biased), golden(biased), LIMITS)
    assert broken(checks) == [("measured", "nothing was measured: every expected value is infinite")]

    def masked(inputs):
        return {"y": np.where(np.arange(3) == 1, -np.inf, inputs["x"]).astype(np.float32)}

    checks = expected_checks("engine", Fake(masked), golden(masked), LIMITS)
    assert not broken(checks) and checks[0].note == "6 equal infinities are left out"


def random_model(path):
    """y = x and noise without a seed."""
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["noise"]), helper.make_node("Add", ["x", "noise"], ["y"])]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", value[:1], value[1:]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    save(model, path)


def test_a_random_model_is_not_proven(tmp_path):
    random_model(tmp_path / "m.onnx")
    with OrtSession(tmp_path / "m.onnx", optimized=False) as source:
        frozen_golden = golden(source.run)
    with OrtSession(tmp_path / "m.onnx") as session, OrtSession(tmp_path / "m.onnx") as other_session:
        for checks in (
            drift_checks("engine", session, other_session, frozen_golden, LIMITS),
            expected_checks("export", other_session, frozen_golden, LIMITS),
        ):
            repeats = next(check for check in checks if check.name == "repeats")
            assert not repeats.passed and repeats.value < 20 and "gives other outputs when" in repeats.note
        lifted_checks = drift_checks("engine", session, other_session, frozen_golden, Budget())
        assert not broken(lifted_checks)


def test_a_reference_whose_repeated_answers_differ_within_the_limits_passes():
    counter = iter(range(100))
    loose_runner = Fake(lambda i: {"y": i["x"] * np.float32(2 + 1e-7 * next(counter))})
    assert not broken(drift_checks("engine", loose_runner, Fake(original), golden(), LIMITS))
    shaking_runner = Fake(lambda i: {"y": i["x"] * np.float32(2 + 1e-2 * next(counter))})
    assert "repeats" in dict(broken(drift_checks("engine", shaking_runner, Fake(original), golden(), LIMITS)))
