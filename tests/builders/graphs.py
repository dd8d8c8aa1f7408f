"""Tiny ONNX graphs and the requests that go with them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginesmith.core.errors import digest_of_file
from enginesmith.core.hardware import machine
from enginesmith.core.types import BuildRequest, Engine, ShapeProfile, TensorSpec

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def save(path: Path, nodes, inputs, outputs, weights=(), domains=()) -> Path:
    """Write a graph; inputs and outputs are (name, ONNX type, shape)."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(domain, 1) for domain in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def one_node(path: Path, op: str, dtype=TensorProto.FLOAT, shape=(2, 4), domain: str = "") -> Path:
    """x -> op -> y; the node is named 'block/the_node'."""
    node = helper.make_node(op, ["x"], ["y"], name="block/the_node", domain=domain)
    return save(path, [node], [("x", dtype, shape)], [("y", dtype, shape)], domains=[domain] if domain else [])


def mlp(path: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """image [batch, 8] float32 -> MatMul, Relu, MatMul in `dtype` -> logits [batch, 3] float32."""
    rng = np.random.default_rng(seed)
    to = TYPES[dtype]
    weights = [("w1", rng.standard_normal((8, 16)).astype("f")), ("w2", rng.standard_normal((16, 3)).astype("f"))]
    nodes = [
        helper.make_node("Cast", ["image"], ["x"], name="down", to=to),
        helper.make_node("Cast", ["w1"], ["w1c"], name="w1_down", to=to),
        helper.make_node("Cast", ["w2"], ["w2c"], name="w2_down", to=to),
        helper.make_node("MatMul", ["x", "w1c"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "w2c"], ["c"], name="second"),
        helper.make_node("Cast", ["c"], ["logits"], name="up", to=TensorProto.FLOAT),
    ]
    shape_in, shape_out = ("batch", 8), ("batch", 3)
    return save(
        path, nodes, [("image", TYPES["float32"], shape_in)], [("logits", TYPES["float32"], shape_out)], weights
    )


def convnet(path: Path) -> Path:
    """image [batch, 3, 16, 16] -> two convolutions -> map [batch, 32, 16, 16]."""
    rng = np.random.default_rng(1)
    weights = [
        ("w1", rng.standard_normal((32, 3, 3, 3)).astype("f")),
        ("w2", rng.standard_normal((32, 32, 3, 3)).astype("f")),
    ]
    nodes = [
        helper.make_node("Conv", ["image", "w1"], ["a"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Conv", ["b", "w2"], ["map"], name="conv2", pads=[1, 1, 1, 1]),
    ]
    float32 = TYPES["float32"]
    return save(
        path, nodes, [("image", float32, ("batch", 3, 16, 16))], [("map", float32, ("batch", 32, 16, 16))], weights
    )


def int8_mlp(path: Path, dtype: str) -> Path:
    """image [batch, 8] -> Q/DQ on input and weights, symmetric int8, over `dtype` -> logits [batch, 16]."""
    rng = np.random.default_rng(2)
    scale = np.array(0.05, dtype)
    weights = [("scale", scale), ("zero", np.array(0, "int8")), ("w", rng.integers(-127, 128, (8, 16)).astype("int8"))]
    nodes = [
        helper.make_node("Cast", ["image"], ["x"], name="down", to=TYPES[dtype]),
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], name="dequantize"),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["wd"], name="dequantize_w"),
        helper.make_node("MatMul", ["d", "wd"], ["c"], name="matmul"),
        helper.make_node("Cast", ["c"], ["logits"], name="up", to=TensorProto.FLOAT),
    ]
    float32 = TYPES["float32"]
    return save(path, nodes, [("image", float32, ("batch", 8))], [("logits", float32, ("batch", 16))], weights)


def fp8_mlp(path: Path) -> Path:
    """image [batch, 8] -> e4m3 Q/DQ on the input, e4m3 weights, over fp16 -> logits [batch, 16]."""
    weights = [
        ("scale", np.array(0.05, "float16")),
        ("zero", np.array(0, ml_dtypes.float8_e4m3fn)),
        ("w", np.random.default_rng(2).standard_normal((8, 16)).astype(ml_dtypes.float8_e4m3fn)),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], name="dequantize"),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["wd"], name="dequantize_w"),
        helper.make_node("MatMul", ["d", "wd"], ["c"], name="matmul"),
    ]
    return _over_fp16(path, nodes, 8, weights)


def int4_mlp(path: Path) -> Path:
    """image [batch, 64] -> int4 weights in one block of 64, over fp16 -> logits [batch, 16]."""
    weights = [
        ("scale", np.full((1, 16), 0.05, "float16")),
        ("w", np.random.default_rng(2).integers(-8, 8, (64, 16)).astype(ml_dtypes.int4)),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["wd"], name="dequantize_w", axis=0, block_size=64),
        helper.make_node("MatMul", ["x", "wd"], ["c"], name="matmul"),
    ]
    return _over_fp16(path, nodes, 64, weights)


def _over_fp16(path: Path, nodes, width: int, weights) -> Path:
    """The nodes from fp16 'x' to fp16 'c', with casts around them."""
    lower_node = helper.make_node("Cast", ["image"], ["x"], name="down", to=TYPES["float16"])
    upper_node = helper.make_node("Cast", ["c"], ["logits"], name="up", to=TensorProto.FLOAT)
    inputs, outputs = [("image", 1, ("batch", width))], [("logits", 1, ("batch", 16))]
    return save(path, [lower_node, *nodes, upper_node], inputs, outputs, weights)


IMAGE = TensorSpec("image", "float32", ("batch", 8))
LOGITS = TensorSpec("logits", "float32", ("batch", 3))
BATCHES = ShapeProfile((("image", (1, 8), (4, 8), (16, 8)),))


def request(target: str, precision: str = "fp32", backend: str = "tensorrt-rtx", **changes) -> BuildRequest:
    fields = {"inputs": (IMAGE,), "outputs": (LOGITS,), "profiles": (BATCHES,)} | changes
    return BuildRequest("0" * 64, precision, machine.parse_targets(target)[0], backend, **fields)


def an_engine(folder: Path, data: bytes, backend: str, target: str = "sm_89") -> Engine:
    path = folder / f"engine.{backend}"
    path.write_bytes(data)
    return Engine(request(target, backend=backend), path, digest_of_file(path), len(data), path.suffix)
