import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from builders.onnx_graphs.structure import differs
from enginesmith.registry.manifest import EngineEntry
from pipeline.operations.refit import PublishedRefit
from pipeline.outcome import Outcome, UnitResult
from tests.pipeline.projects import weights

OLD, NEW = weights(), weights(5)


def model_of(folder: Path, name: str, **changes: np.ndarray) -> Path:
    path = folder / f"{name}.onnx"
    values = {**OLD, "axes": np.array([0, 1]), "two": np.array(2.0, np.float32), "sizes": np.ones(2, np.float32)}
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        tiny (float[batch, 8] x) => (float[batch, 10] logits) {
            hidden = MatMul(x, w1)
            twice = Mul(hidden, two)
            back = Transpose(twice)
            again = Transpose(back)
            large = Resize(again, , sizes)
            logits = MatMul(large, w2)
        }
        """
    )
    model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in {**values, **changes}.items())
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"w1": NEW["w1"], "w2": NEW["w2"], "b1": NEW["b1"]}, None),
        (
            {"w1": np.ones((8, 17), np.float32)},
            r"'w1' is of another type or shape: float \[8, 16\] and float \[8, 17\]",
        ),
        ({"w1": OLD["w1"].astype(np.float16)}, "'w1' is of another type"),
        ({"axes": np.array([1, 0])}, "'axes' has other values, and is not a weight"),
        ({"two": np.array(3.0, np.float32)}, "'two' has other values, and is not a weight"),
        ({"sizes": np.full(2, 2, np.float32)}, "'sizes' has other values, and is not a weight"),
        ({"more": np.ones(3, np.float32)}, "only one of the two models has constant 'more'"),
    ],
)
def test_models_that_differ_in_more_than_weights_are_distinguished(tmp_path, changes, words):
    actual = differs(model_of(tmp_path, "old"), model_of(tmp_path, "new", **changes))
    assert (actual is None) if words is None else re.search(words, str(actual)), actual


def test_external_weights_are_distinguished_by_their_form(tmp_path: Path) -> None:
    paths = []
    for name, values in (("old", OLD), ("new", NEW)):
        folder = tmp_path / name
        folder.mkdir()
        model = onnx.load(model_of(folder, name, **values))
        onnx.save(model, folder / "m.onnx", save_as_external_data=True, location=f"{name}.bin", size_threshold=100)
        paths.append(folder / "m.onnx")
    assert differs(*paths) is None


def test_units_of_a_run_that_failed_are_named() -> None:
    """Beside the refitted engines, what was built with them."""
    good_result = UnitResult(EngineEntry("cpu", "fp32", "onnxruntime", "proven", "", digest="a" * 64), 1)
    bad_result = UnitResult(replace(good_result.entry, precision="int8", digest=None, status="failed", reason="SQNR"))
    outcome = Outcome("tiny", "2", False, (good_result, bad_result), {}, channel_refusal="it is frozen")
    assert PublishedRefit.of(outcome) == PublishedRefit("tiny", "2", "it is frozen", ("cpu int8 onnxruntime",))
