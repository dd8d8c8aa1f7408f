"""Faults in engines of lower precisions, each smaller than the error that the precision itself makes.

An engine is compared with its own graph, which an honest kernel follows closely: what tells is that distance.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import ModelProto

from enginesmith.core.types import TensorSpec
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.bench import Bench
from tests.faults.nets import add_constants, after, mlp, rows
from tests.faults.plants import saturate
from tests.faults.table import Caught, Fault, blamed, caught
from tests.pipeline.quantization.small_nets import CPU, build, maker, ranges_of
from tests.validation.attribution.planted import copy_of, weight, with_attribute, with_names, with_weight

SQNR = "engine sqnr_db"
TENSORS = ("x", "h", "n", "m", "logits")
DEPTH, PIECE = 4096, 64


def quantized(bench: Bench) -> ModelProto:
    """The int8 graph of `mlp`, calibrated."""
    return quantize_int8(bench.canonical(), ranges_of(bench.canonical(), rows(2), TENSORS), CPU)[0]


def in_int8(change: Callable[[ModelProto], ModelProto], seed: int = 0) -> Callable[[Path], Caught]:
    """Compile a changed int8 graph as if it were the right one, prove it, and take it apart."""

    def plant(folder: Path) -> Caught:
        bench = Bench(folder, mlp(seed), rows())
        graph = quantized(bench)
        engine = bench.engine(change(graph), graph, "int8")
        return caught(engine.checks(), SQNR, blamed(engine.attribution()))

    return plant


def beside_golden(top: str, factor: str) -> Callable[[Path], Caught]:
    """An int8 engine whose answers have a factor where `top` is 0 or less, as in no golden sample."""

    def plant(folder: Path) -> Caught:
        bench = Bench(folder, mlp(), rows(3))
        graph = quantized(bench)
        text = f"{top} at = LessOrEqual(top, k_0) by = Where(at, {factor}, k_1) logits = Mul(was, by)"
        checks = bench.engine(after(graph, "logits", text), graph, "int8").checks()
        return caught(checks, "engine magnitudes", lambda check: check.case)

    return plant


def zero_point_off(model: ModelProto, by: int) -> ModelProto:
    """What the second product reads is dequantized with another zero point than it was quantized with."""
    copied_model = copy_of(model)
    reader = maker(copied_model, maker(copied_model, "m0").input[0])
    zero = weight(model, reader.input[2])
    add_constants(copied_model, {"off": (zero + by).astype(zero.dtype)})
    reader.input[2] = "off"
    return copied_model


def coarser(model: ModelProto, factor: float = 1.2) -> ModelProto:
    """All activations are quantized, and dequantized, with larger steps."""
    for name in {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}:
        model = with_weight(model, name, weight(model, name) * np.float32(factor))
    return model


def one_channel(model: ModelProto, factor: float = 1.5) -> ModelProto:
    """One channel of a weight has another scale."""
    name = maker(model, maker(model, "m0").input[1]).input[1]
    scales = weight(model, name).copy()
    scales[5] *= np.float32(factor)
    return with_weight(model, name, scales)


def saturating(model: ModelProto) -> ModelProto:
    """Pairs of the last layer's products are added in 16 bits, as x86 does without VNNI."""
    copied_model, product = copy_of(model), maker(model, "logits")
    saturate(copied_model, maker(model, product.input[0]), maker(copied_model, "logits"))
    return copied_model


def in_fp16(net: ModelProto, change: Callable[[ModelProto], ModelProto], width: int) -> Callable[[Path], Caught]:
    """The same of a graph in fp16, from `x` of some width."""

    def plant(folder: Path) -> Caught:
        samples = {"x": np.random.default_rng(1).normal(size=(48, width)).astype(np.float32)}
        bench = Bench(folder, net, samples, (TensorSpec("x", "float32", ("batch", width)),))
        graph = cast_float(bench.canonical(), "fp16")[0]
        engine = bench.engine(change(graph), graph, "fp16")
        return caught(engine.checks(), SQNR, blamed(engine.attribution()))

    return plant


def long_sum() -> ModelProto:
    """One product of 4,096 terms."""
    weights = {"w": np.random.default_rng(0).normal(size=(DEPTH, 8)) / 64}
    return with_names(build(f"float[batch,{DEPTH}] x", "float[batch,8] y", "s = MatMul(x, w) y = Relu(s)", weights))


def narrow_sum(_: ModelProto) -> ModelProto:
    """`long_sum` that rounds to 11 bits after every 64 terms, by Veltkamp's splitting."""
    text, total = "", "none"
    for index in range(DEPTH // PIECE):
        text += f"""
            p{index} = Slice(x, k{index}, k{index + 1}, k_axis) v{index} = Slice(w, k{index}, k{index + 1}, k_first)
            s{index} = MatMul(p{index}, v{index}) t{index} = Add({total}, s{index})
            c{index} = Mul(t{index}, split) d{index} = Sub(c{index}, t{index}) r{index} = Sub(c{index}, d{index})
        """
        total = f"r{index}"
    weights: dict[str, object] = {f"k{index}": np.array([index * PIECE]) for index in range(DEPTH // PIECE + 1)}
    weights |= {"k_axis": np.array([1]), "k_first": np.array([0]), "none": np.float32(0), "split": np.float32(8193)}
    weights |= {"w": (np.random.default_rng(0).normal(size=(DEPTH, 8)) / 64).astype(np.float16).astype(np.float32)}
    return with_names(build(f"float[batch,{DEPTH}] x", "float[batch,8] y", f"{text} y = Relu({total})", weights))


def gelu_net() -> ModelProto:
    """Gelu where it is near zero, and its approximation worst."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(16, 16)) / 4,
        "g": np.full(16, 0.5),
        "b": np.full(16, -2.5),
        "v": rng.normal(size=(16, 8)),
    }
    text = "h = MatMul(x, w) n = LayerNormalization(h, g, b) a = Gelu(n) y = MatMul(a, v)"
    return with_names(build("float[batch,16] x", "float[batch,8] y", text, weights))


def small_norm() -> ModelProto:
    """LayerNorm of numbers whose variance is no larger than a thousand epsilons."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(16, 16)) / 40, "g": np.ones(16), "b": np.zeros(16), "v": rng.normal(size=(16, 8))}
    text = "h = MatMul(x, w) n = LayerNormalization<epsilon=1e-5>(h, g, b) y = MatMul(n, v)"
    return with_names(build("float[batch,16] x", "float[batch,8] y", text, weights))


FAR = frozenset({"engine max_rel"})
# The engine's kernel computes all three.
SECOND = "node MatMul_m0 (with Add_m1, Relu_m)"
EVERYWHERE = (
    f"node DequantizeLinear/x_dequantized, node MatMul_logits, {SECOND}, node QuantizeLinear/n_quantized, "
    "node QuantizeLinear/x_quantized"
)
FAULTS = (
    Fault("int8: a zero point off by 1", in_int8(lambda m: zero_point_off(m, 1)), SQNR, SECOND),
    Fault("int8: a zero point off by 8", in_int8(lambda m: zero_point_off(m, 8)), SQNR, SECOND, FAR),
    Fault("int8: all activations' scales 20 % larger", in_int8(coarser), SQNR, EVERYWHERE),
    Fault("int8: one channel's scale 50 % larger", in_int8(one_channel), SQNR, SECOND, FAR),
    Fault("int8: sums of pairs that saturate in 16 bits", in_int8(saturating, 7), SQNR, "node MatMul_logits", FAR),
    Fault("int8: answers to zeros 50 % larger", beside_golden("a = Abs(x) top = ReduceMax(a, k_1i)", "k_1_5"),
          "engine magnitudes", "batch=4 values=blank"),
    Fault("int8: answers to negative samples 10 % larger", beside_golden("top = ReduceMax(x)", "k_1_1"),
          "engine magnitudes", "batch=4 values=negative"),
    Fault("fp16: a sum of 4,096 products in fp16", in_fp16(long_sum(), narrow_sum, DEPTH), SQNR,
          "node MatMul_s (with Relu_y)", FAR),
    Fault("fp16: a wrong epsilon (1e-3 for 1e-5)",
          in_fp16(small_norm(), lambda m: with_attribute(m, "n", epsilon=1e-3), 16), SQNR,
          "node LayerNormalization_n", FAR),
    Fault("fp16: Gelu by tanh", in_fp16(gelu_net(), lambda m: with_attribute(m, "a", approximate="tanh"), 16), SQNR,
          "node Gelu_a", FAR),
)  # fmt: skip
