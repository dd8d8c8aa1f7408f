"""Inputs are checked in full once for each combination of dtypes and shapes; every wrong one is refused as before."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from builders.backends.onnxruntime import OrtSession
from enginesmith import arrays
from enginesmith.arrays import Fit, InputCheck, check_inputs
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.pipeline.quantization.small_nets import build

SPECS = (TensorSpec("a", "float32", ("batch", 3)), TensorSpec("b", "int64", ("batch",)))


def given(batch: int = 2, **other: object) -> dict:
    return {"a": np.zeros((batch, 3), np.float32), "b": np.zeros(batch, np.int64), **other}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each check that is made in full."""
    checks: list[int] = []
    real_inputs = check_inputs
    monkeypatch.setattr(arrays, "check_inputs", lambda *arguments: checks.append(1) or real_inputs(*arguments))
    return checks


def test_equal_dtypes_and_shapes_are_checked_in_full_once(full: list[int]) -> None:
    check = InputCheck(SPECS)
    for _ in range(5):
        for batch in (2, 4):
            assert check(given(batch)) == Fit({"batch": batch}, 0)
    assert len(full) == 2
    assert check({"b": np.zeros(2, np.int64), "a": np.ones((2, 3), np.float32)}).sizes == {"batch": 2}
    assert len(full) == 2, "neither values nor the order of the names matter"
    contiguous = np.zeros((2, 6), np.float32)[:, ::2]
    assert check(given(a=contiguous)) and len(full) == 2


WRONG = {
    "missing": {"a": np.zeros((2, 3), np.float32)},
    "unknown": given(c=np.zeros(2, np.float32)),
    "unknown, of two types": given() | {1: None, "c": None},
    "dtype": given(a=np.zeros((2, 3))),
    "order of bytes": given(a=np.zeros((2, 3), ">f4")),
    "rank": given(a=np.zeros((2, 3, 1), np.float32)),
    "size": given(a=np.zeros((2, 4), np.float32)),
    "two sizes of a dim": given(b=np.zeros(3, np.int64)),
    "a list": given(a=[[0.0] * 3] * 2),
    "nothing": given(a=None),
    "a number": given(b=np.int64(2)),
    "no mapping": None,
    "arrays without names": [np.zeros((2, 3), np.float32), np.zeros(2, np.int64)],
    "an array": np.zeros((2, 3), np.float32),
    "an integer": 3,
    "a text": "a",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_accepted_inputs_do_not_admit_invalid_ones(wrong: str) -> None:
    check = InputCheck(SPECS)
    check(given())
    with pytest.raises(DataError) as failure:
        check_inputs(SPECS, WRONG[wrong])
    for _ in range(2):
        with pytest.raises(DataError) as error:
            check(WRONG[wrong])
        assert str(error.value) == str(failure.value)


def test_the_profile_is_looked_up_once_and_other_shapes_are_refused_each_time(full: list[int]) -> None:
    ranges = [((1, 3), (2, 3), (4, 3)), ((5, 3), (6, 3), (8, 3))]
    check = InputCheck(SPECS, [ShapeProfile((("a", *end_range),)) for end_range in ranges])
    assert [check(given(batch)).profile for batch in (4, 5, 4)] == [0, 1, 0] and len(full) == 2
    for _ in range(2):
        with pytest.raises(DataError, match="no optimization profile"):
            check(given(9))
    assert len(full) == 4


def test_a_call_is_prepared_without_a_run(tmp_path: Path) -> None:
    onnx.save(build("float[batch,3] x", "float[batch,3] y", "y = Relu(x)", {}), tmp_path / "relu.onnx")
    with OrtSession(tmp_path / "relu.onnx") as session:
        session._session = SimpleNamespace(run=lambda *_: pytest.fail("it ran"))
        session.prepare_call({"x": np.zeros((1, 3), np.float32)})
        session._session = None
        with pytest.raises(EnginesmithError, match="the session is closed"):
            session.prepare_call({"x": np.zeros((1, 3), np.float32)})


def test_the_table_of_accepted_shapes_is_bounded(full: list[int]) -> None:
    check = InputCheck(SPECS)
    for batch in range(arrays.MOST_ACCEPTED + 2):
        check(given(batch))
    assert len(check._accepted) == 2
    check(given(0))
    assert len(full) == arrays.MOST_ACCEPTED + 3


def test_a_session_checks_once_and_gives_its_runtimes_own_call(full: list[int], tmp_path: Path) -> None:
    onnx.save(build("float[batch,3] x", "float[batch,3] y", "y = Relu(x)", {}), tmp_path / "relu.onnx")
    with OrtSession(tmp_path / "relu.onnx") as session:
        values = {"x": np.float32([[-1, 0, 2]])}
        for _ in range(3):
            assert session.run(values)["y"].tolist() == [[0, 0, 2]]
        (result,) = session.prepare_call(values)()  # type: ignore[misc]
        assert result.tolist() == [[0, 0, 2]] and len(full) == 1
        with pytest.raises(DataError, match="the model needs float32"):
            session.prepare_call({"x": np.zeros((1, 3))})
        for wrong, kind in ((None, "NoneType"), ([values["x"]], "list"), (3, "int")):
            with pytest.raises(DataError, match=f"the inputs are a {kind}; give a dict of numpy arrays .* needs 'x'"):
                session.run(wrong)  # type: ignore[arg-type]
