from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, numpy_helper

from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.requirements import WideSums
from enginesmith.core.types import Engine, QuantizationScheme, Target
from pipeline.quantization.schemes.write import write
from pipeline.values import GraphVariant
from tests.builders import graphs
from tests.pipeline.quantization import small_nets as nets
from tests.pipeline.quantization.search.outlier_nets import choose
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, build, conv_net, images, measured, run, sqnr_db

REDUCED = replace(CPU, weight_levels=64)


def deep_net(seed: int = 0, depth: int = 64, spread: float = 1.0) -> ModelProto:
    """A MatMul and a Gemm over `depth` positive values: with 8-bit weights, their pairs of products leave 16 bits."""
    rng = np.random.default_rng(seed)
    weights = {"w1": np.abs(rng.normal(size=(depth, depth))), "w2": np.abs(rng.normal(size=(depth, 8))) * spread}
    text = "h = MatMul(x, w1) r = Relu(h) y = Gemm(r, w2, b)"
    return build(f"float[batch,{depth}] x", "float[batch,8] y", text, weights | {"b": rng.normal(size=8)})


def loud(depth: int = 64) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).uniform(0.8, 1, (32, depth)).astype(np.float32)}


def largest(model: ModelProto) -> int:
    """The largest magnitude of an int8 constant."""
    arrays = [numpy_helper.to_array(item) for item in model.graph.initializer if item.data_type == TensorProto.INT8]
    return max(int(np.abs(values.astype(int)).max()) for values in arrays)


@given(st.integers(0, 1000), st.integers(2, 16), st.sampled_from([1e-30, 1.0, 1e30]), st.sampled_from([64, 127]))
def test_no_weight_exceeds_its_levels_and_one_reaches_them(seed, depth, spread, levels):
    model, scheme = deep_net(seed, depth, spread), replace(CPU, weight_levels=levels)
    ranges = measured(model, loud(depth))
    for precision in ("int8", "int8-dynamic"):
        assert largest(write(model, precision, scheme, ranges)[0]) == levels


@pytest.mark.parametrize("scheme", [REDUCED, replace(REDUCED, quantize_bias=False)])
def test_convolutions_keep_the_levels_too(scheme: QuantizationScheme):
    graph, _ = write(conv_net(), "int8", scheme, measured(conv_net(), images()))
    assert largest(graph) == 64


def test_tensorrts_pairs_have_scales_over_64():
    ranges = measured(conv_net(), images())
    for scheme in (TENSORRT_FP32, replace(TENSORRT_FP32, weight_levels=64)):
        scale = nets.constant(write(conv_net(), "int8", scheme, ranges)[0], "w1_scale")
        reach = np.abs(nets.constant(conv_net(), "w1")).max(axis=(1, 2, 3))
        assert np.allclose(scale * scheme.weight_levels, reach)


def test_a_search_rounds_to_the_written_levels():
    """Were its steps those of 127 levels, writing would round again."""
    model, data = deep_net(), loud()
    result = choose(model, measured(model, data), REDUCED, [(32, data)])
    weights = {item.name: numpy_helper.to_array(item) for item in result.model.graph.initializer}
    loaded_weights = [weights[node.input[1]] for node in result.model.graph.node if node.op_type in ("MatMul", "Gemm")]
    for values in loaded_weights:
        levels = values / (np.abs(values).max(axis=0) / 64)
        assert np.abs(levels - np.rint(levels)).max() < 1e-3
    assert len(loaded_weights) == 2 and largest(write(result.model, "int8", REDUCED, result.ranges)[0]) == 64


def test_names_distinguish_the_graphs():
    assert GraphVariant("int8", REDUCED).name == "int8 (uint8 activations, 7-bit weights, fp32 elsewhere)"
    assert GraphVariant("int8-dynamic", REDUCED).name == "int8-dynamic (7-bit weights, fp32 elsewhere)"
    assert GraphVariant("int4", REDUCED).name == GraphVariant("int4", CPU).name


def compiled(how: str, precision: str, folder: Path, target: str = "cpu") -> tuple[ModelProto, Engine]:
    """The graph of `deep_net`, and its engine."""
    backend, model = OnnxRuntime(reduced_range=how), deep_net()
    graph, _ = write(model, precision, backend.scheme_for(Target(target)), measured(model, loud()))
    onnx.save(graph, folder / "graph.onnx")
    return graph, backend.build(graphs.request(target, backend="onnxruntime"), folder / "graph.onnx", folder)


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic"])
@pytest.mark.parametrize("how", ["where-needed", "always", "never"])
def test_an_int8_engine_is_exact_here_with_onnxruntime_alone(tmp_path: Path, how: str, precision: str):
    """Without options; `test_cpu_kinds` runs this with the kernels of other CPUs, too."""
    graph, engine = compiled(how, precision, tmp_path)
    session = ort.InferenceSession(str(engine.path), providers=["CPUExecutionProvider"])
    assert sqnr_db(run(graph, loud(), optimized=False), session.run(None, loud())[0]) > 60
    levels = [largest(graph), *(["uint8"] if any("as uint8" in note for note in engine.notes) else [])]
    is_narrow = how == "always" or (how == "where-needed" and this_kind().saturates)
    assert levels == ([64] if is_narrow else [127, "uint8"] if this_kind().saturates else [127])


@pytest.mark.parametrize(
    ("how", "target", "stored", "needs"),
    [
        ("where-needed", "x86-64-v3", 64, False),
        ("where-needed", "x86-64-v4-vnni", 127, True),
        ("where-needed", "arm64", 127, True),
        ("never", "x86-64-v3", 0, False),
        ("never", "x86-64-v4-vnni", 127, True),
        ("always", "x86-64-v4-vnni", 64, False),
    ],
)
def test_an_engine_is_right_on_its_kind_of_cpu_or_states_its_requirement(tmp_path, how, target, stored, needs):
    """Wherever it is built. stored: the largest int8 weight; 0: none, they are uint8."""
    _, engine = compiled(how, "int8", tmp_path, target)
    weights = [item for item in onnx.load(engine.path).graph.initializer if item.dims and "zero_point" not in item.name]
    items = [numpy_helper.to_array(item) for item in weights if item.data_type == TensorProto.INT8]
    assert max((int(np.abs(values.astype(int)).max()) for values in items), default=0) == stored
    assert (WideSums() in engine.requires) is needs
