import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.schemes.write import quantize_dynamic
from tests.pipeline.quantization.small_nets import build, run, sqnr_db

FLOAT = TensorProto.FLOAT


def stored_net() -> ModelProto:
    """An embedding and a MatMul, with their weights in int8 behind Cast and Mul, the latter's transposed."""
    rng = np.random.default_rng(1)
    weights = {
        "eq": rng.integers(-127, 128, (500, 32)).astype(np.int8), "es": rng.random((500, 1)) / 100,
        "wq": rng.integers(-127, 128, (48, 32)).astype(np.int8), "ws": rng.random((48, 1)) / 100,
    }  # fmt: skip
    text = f"""
        ef = Cast<to={FLOAT}>(eq) e = Mul(ef, es) x = Gather(e, ids)
        wf = Cast<to={FLOAT}>(wq) w0 = Mul(wf, ws) w = Transpose<perm=[1,0]>(w0) y = MatMul(x, w)
    """
    return build("int64[n] ids", "float[n,48] y", text, weights)


def test_a_stored_weight_is_quantized_and_an_embedding_stays_in_int8() -> None:
    model = stored_net()
    result, notes = quantize_dynamic(model)
    assert len(notes.quantized) == 1, notes.lines()
    kinds = {item.name: (item.data_type, list(item.dims)) for item in result.graph.initializer}
    assert kinds["eq"] == (TensorProto.INT8, [500, 32])
    assert not any(kind == FLOAT and np.prod(dims) > 500 for kind, dims in kinds.values())
    ids = {"ids": np.arange(0, 500, 7)}
    assert sqnr_db(run(model, ids), run(result, ids)) > 35


def test_computed_values_stay() -> None:
    text = f"c = Cast<to={FLOAT}>(m) w = Mul(c, s) y = MatMul(x, w)"
    model = build("float[n,5] x, int8[5,5] m", "float[n,5] y", text, {"s": np.ones((1, 5))})
    onnx.checker.check_model(prepare_model(model))
    assert [node.op_type for node in prepare_model(model).graph.node] == ["Cast", "Mul", "MatMul"]


CHAINS = {
    "normalised": "n = ReduceL2<axes=[0], keepdims=1>(v) d = Div(v, n) w = Mul(d, g)",
    "filled": "w = ConstantOfShape<value=float[1] {0.5}>(shape)",
    "split": "a, b = Split<axis=0, num_outputs=2>(vv) w = Add(a, b)",
    "shared": "t = Transpose(v) w0 = Transpose(t) h = MatMul(x0, w0) x = MatMul(h, t) w = Relu(t)",
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_weight_computed_of_constants_is_quantized(chain: str) -> None:
    rng = np.random.default_rng(0)
    weights = {"v": rng.standard_normal((5, 5)), "vv": rng.standard_normal((10, 5)), "g": rng.random((1, 5))}
    weights["shape"] = np.array([5, 5])
    start = "" if "(x0" in CHAINS[chain] else "x = Identity(x0)"
    text = f"{start} {CHAINS[chain]} m = MatMul(x, w) y = Add(m, x0)"
    model = build("float[batch,5] x0", "float[batch,5] y", text, weights, 18 if chain == "split" else 13)
    x = {"x0": rng.standard_normal((16, 5)).astype(np.float32)}
    result, notes = quantize_dynamic(model)
    assert len(notes.quantized) == text.count("MatMul") and not notes.float_nodes, notes.lines()
    assert sqnr_db(run(model, x), run(prepare_model(model), x)) > 120 and sqnr_db(run(model, x), run(result, x)) > 30


def test_random_values_are_no_constants() -> None:
    model = build("float[n,5] x", "float[n,5] y", "w = RandomNormal<shape=[5,5]>() y = MatMul(x, w)", {})
    assert [node.op_type for node in prepare_model(model).graph.node] == ["RandomNormal", "MatMul"]


def test_another_name_of_a_scalar_keeps_its_rank() -> None:
    text = "half = Identity(scale) h = Mul(x, half) y = MatMul(h, w)"
    model = build("float[n,5] x", "float[n,5] y", text, {"scale": np.float32(0.5), "w": np.eye(5)})
    assert {item.name: len(item.dims) for item in prepare_model(model).graph.initializer}["half"] == 0
