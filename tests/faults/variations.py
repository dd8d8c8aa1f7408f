"""Faults hidden by an output's energy: offsets, larger slices, a random reference in step, nothing left to measure."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, helper

from enginesmith.core.types import Precision, TensorSpec
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.bench import Bench
from tests.faults.nets import put_nodes
from tests.faults.table import Caught, Fault, blamed, caught
from tests.pipeline.quantization.small_nets import CPU, build, maker, ranges_of
from tests.validation.attribution.planted import copy_of, weight, with_names, with_weight

WIDTH = 8
SPECS = (TensorSpec("x", "float32", ("batch", WIDTH)),)
SLICE, CONSTANT, QUARTILE = "engine slice_sqnr_db", "engine constant", "engine quartile_sqnr_db"
Change = Callable[[ModelProto], ModelProto]


def samples(seed: int = 1, count: int = 48) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)}


def offset_net() -> ModelProto:
    """Logits of 288 and a signal of 0.4."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(WIDTH, 16)), "v": rng.normal(size=(16, 10)) / 30, "b": np.full(10, 288.0)}
    text = "h = MatMul(x, w) a = Tanh(h) s = MatMul(a, v) y = Add(s, b)"
    return with_names(build(f"float[batch,{WIDTH}] x", "float[batch,10] y", text, weights))


def detector() -> ModelProto:
    """Boxes of 0 to 640 and a score of 0 to 1, in one output of 5 columns."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(WIDTH, 32)) / 2, "wb": rng.normal(size=(32, 4)) / 4, "ws": rng.normal(size=(32, 1)) / 4,
        "size": np.float32(640),
    }  # fmt: skip
    text = """
        h = MatMul(x, w) a = Relu(h) b0 = MatMul(a, wb) b1 = Sigmoid(b0) boxes = Mul(b1, size)
        s0 = MatMul(a, ws) scores = Sigmoid(s0) y = Concat<axis=1>(boxes, scores)
    """
    return with_names(build(f"float[batch,{WIDTH}] x", "float[batch,5] y", text, weights))


def engine(net: Callable[[], ModelProto], change: Change, precision: Precision, meant: str) -> Callable[[Path], Caught]:
    """Compile a changed graph of a precision as if it were the right one, prove it, and take it apart."""

    def plant(folder: Path) -> Caught:
        bench = Bench(folder, net(), samples(), SPECS)
        graph = _graph(bench, precision)
        built_engine = bench.engine(change(graph), graph, precision)
        return caught(built_engine.checks(), meant, blamed(built_engine.attribution()))

    return plant


def _graph(bench: Bench, precision: Precision) -> ModelProto:
    model = bench.canonical()
    if precision == "fp32":
        return model
    if precision != "int8":
        return cast_float(model, precision)[0]
    tensors = [node.output[0] for node in model.graph.node]
    return quantize_int8(model, ranges_of(model, samples(2), ("x", *tensors)), CPU)[0]


def silent(model: ModelProto) -> ModelProto:
    """A product that gives nothing: what is left is the bias."""
    return scaled(model, "s", 0.0)


def scaled(model: ModelProto, tensor: str, factor: float, columns: slice = slice(None)) -> ModelProto:
    """Columns of the weight of the product that makes a tensor, times a factor."""
    copied_model, product = copy_of(model), maker(model, tensor)
    name = product.input[1]
    while name not in {item.name for item in copied_model.graph.initializer}:
        name = maker(copied_model, name).input[0]
    values = weight(copied_model, name).copy()
    values[:, columns] = (values[:, columns] * factor).astype(values.dtype)
    return with_weight(copied_model, name, values)


def after_scores(model: ModelProto, factor: float) -> ModelProto:
    """Scores times a factor, just before they are put beside the boxes."""
    copied_model = copy_of(model)
    join = next(node for node in copied_model.graph.node if node.op_type == "Concat")
    name = join.input[1]
    kind = 10 if any(node.op_type == "Cast" and node.output[0] != "y" for node in copied_model.graph.node) else 1
    copied_model.graph.initializer.append(helper.make_tensor("factor", kind, [], [factor]))
    added_node = helper.make_node("Mul", [name, "factor"], ["scores_off"], name="Mul_off")
    join.input[1] = "scores_off"
    put_nodes(copied_model, join, [added_node, join])
    return copied_model


def rounded_away(folder: Path) -> Caught:
    """bf16 counts in twos at 288."""
    bench = Bench(folder, offset_net(), samples(), SPECS)
    checks = bench.graph_checks(cast_float(bench.canonical(), "bf16")[0], "bf16")
    return caught(checks, "quantization centered_sqnr_db", "the graph")


def drawn(folder: Path) -> Caught:
    text = "n = RandomNormalLike(x) y = Add(x, n)"
    net = with_names(build(f"float[batch,{WIDTH}] x", f"float[batch,{WIDTH}] y", text, {}))
    bench = Bench(folder, net, samples(), SPECS)
    message = caught([*bench.checks, *bench.engine().checks()], "export repeats", "the model")
    return replace(message, measured="", limit="")  # another each time


def infinite(folder: Path) -> Caught:
    text = "s = MatMul(x, w) y = Add(s, b)"
    weights = {"w": np.eye(WIDTH), "b": np.full(WIDTH, np.inf)}
    net = with_names(build(f"float[batch,{WIDTH}] x", f"float[batch,{WIDTH}] y", text, weights))
    bench = Bench(folder, net, samples(), SPECS)
    return caught([*bench.checks, *bench.engine().checks()], "export measured", "the model")


# The engine's kernel computes all of it, up to the output.
WHOLE = "node MatMul_s (with Add_y)"
SCORES = "node Concat_y"
FAR = frozenset({"engine sqnr_db", "engine max_rel"})
FAULTS = (
    Fault("fp16: logits of 288, whatever comes in", engine(offset_net, silent, "fp16", CONSTANT), CONSTANT, WHOLE,
          frozenset({"engine centered_sqnr_db", "engine max_rel", SLICE, QUARTILE})),
    Fault("int8: logits of 288, whatever comes in", engine(offset_net, silent, "int8", CONSTANT), CONSTANT,
          WHOLE, FAR),
    Fault("bf16: a signal below its steps", rounded_away, "quantization centered_sqnr_db", "the graph",
          frozenset({"quantization constant", "quantization slice_sqnr_db"})),
    Fault("fp32: scores beside boxes, all zero", engine(detector, lambda m: after_scores(m, 0.0), "fp32", SLICE), SLICE,
          "node Concat_y", FAR),
    Fault("fp16: scores beside boxes, 2 % off", engine(detector, lambda m: after_scores(m, 1.02), "fp16", SLICE), SLICE,
          SCORES),
    Fault("int8: scores beside boxes, 2 % off", engine(detector, lambda m: after_scores(m, 1.02), "int8", SLICE), SLICE,
          "node Concat_y", frozenset({QUARTILE})),
    Fault("a model that draws its answer", drawn, "export repeats", "the model",
          FAR | {"export sqnr_db", "export max_rel", "engine repeats", "engine calls repeated"}),
    Fault("a bias that is infinite", infinite, "export measured", "the model", frozenset({"engine measured"})),
)  # fmt: skip
