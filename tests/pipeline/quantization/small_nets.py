"""Small nets with seeded weights, and what the tests of this room do with a graph: run it, compare it, compile it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, numpy_helper

from builders.backends.onnxruntime.saturation import exact_source
from builders.backends.onnxruntime.session import open_model, session_options
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.types import Dim, QuantizationScheme, TensorSpec
from pipeline.quantization.insertion_points import prepare_model, tensors_to_measure
from pipeline.quantization.ranges import Ranges
from validation.data.samples import Samples

TENSORRT = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
TENSORRT_FP32 = QuantizationScheme("int8", quantize_bias=False, float_precision="fp32")
CPU = QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32")
SCHEMES = {"tensorrt": TENSORRT, "tensorrt-fp32": TENSORRT_FP32, "cpu": CPU}

BATCH = Dim("batch", 1, 4, 8)
IMAGE = TensorSpec("image", "float32", ("batch", 1, 8, 8))
TOKENS = TensorSpec("tokens", "int64", ("batch", 6))
MASK = TensorSpec("mask", "float32", ("batch", 6))


def conv_net(opset: int = 20) -> ModelProto:
    """Conv-Relu, residual Conv-Relu, global mean, Gemm; input `image`, output `logits`."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(size=(8, 1, 3, 3)) * 0.5,
        "b1": rng.normal(size=8),
        "w2": rng.normal(size=(8, 8, 3, 3)) * 0.2,
        "b2": rng.normal(size=8) * 0.1,
        "w3": rng.normal(size=(10, 8)),
        "b3": rng.normal(size=10),
    }
    text = """
        c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(image, w1, b1)
        r1 = Relu(c1)
        c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(r1, w2, b2)
        sum = Add(c2, r1)
        r2 = Relu(sum)
        pooled = GlobalAveragePool(r2)
        flat = Flatten(pooled)
        logits = Gemm<transB=1>(flat, w3, b3)
    """
    return build("float[batch,1,8,8] image", "float[batch,10] logits", text, weights, opset)


def attention_net(mask_value: float = float(np.finfo(np.float32).min), opset: int = 20) -> ModelProto:
    """Embedding, attention with an additive mask, LayerNorm, feed-forward, a projection tied to the embedding."""
    rng, d = np.random.default_rng(1), 16
    weights = {name: rng.normal(size=(d, d)) / 4 for name in ("wq", "wk", "wv", "wo")}
    weights |= {"up": rng.normal(size=(d, 32)) / 4, "down": rng.normal(size=(32, d)) / 6}
    weights |= {"table": rng.normal(size=(32, d)), "bq": rng.normal(size=d) / 4, "axes": np.array([1])}
    weights |= {"gamma": np.ones(d), "beta": np.zeros(d), "fill": np.float32(mask_value), "one": np.float32(1)}
    weights |= {"scale": np.float32(0.25), "half": np.float32(0.5), "root": np.float32(2**-0.5)}
    text = """
        x = Gather(table, tokens)
        q0 = MatMul(x, wq)
        q = Add(q0, bq)
        k = MatMul(x, wk)
        v = MatMul(x, wv)
        kt = Transpose<perm=[0,2,1]>(k)
        s0 = MatMul(q, kt)
        s1 = Mul(s0, scale)
        m0 = Unsqueeze(mask, axes)
        m1 = Sub(one, m0)
        m2 = Mul(m1, fill)
        s2 = Add(s1, m2)
        p = Softmax<axis=-1>(s2)
        a = MatMul(p, v)
        o = MatMul(a, wo)
        x1 = Add(x, o)
        n = LayerNormalization<axis=-1>(x1, gamma, beta)
        u = MatMul(n, up)
        u1 = Mul(u, root)
        u2 = Erf(u1)
        u3 = Add(u2, one)
        u4 = Mul(u, u3)
        u5 = Mul(u4, half)
        f = MatMul(u5, down)
        y = Add(n, f)
        back = Transpose<perm=[1,0]>(table)
        scores = MatMul(y, back)
    """
    return build("int64[batch,6] tokens, float[batch,6] mask", "float[batch,6,32] scores", text, weights, opset)


def build(inputs: str, outputs: str, text: str, weights: dict[str, object], opset: int = 20) -> ModelProto:
    """A model from ONNX's text form; float weights become float32."""
    header = f'<ir_version: 8, opset_import: ["": {opset}]>'
    model = onnx.parser.parse_model(f"{header} net ({inputs}) => ({outputs}) {{{text}}}")
    for name, value in weights.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def x_net(text: str, opset: int = 20, **weights: object) -> ModelProto:
    """A net from `x` to `y`, both five wide; `w` is a seeded 5 by 5 matrix unless given."""
    defaults = {"w": np.random.default_rng(0).normal(size=(5, 5))}
    return build("float[batch,5] x", "float[batch,5] y", text, defaults | weights, opset)


def x_values(scale: float = 1.0) -> dict[str, np.ndarray]:
    """Sixteen samples for `x_net`."""
    return {"x": (np.random.default_rng(1).normal(size=(16, 5)) * scale).astype(np.float32)}


def images(count: int = 24, seed: int = 2) -> dict[str, np.ndarray]:
    return {"image": np.random.default_rng(seed).normal(size=(count, 1, 8, 8)).astype(np.float32)}


def sentences(count: int = 24, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, size=(count, 1))
    return {"tokens": rng.integers(0, 32, size=(count, 6)), "mask": (np.arange(6) < lengths).astype(np.float32)}


def samples(folder: Path, arrays: dict[str, np.ndarray], specs: tuple[TensorSpec, ...], dim: Dim = BATCH) -> Samples:
    path = folder / "samples.npz"
    np.savez(path, **arrays)
    return Samples.open(path, specs, (dim,))


def run(model: ModelProto, inputs: dict[str, np.ndarray], optimized: bool = True) -> np.ndarray:
    """First output of a model on onnxruntime's CPU, without sums that saturate."""
    return session(model, optimized).run(None, inputs)[0]


def session(model: ModelProto, optimized: bool = True, save: Path | None = None) -> ort.InferenceSession:
    options = session_options("ORT_ENABLE_ALL" if optimized else "ORT_DISABLE_ALL", 1)
    options.optimized_model_filepath = str(save) if save else ""
    with TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / "model.onnx")
        path = Path(folder) / "model.onnx"
        as_written = this_kind().saturates and save is None
        return open_model(path, options, source=exact_source(path) if as_written else None)


def sqnr_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to quantization noise, in decibel; infinite when nothing differs."""
    noise = np.square(expected.astype(np.float64) - actual).sum()
    signal = np.square(expected.astype(np.float64)).sum()
    return float(10 * np.log10(signal / noise)) if noise else np.inf


def of_type(model: ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


def constant(model: ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(item for item in model.graph.initializer if item.name == name))


def maker(model: ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def named(model: ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def values_of(model: ModelProto, inputs: dict[str, np.ndarray], names: tuple[str, ...], optimized: bool = True) -> dict:
    """The values of these float tensors in a run, by name."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    return dict(zip(names, session(copy, optimized).run(None, inputs), strict=True))


def ranges_of(model: ModelProto, arrays: dict[str, np.ndarray], tensors: tuple[str, ...]) -> Ranges:
    """Ranges by brute force: every tensor is copied out."""
    pairs = {name: (float(v.min()), float(v.max())) for name, v in values_of(model, arrays, tensors).items()}
    return Ranges(pairs, "minmax", "0" * 64, len(next(iter(arrays.values()))))


def measured(model: ModelProto, arrays: dict[str, np.ndarray]) -> Ranges:
    """Ranges of every tensor that a scheme may ask for."""
    graph = prepare_model(model)
    return ranges_of(graph, arrays, tensors_to_measure(graph))


_LOGGER = []


def compiles(model: ModelProto, sm: str, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> str:
    """'' when TensorRT-RTX builds the model for a generation ('SM89'), else what it said. shapes: (min, opt, max)."""
    import tensorrt_rtx as trt

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: object, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.lines.append(message)

    if not _LOGGER:  # the first logger of a process is the only one that TensorRT talks to
        _LOGGER.append(Logger())
    logger = _LOGGER[0]
    logger.lines.clear()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()) or network.num_layers == 0:
        return " ".join([str(parser.get_error(i)) for i in range(parser.num_errors)] + logger.lines) or "nothing parsed"
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, sm), 0)
    profile = builder.create_optimization_profile()
    for name, (low, opt, high) in shapes.items():
        profile.set_shape(name, low, opt, high)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return "" if plan is not None else " ".join(logger.lines) or "no engine, no reason"


IMAGE_SHAPES = {"image": ((1, 1, 8, 8), (4, 1, 8, 8), (8, 1, 8, 8))}
TEXT_SHAPES = {"tokens": ((1, 6), (4, 6), (8, 6)), "mask": ((1, 6), (4, 6), (8, 6))}


NETS = {"conv": (conv_net, images, IMAGE_SHAPES), "attention": (attention_net, sentences, TEXT_SHAPES)}


def wide_net(width: int = 256) -> onnx.ModelProto:
    """Two layers deep enough for blocks of 64 and 128, a MatMul and a Gemm with transB and alpha, of rank 2."""
    rng = np.random.default_rng(4)
    weights = {
        "w1": rng.normal(size=(64, width)) / 8,
        "w2": rng.normal(size=(10, width)) / 16,
        "b2": rng.normal(size=10),
    }
    text = "h = MatMul(x, w1) r = Relu(h) y = Gemm<transB=1, alpha=0.5>(r, w2, b2)"
    return build("float[batch,64] x", "float[batch,10] y", text, weights)


def wide_data(count: int = 32, seed: int = 5) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32)}


WIDE_SHAPES = {"x": ((1, 64), (4, 64), (8, 64))}
