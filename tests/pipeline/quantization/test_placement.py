from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.quantization.insertion_points import JoinNode, find_joins, find_sites, prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.first_convolutions import fold_first_convolutions
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.pipeline.quantization import small_nets as nets

PHOTO = "float[batch,3,16,16] photo"


def photos(count: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    return {"photo": np.random.default_rng(seed).normal(size=(count, 3, 16, 16)).astype(np.float32)}


def residual_net() -> onnx.ModelProto:
    """A stem, a pool, and a residual block whose shortcut is a projection: what a ResNet is made of."""
    rng = np.random.default_rng(1)
    shapes = {"w1": (8, 3, 7, 7), "w2": (16, 8, 3, 3), "w3": (16, 8, 1, 1), "w4": (16, 16, 3, 3), "w5": (16, 10)}
    weights = {name: rng.normal(size=shape) / np.sqrt(np.prod(shape[1:])) for name, shape in shapes.items()}
    text = """
        c1 = Conv<strides=[2,2], pads=[3,3,3,3]>(photo, w1)  r1 = Relu(c1)
        p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(r1)
        c2 = Conv<pads=[1,1,1,1]>(p, w2)
        c3 = Conv(p, w3)
        s1 = Add(c2, c3)  r2 = Relu(s1)
        c4 = Conv<pads=[1,1,1,1]>(r2, w4)
        s2 = Add(r2, c4)  r3 = Relu(s2)
        g = GlobalAveragePool(r3)  f = Flatten(g)  y = MatMul(f, w5)
    """
    return nets.build(PHOTO, "float[batch,10] y", text, weights)


def test_a_sum_between_integer_kernels_includes_its_only_relu() -> None:
    model = prepare_model(residual_net())
    # Not r1: its convolution has that one. Of a result that is an output, or that two nodes read, the Relu stays apart.
    expected = [JoinNode("Add_s1", "r2", "Relu_r2"), JoinNode("Add_s2", "r3", "Relu_r3")]
    sums = [join for join in find_joins(model, ("c2", "c3", "c4")) if join.node.startswith("Add")]
    assert sums == expected
    model.graph.output.append(onnx.helper.make_tensor_value_info("s2", onnx.TensorProto.FLOAT, None))
    model.graph.node.append(onnx.helper.make_node("Identity", ["s1"], ["other"]))
    sums = [join for join in find_joins(model, ("c2", "c3", "r2", "c4")) if join.node.startswith("Add")]
    assert sums == [JoinNode("Add_s1", "s1"), JoinNode("Add_s2", "s2")]


def quantized(model: onnx.ModelProto, data: dict[str, np.ndarray], scheme: object) -> onnx.ModelProto:
    return quantize_int8(model, nets.measured(model, data), scheme)[0]


def test_a_residual_net_stays_in_integers_between_its_convolutions(tmp_path: Path) -> None:
    model, held_out = residual_net(), photos(8, 9)
    result = quantized(model, photos(), nets.CPU)
    assert nets.sqnr_db(nets.run(model, held_out), nets.run(result, held_out)) > 25
    nets.session(result, save=tmp_path / "optimized.onnx")
    items = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert items.count("QLinearConv") == 4 and items.count("QLinearAdd") == 2 and "QLinearGlobalAveragePool" in items
    assert not {"Conv", "Add", "Relu"} & set(items)
    assert items.count("QuantizeLinear") <= 2 and items.count("DequantizeLinear") <= 1


def test_tensorrt_fuses_the_add_into_the_larger_convolution() -> None:
    result = quantized(residual_net(), photos(), nets.TENSORRT_FP32)
    projection, identity = nets.named(result, "Add_s1"), nets.named(result, "Add_s2")
    assert nets.maker(result, projection.input[0]).op_type == "Conv"
    assert nets.maker(result, identity.input[1]).op_type == "Conv"
    for name in (projection.input[1], identity.input[0]):
        assert nets.maker(result, name).op_type == "DequantizeLinear"
    assert {len([n for n in result.graph.node if name in n.input]) for name in ("r1", "p", "s1", "s2")} == {1}


@pytest.mark.parametrize("sm", ["SM75", "SM89"])
def test_tensorrt_rtx_builds_residuals_and_transposed_convolutions(sm: str) -> None:
    rng = np.random.default_rng(2)
    weights = {"w": rng.normal(size=(3, 8, 3, 3)), "v": rng.normal(size=(8, 8, 3, 3)) / 8}
    text = "u = ConvTranspose<strides=[2,2]>(photo, w) r = Relu(u) y = Conv(r, v)"
    transposed_build = nets.build(PHOTO, "float[batch,8,31,31] y", text, weights)
    shapes = {"photo": tuple((size, 3, 16, 16) for size in (1, 4, 8))}
    for model in (transposed_build, residual_net()):
        assert nets.compiles(quantized(model, photos(), nets.TENSORRT), sm, shapes) == ""
    result = quantized(transposed_build, photos(), nets.TENSORRT_FP32)
    assert nets.sqnr_db(nets.run(transposed_build, photos(4, 5)), nets.run(result, photos(4, 5))) > 25
    assert nets.maker(result, nets.of_type(result, "ConvTranspose")[0].input[1]).op_type == "DequantizeLinear"


def test_on_the_cpu_a_transposed_convolution_stays_in_float_with_the_reason() -> None:
    model = nets.build(PHOTO, "float[batch,8,18,18] y", "y = ConvTranspose(photo, w)", {"w": np.ones((3, 8, 3, 3))})
    notes = quantize_int8(model, Ranges({"photo": (-3.0, 3.0)}, "minmax", "0" * 64, 1), nets.CPU)[1]
    assert "no integer kernel" in notes.float_nodes[0].reason


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("begin", [0, 1, 2, 3])
@pytest.mark.parametrize("end", [0, 1, 3])
def test_a_folded_stem_computes_the_same_function(kernel: int, begin: int, end: int) -> None:
    rng = np.random.default_rng(3)
    text = f"y = Conv<strides=[2,2], pads=[{begin},{begin},{end},{end}]>(photo, w)"
    weights = {"w": rng.normal(size=(4, 3, kernel, kernel))}
    model = onnx.shape_inference.infer_shapes(prepare_model(nets.build(PHOTO, "float[batch,4,h,v] y", text, weights)))
    expected = nets.run(model, photos())
    sites, _ = fold_first_convolutions(
        model, find_sites(model)[0], Ranges({"photo": (-4.0, 4.0)}, "minmax", "0" * 64, 1)
    )
    assert (sites[0].activation == "photo_blocks") == bool(nets.of_type(model, "SpaceToDepth"))
    np.testing.assert_allclose(nets.run(model, photos()), expected, rtol=1e-4, atol=1e-4)


def test_blocks_consist_of_bytes_not_floats() -> None:
    model, data = residual_net(), photos()
    written_model = quantized(model, data, nets.CPU)
    (blocks,) = nets.of_type(written_model, "SpaceToDepth")
    quantizer = nets.maker(written_model, blocks.input[0])
    assert quantizer.op_type == "QuantizeLinear" and quantizer.input[0] == "photo"
    assert nets.sqnr_db(nets.run(model, data), nets.run(written_model, data)) > 25


@pytest.mark.parametrize(
    "text",
    [
        "y = Conv<strides=[1,1]>(photo, w)",
        "y = Conv<strides=[2,2], dilations=[2,2]>(photo, w)",
        'y = Conv<strides=[2,2], auto_pad="SAME_UPPER">(photo, w)',
    ],
)
def test_other_convolutions_are_not_folded(text: str) -> None:
    model = prepare_model(nets.build(PHOTO, "float[batch,4,h,v] y", text, {"w": np.ones((4, 3, 3, 3))}))
    fold_first_convolutions(model, find_sites(model)[0], Ranges({"photo": (-4.0, 4.0)}, "minmax", "0" * 64, 1))
    assert not nets.of_type(model, "SpaceToDepth")


def test_a_residual_override_keeps_the_add_in_float() -> None:
    ranges = nets.measured(residual_net(), photos())
    result, notes = quantize_int8(residual_net(), ranges, nets.TENSORRT_FP32, {"Add_s2": "fp16"})
    assert "r2" in nets.named(result, "Add_s2").input
    assert [item.node for item in notes.float_nodes] == ["Add_s2"]


def test_declared_shapes_survive() -> None:
    text = "s = Shape(other) r = Reshape(x, s) y = MatMul(r, w)"
    model = nets.build("float[batch,5] x, float[batch,5] other", "float[batch,5] y", text, {"w": np.eye(5)})
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("r", 1, ["batch", 5]))
    result = quantize_int8(model, Ranges({"r": (-1.0, 1.0)}, "minmax", "0" * 64, 1), nets.CPU)[0]
    message = next(value for value in result.graph.value_info if value.name == "r")
    assert [dim.dim_param or dim.dim_value for dim in message.type.tensor_type.shape.dim] == ["batch", 5]
