from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.backends.onnxruntime.file import rewrite_optimized, split_convolutions

BIG = (512, 256, 3, 3)


def convolution(
    shape: tuple[int, ...], *, bias: bool = True, per_channel: bool = True, group: int = 1
) -> onnx.ModelProto:
    """One QLinearConv over a 5x5 image."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.001, 0.01, shape[0]).astype(np.float32) if per_channel else np.array(0.004, np.float32)
    values = {
        "xs": np.array(0.02, np.float32),
        "xz": np.array(120, np.uint8),
        "w": rng.integers(-127, 128, shape, np.int8),
        "ws": scales,
        "wz": np.zeros(scales.shape, np.int8),
        "ys": np.array(0.5, np.float32),
        "yz": np.array(99, np.uint8),
        **({"b": rng.integers(-5000, 5000, shape[0]).astype(np.int32)} if bias else {}),
    }
    side = shape[2] // 2
    node = helper.make_node("QLinearConv", ["x", *values], ["y"], name="conv", pads=[side] * 4, group=group)
    items = [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, shape[1] * group, 5, 5])]
    result = [helper.make_tensor_value_info("y", TensorProto.UINT8, [1, shape[0], 5, 5])]
    weights = [numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = helper.make_graph([node], "net", items, result, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def run(model: onnx.ModelProto) -> np.ndarray:
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_parts_give_the_same_bytes(tmp_path: Path, bias: bool, per_channel: bool) -> None:
    model = convolution(BIG, bias=bias, per_channel=per_channel)
    path = tmp_path / "engine.onnx"
    onnx.save(model, path)
    assert rewrite_optimized(path, faster=True) == ()
    split = onnx.load(path)
    onnx.checker.check_model(split)
    kinds = [node.op_type for node in split.graph.node]
    assert kinds == ["QLinearConv", "QLinearConv", "Concat"]
    assert "w" not in {item.name for item in split.graph.initializer}  # the file does not hold the weights twice
    expected = run(model)
    assert len(np.unique(expected)) > 50
    np.testing.assert_array_equal(run(split), expected)


@pytest.mark.parametrize(
    ("shape", "group"), [((64, 64, 3, 3), 1), ((2048, 1024, 1, 1), 1), ((512, 256, 3, 3), 2)], ids=str
)
def test_graphs_without_a_gain_stay_whole(shape: tuple[int, ...], group: int) -> None:
    model = convolution(shape, group=group)
    model_bytes_before = model.SerializeToString(deterministic=True)
    assert split_convolutions(model) == 0
    assert model.SerializeToString(deterministic=True) == model_bytes_before
