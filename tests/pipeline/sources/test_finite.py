from pathlib import Path

import numpy as np
import onnx
import pytest

from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.types import Dim, TensorSpec
from pipeline.quantization.statistics.observe import observe
from pipeline.sources.export import export
from pipeline.sources.onnx_model import check_weights
from pipeline.sources.request import ExportRequest
from tests.pipeline.sources.exports import user_code_here
from validation.data.samples import Samples

__all__ = ["user_code_here"]  # a fixture

X = TensorSpec("x", "float32", ("batch", 4))
BATCH = Dim("batch", 1, 2, 4)
NORMALIZED = """
import torch
def build():
    torch.manual_seed(0)
    return Net()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf"), 0.0]))
        {spoil}
    def forward(self, x):
        return torch.softmax(self.norm(self.layer(x)) + self.mask, -1)
"""


def model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    head = '<ir_version: 10, opset_import: ["" : 20]> g (float[batch, 4] x) => (float[batch, 4] y) '
    actual = onnx.parser.parse_model(head + text)
    actual.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()
    )
    return actual


def spoiled(shape: tuple[int, ...], value: float) -> np.ndarray:
    array = np.ones(shape)
    array[(-1,) * len(shape)] = value
    return array


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", ["{ y = MatMul(x, w) }", "{ h = Identity(x)  y = Gemm(h, w, b) }"])
def test_a_non_finite_weight_is_named(text: str, value: float) -> None:
    with pytest.raises(ModelError, match=rf"weight 'w' holds {value} at \[3, 3\]; repair it"):
        check_weights(model(text, w=spoiled((4, 4), value), b=np.ones(4)))


def test_a_constant_inside_a_node_is_named() -> None:
    result = model("{ w = Identity(x)  y = Add(x, w) }")
    constant = onnx.helper.make_node(
        "Constant", [], ["w"], value=onnx.numpy_helper.from_array(np.array([1, np.nan, 1, np.nan], np.float32))
    )
    result.graph.node[0].CopyFrom(constant)
    with pytest.raises(ModelError, match=r"weight 'w' holds nan at \[1\], and 1 more such values"):
        check_weights(result)


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("{ y = Add(x, c) }", spoiled((4,), -np.inf)),
        ("{ y = Min(x, c) }", spoiled((4,), np.inf)),
        ("<bool[1] m = {1}> { y = Where(m, x, c) }", np.array(np.nan)),
    ],
)
def test_masks_bounds_and_marks_are_allowed(text: str, constant: np.ndarray) -> None:
    check_weights(model(text, c=constant))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("self.layer.bias.data[1] = float('inf')", r"weight 'layer.bias' holds inf at \[1\]"),
        ("self.norm.running_var[2] = float('nan')", r"weight 'norm.running_var' holds nan at \[2\]"),
    ],
)
def test_a_modules_weight_has_its_name_in_the_module(tmp_path: Path, spoil: str, words: str) -> None:
    (tmp_path / "model.py").write_text(NORMALIZED.format(spoil=spoil))
    request = ExportRequest("torch", tmp_path, "model.py", (X,), (BATCH,), function="build")
    with pytest.raises(ModelError, match=words):
        export(request, None, None, tmp_path)


def test_a_module_with_a_mask_is_exported(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(NORMALIZED.format(spoil=""))
    request = ExportRequest("torch", tmp_path, "model.py", (X,), (BATCH,), function="build")
    assert all(check.passed for check in export(request, None, None, tmp_path).checks)


def test_calibration_names_constants_that_are_not_finite(tmp_path: Path) -> None:
    onnx.save(model("{ h = Add(x, c)  y = MatMul(h, w) }", c=spoiled((4,), -np.inf), w=np.eye(4)), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    with pytest.raises(
        DataError, match=r"sample 0 makes tensor 'h' infinite.*constants first: 'c' holds -inf at \[3\]"
    ):
        observe(tmp_path / "m.onnx", Samples.open(tmp_path / "x.npz", (X,), (BATCH,)))
