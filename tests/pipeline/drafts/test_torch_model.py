"""A spec by looking at a PyTorch program or module, which runs in a process of its own."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.errors import InputError, ModelError, SpecError
from enginesmith.core.types import TensorSpec
from pipeline.drafts.text import write_spec
from pipeline.drafts.torch_model import look_at_module, look_at_pt2
from pipeline.spec.model import load_spec
from tests.pipeline.sources.exports import user_code_here

__all__ = ["user_code_here"]  # a fixture


torch = pytest.importorskip("torch")

CODE = """
import os, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, first, *more):
        super().__init__()
        self.first, self.more = first, nn.Sequential(*more)
    def forward(self, *, x):
        return {"y": self.more(self.first(x))}
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(5, 4, batch_first=True)
    def forward(self, frames, state=None):
        return self.rnn(frames)[0]
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
    def forward(self, input_ids, attention_mask):
        return (self.table(input_ids) * attention_mask[..., None]).sum(1)
class Sum(nn.Module):
    def forward(self, a, b):
        return a + b

def linear(): return Net(nn.Linear(3, 2), nn.ReLU())
def halving(): return Net(nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2))
def recurrent(): return Recurrent()
def tokens(): return Tokens()
def plain(): return Sum()
"""
EVEN = """
class Even(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)
    def forward(self, x): return self.up(self.conv(x)) + x
def even(): return Even()
"""


def look(folder: Path, function: str, more: str = ""):
    (folder / "nets.py").write_text(CODE + more)
    return look_at_module(folder, f"nets.py:{function}")


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        ("linear", [TensorSpec("x", "float32", ("batch", 3))]),
        ("halving", [TensorSpec("x", "float32", ("batch", 3, "height", "width"))]),
        ("recurrent", [TensorSpec("frames", "float32", ("batch", "length", 5))]),
        ("tokens", [TensorSpec(name, "int64", ("batch", "length")) for name in ("input_ids", "attention_mask")]),
    ],
)
def test_the_first_layer_determines_the_input(tmp_path: Path, function: str, inputs: list[TensorSpec]) -> None:
    facts = look(tmp_path, function)
    assert list(facts.inputs) == inputs and facts.outputs == (
        ("y",) if function in ("linear", "halving") else ("output",)
    )
    assert all("the graph ran at" in dim.why for dim in facts.dims.values())
    (tmp_path / "spec.yaml").write_text(write_spec(facts))
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.model == function and spec.precisions == ("fp32", "fp16")


def test_sizes_in_steps_are_multiples(tmp_path: Path) -> None:
    facts = look(tmp_path, "even", EVEN)
    assert facts.inputs[0].shape == ("batch", 3, "height", "width")
    assert (facts.dims["height"].multiple, facts.dims["width"].multiple) == (2, 2)


def test_unknown_sizes_are_marked_and_prevent_a_build(tmp_path: Path) -> None:
    facts = look(tmp_path, "plain")
    assert set(facts.unknown) == {"a", "b"}
    path = tmp_path / "spec.yaml"
    path.write_text(write_spec(facts))
    assert path.read_text().count("# FILL_IN: dtype") == 2
    with pytest.raises(SpecError, match="FILL_IN stands where the model does not say it") as error_info:
        load_spec(path)
    assert str(error_info.value).count("write dtype and shape") == 2 and "dims.FILL_IN" not in str(error_info.value)


EXAMPLES = {
    "a dict": "def example_inputs(): return {'b': torch.zeros(2, 3), 'a': torch.zeros(2, 3)}",
    "a tuple": "def example_inputs(): return torch.zeros(2, 3), torch.zeros(2, 3)",
    "samples": "def samples():\n    import numpy\n    yield {n: numpy.zeros((2, 3), 'f4') for n in 'ab'}",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_beside_the_entry_point_determines_the_inputs(tmp_path: Path, name: str) -> None:
    facts = look(tmp_path, "plain", EXAMPLES[name])
    assert not facts.unknown and sorted(spec.name for spec in facts.inputs) == ["a", "b"]
    assert all(spec == TensorSpec(spec.name, "float32", ("batch", 3)) for spec in facts.inputs)
    assert (facts.dims["batch"].min, facts.dims["batch"].max) == (1, 8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("def example_inputs(): return {'c': torch.zeros(1)}", r"example_inputs\(\) gives no inputs: .*names c"),
        ("def example_inputs(): return 'text', 2", "gives no inputs"),
        ("def samples():\n    return iter(())", "gives no inputs: StopIteration"),
        ("def example_inputs(): 1 / 0", r"nets\.py:\d+: example_inputs\(\) failed: ZeroDivisionError"),
    ],
)
def test_an_invalid_example_is_reported(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        look(tmp_path, "plain", more)


ODD = """
from dataclasses import dataclass
from typing import Optional
@dataclass
class Output:
    logits: torch.Tensor
    loss: Optional[torch.Tensor] = None
class Answering(Tokens):
    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        return Output(self.table(input_ids).sum(1))
def answering(): return Answering()
def sized(width): return nn.Linear(width, 2)
ready = nn.Linear(3, 2)
"""


def test_a_dataclass_is_returned_as_its_fields_and_inputs_with_defaults_are_named(tmp_path: Path) -> None:
    facts = look(tmp_path, "answering", ODD)
    assert [spec.name for spec in facts.inputs] == ["input_ids"] and facts.outputs == ("logits",)
    assert any(note.endswith("has defaults for are left out: attention_mask, labels") for note in facts.notes)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("sized", r"sized\(width\) cannot be called: missing .* 'width'; correct source\.arguments"),
        ("ready", "ready is a model, not a function; write a function that returns it"),
    ],
)
def test_an_uncallable_entry_point_is_an_error_with_a_remedy(tmp_path: Path, function: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        look(tmp_path, function, ODD)


def test_a_file_of_a_package_with_relative_imports_is_named_by_its_module(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "nets.py").write_text("from .layers import build")
    (tmp_path / "pkg" / "layers.py").write_text("def build(): ...")
    with pytest.raises(ModelError, match=r"relative import.*; name it as a module of its package, pkg\.nets:build"):
        look_at_module(tmp_path, "pkg/nets.py:build")


def test_an_archive_without_a_program_is_reported(tmp_path: Path) -> None:
    for name, words in {
        "hello.txt": "but other files",
        "data/aotinductor/a.so": "but a package of AOTInductor",
    }.items():
        with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
            archive.writestr(name, "")
        with pytest.raises(ModelError, match=f"holds no exported program, {words}; save"):
            look_at_pt2(tmp_path, "net.pt2")


def test_invalid_entry_points_are_reported(tmp_path: Path) -> None:
    for entry, words in {"nets:linear:x": "must look like", "other.py:build": "other.py does not exist in"}.items():
        with pytest.raises(InputError, match=words):
            look_at_module(tmp_path, entry)


def test_the_module_is_run_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.sources.user_process import start_user_process

    monkeypatch.setattr("pipeline.drafts.torch_model.start_user_process", start_user_process)
    package = tmp_path / "pipeline"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("WIDTH = 6\n")
    (package / "models.py").write_text(
        "import os, torch\nfrom .sizes import WIDTH\n"
        f"def build():\n    assert os.getpid() != {os.getpid()}\n    return torch.nn.Linear(WIDTH, 2)\n"
    )
    module = look_at_module(tmp_path, "pipeline.models:build")
    assert module.inputs == (TensorSpec("input", "float32", ("batch", 6)),)
    assert module.source == {"torch": "pipeline.models:build"}


def test_a_program_determines_names_types_and_ranges(tmp_path: Path) -> None:
    class Program(torch.nn.Module):
        def forward(self, a, ids):
            return {"y": a * 2 + ids.sum(1, keepdim=True), "z": ids}

    batch, length = torch.export.Dim("batch", min=1, max=6), torch.export.Dim("length", min=2)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    inputs = (torch.zeros(2, 4, 3), torch.zeros(2, 4, 3, dtype=torch.int64))
    torch.export.save(torch.export.export(Program(), inputs, dynamic_shapes=shapes), tmp_path / "p.pt2")
    actual = look_at_pt2(tmp_path, "p.pt2")
    assert actual.inputs == tuple(
        TensorSpec(name, kind, ("batch", "length", 3)) for name, kind in (("a", "float32"), ("ids", "int64"))
    )
    assert actual.outputs == ("y", "z") and [name for name, _ in actual.precisions] == ["fp32"]
    assert (actual.dims["batch"].min, actual.dims["batch"].max) == (1, 6)
    assert actual.dims["length"].min == 2 and "is a guess" in actual.dims["length"].why
    (tmp_path / "spec.yaml").write_text(write_spec(actual))
    assert load_spec(tmp_path / "spec.yaml").source.pt2 == "p.pt2"
    (tmp_path / "q.pt2").write_bytes(np.zeros(8).tobytes())
    data = (tmp_path / "p.pt2").read_bytes()
    (tmp_path / "r.pt2").write_bytes(data[: len(data) // 2] + data[-22:])  # its end record says that it is whole
    for name in ("q.pt2", "r.pt2"):
        with pytest.raises(ModelError, match=r"not a \.pt2 archive"):
            look_at_pt2(tmp_path, name)


def test_a_program_with_a_non_tensor_argument_names_the_export(tmp_path: Path) -> None:
    class Gain(torch.nn.Module):
        def forward(self, x: torch.Tensor, gain: float = 2.0) -> torch.Tensor:
            return x * gain

    torch.export.save(torch.export.export(Gain(), (torch.zeros(3), 2.0)), tmp_path / "p.pt2")
    with pytest.raises(ModelError, match=r"not tensors \(2\.0\).*leave them to their defaults"):
        look_at_pt2(tmp_path, "p.pt2")
