import mmap
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from enginesmith.core.errors import SpecError
from pipeline.compile.preflight import PRELOADED, check_files
from pipeline.spec.model import ModelSpec, load_spec
from tests.pipeline.quantization.small_nets import build


def arrays(count: int = 4, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": np.zeros((count, 1, 3), "float32"), "z": np.zeros((count, 1, 3), "float32"), **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(build("float[n,3] x, float[1,3] z", "float[n,3] y", "y = Add(x, z)", {}, 17), tmp_path / "m.onnx")
    np.savez(tmp_path / "cal.npz", **arrays())
    np.savez(tmp_path / "gold.npz", **arrays(label=np.arange(4)))
    return tmp_path


def spec_of(folder: Path, **parts: object) -> ModelSpec:
    x, z = {"dtype": "float32", "shape": ["batch", 3]}, {"dtype": "float32", "shape": [1, 3]}
    whole_fields = {
        "model": "m",
        "source": {"onnx": "m.onnx"},
        "inputs": {"x": x, "z": z},
        "dims": {"batch": {"max": 4}},
        "targets": ["cpu"],
        "calibration": {"data": "cal.npz"},
        "golden": {"data": "gold.npz", "labels": "label"},
        "backends": {"onnxruntime": {}},
        **parts,
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(whole_fields, sort_keys=False))
    return load_spec(folder / "spec.yaml")


def mistakes(spec: ModelSpec) -> list[str]:
    with pytest.raises(SpecError) as error:
        check_files(spec)
    return list(error.value.lines)


def test_a_good_spec_has_no_mistakes(folder: Path) -> None:
    check_files(spec_of(folder))


def test_sizes_beyond_any_memory_are_a_mistake(folder: Path) -> None:
    held_once = int(0.7 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 12
    line = next(line for line in mistakes(spec_of(folder, dims={"batch": {"max": held_once}})) if "GiB" in line)
    assert "dims.batch: golden inputs of the largest sizes take" in line and "more than this machine has" in line


def test_all_mistakes_come_at_once_with_line_and_key(folder: Path) -> None:
    np.savez(folder / "cal.npz", x=np.zeros((4, 1, 4), "float64"), z=np.zeros((3, 1, 3), "float32"))
    np.savez(folder / "gold.npz", **arrays(lable=np.arange(4)))
    z = {"dtype": "float32", "shape": [1, 3]}
    actual = mistakes(spec_of(folder, inputs={"x": {"shape": ["batch", 3]}, "z": z}, outputs=["y", "w"]))
    expected = [
        "outputs.1: output 'w' is not in the model; its outputs are y",
        "calibration.data: .*'z' has 3 samples, but 'x' has 4",
        "calibration.data: .*'x' is float64; the input is float32",
        "calibration.data: .*'x' has shape \\(4, 1, 4\\): axis 2 must be 3",
        "golden.data: .*has no array 'label'",
        "golden.data: .*has an array 'lable' that nothing asks for",
    ]
    assert len(actual) == len(expected)
    for line, words in zip(actual, expected, strict=True):
        assert re.search(rf"spec\.yaml:\d+: {words}", line), line


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"x": {"shape": ["batch", 3]}}, ["inputs: the model's input 'z' is missing"]),
        (
            {"x": {"shape": ["batch", 3]}, "zz": {"shape": [1, 3]}},
            ["inputs: the model's input 'z' is missing; its inputs are x, z", "inputs.zz: the model has no such input"],
        ),
        (
            {"x": {"shape": ["batch", 3]}, "z": {"dtype": "int64", "shape": ["batch"]}},
            ["inputs.z: is float32 in the model and int64", "inputs.z: is [1, 3] in the model and [batch] in the spec"],
        ),
        ({"x": {"shape": ["batch", 4]}, "z": {"shape": [1, 3]}}, ["inputs.x: is [n, 3] in the model and [batch, 4]"]),
    ],
)
def test_contradictions_of_the_model_are_reported_without_blaming_data(folder, inputs, expected) -> None:
    actual = mistakes(spec_of(folder, inputs=inputs))
    assert len(actual) == len(expected) and all(words in line for words, line in zip(expected, actual, strict=True))


def test_an_input_with_a_value_is_not_in_the_spec(folder: Path) -> None:
    first_mistakes, twice = mistakes(spec_of(folder, source={"onnx": "m.onnx", "arguments": {"z": 1.0, "w": 2}}))
    assert "source.arguments.w: the model has no such input; its inputs are x, z" in first_mistakes
    assert "inputs.z: the model has no such input; its inputs are x" in twice


def test_outputs_named_by_metric_and_contract_must_exist(folder: Path) -> None:
    golden = {"data": "gold.npz", "labels": "label", "metric": {"output": "logits", "floor": 0.5}}
    contract = {"contract": {"structured": {"boxes": {"finite": True}}}}
    first_mistakes, second_mistakes = mistakes(spec_of(folder, golden=golden, validation=contract))
    assert "golden.metric.output: output 'logits' is not in the model" in first_mistakes
    assert "validation.contract.structured.boxes: output 'boxes' is not in the model" in second_mistakes


def test_invalid_files_are_reported_together(folder: Path) -> None:
    (folder / "m.onnx").write_bytes((folder / "m.onnx").read_bytes()[:-9])
    (folder / "cal.npz").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    (folder / "gold.npz").write_bytes(b"PK nothing")
    lfs, model, golden = mistakes(spec_of(folder))
    assert "calibration.data: 'cal.npz' is a Git LFS pointer" in lfs and "git lfs pull" in lfs
    assert "source.onnx: " in model and "truncated" in model
    assert "golden.data: " in golden and "cannot be read" in golden


def test_python_files_are_read_and_not_run(folder: Path) -> None:
    (folder / "model.py").write_text("raise SystemExit\ndef biuld(): ...\n")
    (folder / "data.py").write_text("def samples(:")
    (folder / "w.pt").write_bytes(b"nothing")
    source = {"torch": "model.py:build", "weights": "w.pt"}
    model, weights, data = mistakes(spec_of(folder, source=source, calibration={"data": "data.py:samples"}))
    assert "source.torch: " in model and "has no function 'build'; did you mean 'biuld'" in model
    assert "source.weights: " in weights and "a file that torch.save wrote" in weights
    assert "calibration.data: " in data and "data.py:1: not Python" in data


@pytest.mark.parametrize("text", ["from nets import *", "build = 1", "if 1:\n  def build(): ...", "import x as build"])
def test_a_function_that_may_be_imported_is_not_reported_missing(folder: Path, text: str) -> None:
    (folder / "model.py").write_text(text)
    check_files(spec_of(folder, source={"torch": "model.py:build"}))


def test_large_files_take_no_longer(folder: Path) -> None:
    """Data of 12 GiB that is holes in two files: whoever reads it takes seconds."""
    for name in "xz":
        place = folder / "data" / f"{name}.npy"
        place.parent.mkdir(exist_ok=True)
        with place.open("wb") as stream:
            header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 29, 1, 3)}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.truncate(stream.tell() + (1 << 29) * 12)
    check_files(spec_of(folder))  # imports
    count_before = bytes_read()
    check_files(spec_of(folder, calibration={"data": "data"}))
    assert bytes_read() - count_before < 16 << 20


def bytes_read() -> int:
    """What this process has read so far, and what it has touched of files that are mapped."""
    loaded_number = int(Path("/proc/self/io").read_text().split()[1])
    return loaded_number + resource.getrusage(resource.RUSAGE_SELF).ru_minflt * mmap.PAGESIZE


# Each starts threads, or takes time and memory that most steps do not need.
APART = ("onnxruntime", "torch", "sympy", "onnx_ir", "scipy", "pydantic", "prefect", "ray", "tensorrt", "jax")


def test_the_fork_server_has_only_numpys_threads():
    code = f"""
import importlib, os, sys
import numpy
before = len(os.listdir("/proc/self/task"))
for name in {PRELOADED}:
    importlib.import_module(name)
print([name for name in {APART} if name in sys.modules], len(os.listdir("/proc/self/task")) - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["[]", "0"], result.stdout
