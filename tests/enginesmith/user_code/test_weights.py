import pickle
import warnings
from pathlib import Path

import pytest

from enginesmith.core.errors import ModelError
from enginesmith.user_code.entry_point import read_weights
from enginesmith.user_code.torch_source import load_weights

torch = pytest.importorskip("torch")


def build(width: int = 2) -> "torch.nn.Module":
    torch.manual_seed(0)
    return torch.nn.Linear(3, width)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "pytorch_model.bin", "W.PT"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_is_loaded(tmp_path: Path, name: str, zipped: bool) -> None:
    torch.save(build().state_dict(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    module = torch.nn.Linear(3, 2)
    load_weights(module, tmp_path / name)
    assert torch.equal(module.weight, build().weight) and torch.equal(module.bias, build().bias)


def test_a_state_dict_of_another_module_is_refused_as_safetensors_are(tmp_path: Path) -> None:
    torch.save(build(4).state_dict() | {"more": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"weight is \[4, 3\] and must be \[2, 3\]; .*more is not in the module"):
        load_weights(build(), tmp_path / "w.pt")


class Ran(Exception):
    """The code of a pickle ran."""


class Mine:
    def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
        return Ran, ("ran",)


CASES = {
    "a whole module": (lambda: build(), r"a plain state dict: it holds objects of torch\.nn\.modules\.linear\.Linear"),
    "code": (lambda: {"w": Mine()}, r"holds objects of tests\.enginesmith\.user_code\.test_weights\.Ran, whose code"),
    "a list": (lambda: [torch.zeros(2)], "holds a list and not a state dict"),
    "a tensor": (lambda: torch.zeros(2), "holds a Tensor and not a state dict"),
    "numbers": (lambda: {"w": torch.zeros(2), "n": 3}, "'n' is of type int, not a tensor"),
    "no names": (lambda: {3: torch.zeros(2)}, "its key 3 is not a string"),
    "a sparse tensor": (lambda: {"w": torch.eye(3).to_sparse()}, "w is a sparse tensor"),
    "a checkpoint": (
        lambda: {"epoch": 3, "model_state": build().state_dict()},
        r"is a checkpoint .* 'epoch', 'model_state'; .*\['model_state'\]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_files_than_state_dicts_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    make, words = CASES[name]
    torch.save(make(), tmp_path / "w.pt")
    with pytest.raises(ModelError, match=words):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut", pickle.dumps({"a": 1})[:-2], b"no pickle at all"])
def test_files_that_are_damaged_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(data)
    with pytest.raises(ModelError, match="cannot be read as a state dict"):
        read_weights(tmp_path / "w.bin")


def test_torchscript_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.script(build()).save(tmp_path / "w.pt")
    with pytest.raises(ModelError, match="is a TorchScript program"):
        read_weights(tmp_path / "w.pt")
