from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginesmith.core.types import Session
from enginesmith.registry.store.base import Store
from pipeline.compile.steps.blobs import answers_here, open_reference, this_machine
from pipeline.values import Exported, KeptAnswers, OnnxModel, Proof
from tests.pipeline.quantization.small_nets import build
from validation.comparison.sessions import drift_checks
from validation.golden.free_running import RecordedSession
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import default_budget


@pytest.fixture
def golden(tmp_path: Path) -> GoldenSet:
    cases = [Case(f"golden {i}", "golden", {"x": np.full((1, 3), i, np.float32)}, {}) for i in range(3)]
    GoldenSet(tuple(cases)).save(tmp_path / "golden")
    return GoldenSet.load(tmp_path / "golden")


def net(folder: Path, times: float) -> Path:
    """A graph that multiplies by a number."""
    engine = build("float[n,3] x", "float[n,3] y", "y = Mul(x, k)", {"k": np.float32(times)})
    onnx.save(engine, folder / "graph.onnx")
    return folder / "graph.onnx"


def first(session: Session, frozen: GoldenSet) -> list[float]:
    """The first number of the answer to each case."""
    return [session.run(case.inputs)["y"][0, 0].item() for case in frozen.cases]


@pytest.fixture
def answers(store: Store, golden: GoldenSet, tmp_path: Path) -> str:
    """The answers of the graph that multiplies by two."""
    with open_reference(store, net(tmp_path, 2), golden, None) as session:
        assert first(session, golden) == [0, 2, 4] and isinstance(session, RecordedSession)
        path = session.save(tmp_path / "kept")
    assert path is not None
    return store.put_file(path)


def test_recorded_answers_replace_a_run(store, golden, answers, tmp_path):
    with open_reference(store, net(tmp_path, 7), golden, answers) as session:
        assert first(session, golden) == [0, 2, 4]
        assert first(session, golden) == [0, 7, 14]  # who asks twice hears the graph itself


@pytest.mark.parametrize("damage", [lambda _: b"", lambda data: data[:-1], lambda data: data[:-4] + bytes(4), None])
def test_damaged_answers_are_discarded_and_the_graph_is_run(store, golden, answers, tmp_path, damage):
    blob = store.path(answers)
    blob.chmod(0o600)
    if damage:
        blob.write_bytes(damage(blob.read_bytes()))
    else:
        blob.unlink()
    with open_reference(store, net(tmp_path, 7), golden, answers) as session:
        assert first(session, golden) == [0, 7, 14]
    assert not store.has(answers)


def test_a_blob_without_answers_is_refused(store: Store, golden: GoldenSet, tmp_path: Path) -> None:
    with open_reference(store, net(tmp_path, 7), golden, store.put_bytes(b"no answers")) as session:
        assert first(session, golden) == [0, 7, 14]


def test_answers_that_contradict_the_graph_fail_the_checks(store, golden, answers, tmp_path):
    """The reference runs twice on the first case: the second time it answers itself."""
    one_golden = replace(golden, cases=golden.cases[1:2])
    for times, repeats in ((2, []), (7, ["repeats"])):
        with open_reference(store, net(tmp_path, times), one_golden, answers) as session:
            actual = drift_checks("engine", session, session, one_golden, default_budget("engine", "fp32"))
        assert [check.name for check in actual if check.name == "repeats"] == repeats


@pytest.mark.parametrize(("machine", "expected"), [(this_machine(), "a" * 64), ("x86-64-v9, 2 cores", None)])
def test_answers_of_another_kind_of_machine_are_refused(machine: str, expected: str | None) -> None:
    model = OnnxModel("0" * 64, (), (), 20, carries_qdq=False)
    export_value = Exported(model, "1" * 64, Proof(), answers=KeptAnswers("a" * 64, machine))
    assert answers_here(export_value) == expected and answers_here(replace(export_value, answers=None)) is None
