from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.execution.jobs import Job
from builders.execution.process import Start
from enginesmith.core.types import Dim, TensorSpec
from pipeline.sources import noise
from pipeline.sources.export import ExportResult, export
from pipeline.sources.noise import measure_noise
from pipeline.sources.request import ExportRequest
from validation.golden.golden_set import GoldenSet, freeze
from validation.limits.noise_floor import Noise

BATCH, X = Dim("batch", 1, 2, 4), TensorSpec("x", "float32", ("batch", 4))
HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
ODD = {
    # ONNX's evaluator has DequantizeLinear from opset 19 on, and no operator of another domain; both say so at once.
    "DequantizeLinear": "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
    "com.microsoft": "y = com.microsoft.Gelu(x)",
}


def exported(folder: Path, body: str) -> ExportResult:
    text = f"{HEAD} net (float[batch, 4] x) => (float[batch, 4] y) <float s = {{0.1}}, int8 z = {{0}}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), folder / "net.onnx")
    request = ExportRequest("onnx", folder, "net.onnx", (X,), (BATCH,), None)
    (folder / "work").mkdir()
    return export(request, None, None, folder / "work")


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_a_model_without_a_float64_run_is_exported_with_a_note(tmp_path: Path, body: str) -> None:
    result = exported(tmp_path, body)
    assert all(check.passed for check in result.checks)
    (note,) = [note for note in result.notes if "noise floor" in note]
    assert "is not known (" in note and "the documented limits apply" in note and "Error: " in note


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MOST_S", 0.0, "the float64 run was ended after 0 s"),
        ("BASE_MIB", 1, "the float64 run needs more than 1 MiB of memory"),
    ],
)
def test_the_noise_run_is_bounded_in_time_and_memory(tmp_path, monkeypatch, name, value, message):
    monkeypatch.setattr(noise, name, value)
    result = exported(tmp_path, "y = Relu(x)")
    assert result.checks and any(message in note for note in result.notes)
    actual = GoldenSet.load(result.golden).noise
    assert actual == Noise(reason=message)  # without figures of this run: it is part of the golden set's digest


def test_a_model_is_allowed_memory_by_its_weights(tmp_path: Path) -> None:
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(100 << 20)
    assert noise.noise_memory_mib(tmp_path / "model.onnx") == noise.BASE_MIB + 800


def test_noise_is_measured_at_the_smallest_and_largest_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_values: dict[str, list[tuple[int, ...]]] = {}

    def run_job(job: Job[Noise], _folder: Path, start: Start) -> Noise:
        for case in GoldenSet.load(job.request.cases).cases:
            seen_values.setdefault(case.kind, []).append(case.inputs["x"].shape)
        return Noise()

    monkeypatch.setattr(noise, "run_job", run_job)
    image = (TensorSpec("x", "float32", ("batch", "height", "width")),)
    dims = (BATCH, Dim("height", 2, 4, 6), Dim("width", 3, 5, 7))
    (tmp_path / "model.onnx").touch()
    golden = freeze([{"x": np.ones((2, 4, 5), np.float32)}] * 3, image, dims, lambda inputs: {"y": inputs["x"]})
    measure_noise(tmp_path / "model.onnx", golden, image, dims, tmp_path)
    assert seen_values == {"golden": [(1, 4, 5)] * 2, "edge": [(1, 2, 3), (1, 6, 7)]}
