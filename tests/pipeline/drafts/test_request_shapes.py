"""Saved requests decide what an entry point takes, where its first layer says something else or nothing."""

import json
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.types import TensorSpec
from pipeline.drafts import probing
from pipeline.drafts.facts import FoundDim
from pipeline.drafts.requests import list_readings, observe_requests
from pipeline.drafts.torch_model import look_at_module
from tests.enginesmith.user_code.here import serve_here

torch = pytest.importorskip("torch")

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.rest = first, nn.GRU(4, 4, batch_first=True)
    def forward(self, x): return self.rest(self.first(x))[0]
class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
    def forward(self, a, b, scale=None): return self.first(a) + b * (1 if scale is None else scale)
def sequence(): return Net(nn.Linear(3, 4))
def convolved(): return nn.Conv1d(3, 4, 3, padding=1)
def two(): return Sum()
"""


@pytest.fixture(autouse=True)
def _user_code_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.drafts.torch_model.start_user_process", serve_here)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def only_one(probe: object, name: str, sizes: dict[str, int]) -> FoundDim:
    """What is found of a dim when the time is over."""
    return FoundDim(sizes[name], sizes[name], sizes[name], "the time was over")


def look(folder: Path, function: str, **arrays: np.ndarray):
    (folder / "nets.py").write_text(CODE)
    np.savez(folder / "requests.npz", **arrays)
    return look_at_module(folder, f"nets.py:{function}", folder / "requests.npz")


@pytest.mark.parametrize("shape", [(9, 6, 3), (9, 1, 6, 3)])
def test_a_linear_layer_says_no_number_of_axes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    found = look(tmp_path, "sequence", x=floats(*shape))
    assert found.inputs == (TensorSpec("x", "float32", ("batch", 6, 3)),)
    assert found.dims["batch"].max > 1
    assert "input x: float32 [batch, 6, 3], as in the requests" in found.notes


def test_inputs_that_nothing_says_and_optional_ones_are_those_of_the_requests(tmp_path: Path) -> None:
    found = look(tmp_path, "two", a=floats(5, 3), b=floats(5, 3), scale=floats(5, 3))
    assert not found.unknown
    assert [spec.name for spec in found.inputs] == ["a", "b", "scale"]
    assert look(tmp_path, "two", a=floats(5, 3)).unknown, "b has no default"


@pytest.mark.parametrize(
    ("function", "arrays", "said"),
    [
        ("two", {"a": (5, 3)}, "has no array 'b': it holds a; the model wants a, b"),
        ("two", {"a": (5, 3), "b": (5, 3), "label": (5, 1)}, "has an array 'label' that nothing asks for"),
        ("two", {"a": (5, 3), "b": (4, 3)}, "array 'b' has 4 samples, but 'a' has 5"),
        ("sequence", {"x": (5, 6, 2)}, "the model does not run with the first request: "),
    ],
)
def test_requests_that_do_not_fit_are_told_why(tmp_path, function, arrays, said):
    found = look(tmp_path, function, **{name: floats(*shape) for name, shape in arrays.items()})
    assert said in found.refused
    assert not look(tmp_path, "sequence", x=floats(9, 6, 3)).refused


def test_no_size_is_fixed_at_another_than_the_requests_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing._Probe, "bounds", only_one)
    assert look(tmp_path, "convolved", input=floats(9, 3, 100)).inputs[0].shape == (1, 3, 100)


def test_sizes_that_vary_are_a_dim_with_their_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(CODE)
    lines = [json.dumps({"inputs": {"x": floats(1, length, 3).tolist()}}) for length in (6, 9, 6)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(probing._Probe, "bounds", only_one)
    found = look_at_module(tmp_path, "nets.py:sequence", tmp_path / "requests.jsonl")
    assert found.inputs == (TensorSpec("x", "float32", (1, "length", 3)),)
    assert (found.dims["length"].min, found.dims["length"].opt, found.dims["length"].max) == (6, 6, 9)


def test_the_kinds_of_files_say_what_they_hold(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 2), np.int64))
    assert observe_requests(tmp_path / "x.npy")[""].dtype == "int64"
    (tmp_path / "x.json").write_text(json.dumps([{"x": [[1, 2]]}, {"x": [[1, 2, 3]]}]))
    found = observe_requests(tmp_path / "x.json")["x"]
    assert (found.dtype, found.kind, found.sizes, found.stacked) == ("", "i", ((1, 1), (2, 3)), False)
    assert observe_requests(tmp_path) == observe_requests(tmp_path / "x.json"), "a folder of them"
    (tmp_path / "x.json").write_text("no JSON")
    assert observe_requests(tmp_path / "x.json") == {}, "who reads them all says what is wrong"


def test_a_layer_that_says_the_number_of_axes_tells_samples_from_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=floats(9, 2, 6, 3))
    held, guess = observe_requests(tmp_path / "x.npz"), [TensorSpec("x", "float32", ("batch", "length", 3))]
    first, second = (reading.inputs[0].shape for reading in list_readings(guess, held, any_rank=False))
    assert (first, second) == (("batch", "length", 3), ("batch", 2, 6, 3))
    assert next(list_readings(guess, held, any_rank=True)).inputs[0].shape == ("batch", 2, 6, 3)
    assert [*list_readings([TensorSpec("y", "", ())], held, any_rank=False)] == []
