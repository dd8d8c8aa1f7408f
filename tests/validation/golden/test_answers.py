from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.state import State
from enginesmith.core.types import Session, TensorSpec
from validation.golden import free_running
from validation.golden.free_running import RecordedSession
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet


class Doubling(Session):
    """y is twice x, plus `more`. ran: how often it was run."""

    inputs = (TensorSpec("x", "float32", ("n",)),)
    outputs = (TensorSpec("y", "float32", ("n",)),)

    def __init__(self, more: float = 0.0) -> None:
        self.more, self.ran = np.float32(more), 0

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.ran += 1
        return {"y": 2 * inputs["x"] + self.more}


def given(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.float32(values)}


def recorded(folder: Path) -> GoldenSet:
    session = RecordedSession(Doubling(), 2)
    for inputs in (given(1), given(1), given(3, 4), given(9)):  # the last as other sizes come after the golden set
        session.run(inputs)
    path = session.save(folder / "answers")
    assert path is not None
    document = GoldenSet.load(path)
    assert len(document.cases) == 2
    return document


def test_the_first_answer_is_recorded_and_the_second_the_sessions(tmp_path: Path) -> None:
    other_runner = Doubling(more=1)
    session = RecordedSession(other_runner, 2, recorded(tmp_path))
    assert session.run(given(3, 4))["y"].tolist() == [6, 8] and other_runner.ran == 0
    assert session.run(given(3, 4))["y"].tolist() == [7, 9] and other_runner.ran == 1
    assert session.run(given(9))["y"].tolist() == [19]


def test_equal_numbers_of_another_shape_or_type_are_other_inputs(tmp_path: Path) -> None:
    other_runner = Doubling(more=1)
    session = RecordedSession(other_runner, 2, recorded(tmp_path))
    for inputs in ({"x": np.float32([[3, 4]])}, {"x": np.float64([3, 4])}):
        session.run(inputs)
    assert other_runner.ran == 2


def test_a_record_with_other_outputs_is_not_used(tmp_path: Path) -> None:
    session = RecordedSession(Doubling(more=1), 2, recorded(tmp_path))
    session.outputs = (TensorSpec("z", "float32", ("n",)),)
    assert session.run(given(1))["y"].tolist() == [3]


def test_inputs_are_not_digested_once_the_record_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    session = RecordedSession(Doubling(), 1)
    session.run(given(1))
    monkeypatch.delattr(free_running, "_digest_inputs")
    assert session.run(given(3))["y"].tolist() == [6] and len(session._fresh) == 1


def test_large_answers_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_running, "MOST_BYTES", 11)
    session = RecordedSession(Doubling(), 3)
    for count in (1, 2, 3):
        session.run(given(*range(count)))
    assert session.save(tmp_path / "answers") is None and not (tmp_path / "answers").exists()
    assert len(session._fresh) == 2
    monkeypatch.setattr(free_running, "MOST_BYTES", 24)
    session = RecordedSession(Doubling(), 3)
    for count in (1, 2, 3):
        session.run(given(*range(count)))
    assert session.save(tmp_path / "answers") == tmp_path / "answers"


def test_answers_to_whole_sequences_are_recorded_beside_those_to_steps(tmp_path: Path) -> None:
    class Sum(Doubling):
        inputs = (TensorSpec("x", "float32", ("n",)), TensorSpec("h", "float32", ("n",)))
        outputs = (TensorSpec("y", "float32", ("n",)), TensorSpec("hn", "float32", ("n",)))

        def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            y = super().run(inputs)["y"] + inputs["h"]
            return {"y": y, "hn": y}

    case = Case("sequence 0", "golden", {"x": np.float32([[1], [2], [3]])}, {})
    sequences = GoldenSequences((State("h", "hn"),), {"n": (1, 1)}, GoldenSet((case,)))
    session = RecordedSession(Sum(), 1)
    session.run({"x": np.float32([1]), "h": np.float32([0])})
    rolled_outputs = session.free_running(sequences)
    assert rolled_outputs.run(case.inputs)["y"].ravel().tolist() == [2, 6, 12]
    session.save(tmp_path / "answers", rolled_outputs)
    other_total = Sum(more=1)
    again = RecordedSession(other_total, 1, GoldenSet.load(tmp_path / "answers"))
    assert again.free_running(sequences).run(case.inputs)["y"].ravel().tolist() == [2, 6, 12] and other_total.ran == 0
    assert again.run({"x": np.float32([1]), "h": np.float32([0])})["y"].tolist() == [2] and other_total.ran == 0
