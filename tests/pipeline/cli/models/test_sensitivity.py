"""`enginesmith debug sensitivity`: what is searched, and what cannot be."""

import numpy as np
import pytest

from tests.pipeline.projects import Project

SEARCH = {"smoothing": "auto", "floor": {"sqnr_db": 20}}


@pytest.fixture
def small(project: Project) -> Project:
    project.change_spec(targets=["cpu"], precisions=["int8"], quantization=SEARCH)
    return project


def test_a_floor_of_accuracy_reads_the_labels_that_lie_with_the_samples(small: Project) -> None:
    with np.load(small.folder / "calibration.npz") as stored:
        arrays = dict(stored)
    calibration = {"data": "calibration.npz", "labels": "y"}
    small.change_spec(calibration=calibration, quantization={"floor": {"accuracy": 0.001}})
    np.savez(small.folder / "calibration.npz", **arrays, y=np.full(len(arrays["x"]), 99))
    beyond = small.run("debug", "sensitivity", small.spec)
    assert beyond.code == 2 and "out of reach: the float model itself has 0.0000" in beyond.err
    np.savez(small.folder / "calibration.npz", **arrays, y=np.arange(len(arrays["x"])) % 2)
    shown = small.run("debug", "sensitivity", small.spec, "--activation", "uint8", "--json")
    assert shown.code == 0, shown.err
    assert 0 <= shown.json["chosen"]["accuracy"] <= 1 and "accuracy" in shown.json["summary"]
    small.change_spec(calibration=calibration | {"labels": "z"})
    wrong = small.run("debug", "sensitivity", small.spec)
    assert wrong.code == 2 and "no array 'z'" in wrong.err
    np.savez(small.folder / "calibration.npz", **arrays, y=np.zeros(len(arrays["x"]), np.float32))
    small.change_spec(calibration=calibration)
    wrong = small.run("debug", "sensitivity", small.spec)
    assert wrong.code == 2 and "'y' of calibration.npz is float32; class indices are integers" in wrong.err


def test_what_cannot_be_searched_or_written_is_said_before_the_work(small: Project) -> None:
    (small.folder / "taken").touch()
    assert "is a file" in small.run("debug", "sensitivity", small.spec, "--out", small.folder / "taken").err
    small.change_spec(calibration=None)
    without = small.run("debug", "sensitivity", small.spec)
    assert without.code == 2 and "add calibration.data" in without.err
