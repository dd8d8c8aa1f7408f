import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.backends.onnxruntime import OrtSession
from enginesmith.core.codec import decode, encode
from enginesmith.core.types import TensorSpec
from validation.comparison.sessions import expected_checks
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import budgets, default_budget
from validation.limits.noise_floor import DoubleSession, Noise, OutputFloor, noise_floor


def net(folder: Path, text: str, inputs: str, outputs: str, **weights: np.ndarray) -> Path:
    """A model of opset 20 out of ONNX's text form."""
    items = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> net ({inputs}) => ({outputs}) {{ {text} }}'
    )
    model.graph.initializer.extend(items)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CONVOLUTIONS = {
    "plain": ("Conv<kernel_shape=[3,3]>(x, w, b)", (4, 6, 3, 3)),
    "strided": ("Conv<kernel_shape=[3,3], strides=[2,1], pads=[1,0,2,1]>(x, w, b)", (4, 6, 3, 3)),
    "dilated": ("Conv<kernel_shape=[3,2], dilations=[2,3]>(x, w, b)", (4, 6, 3, 2)),
    "grouped": ("Conv<kernel_shape=[3,3], group=3, pads=[1,1,1,1]>(x, w, b)", (6, 2, 3, 3)),
    "same": ('Conv<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER">(x, w, b)', (4, 6, 3, 3)),
    "same lower": ('Conv<kernel_shape=[2,2], auto_pad="SAME_LOWER">(x, w, b)', (4, 6, 2, 2)),
    "pool rounding up": ("MaxPool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x)", (4, 6, 3, 3)),
    "pool": ("MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)", (4, 6, 3, 3)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_equal_onnxruntimes_except_for_rounding(tmp_path: Path, kind: str) -> None:
    text, shape = CONVOLUTIONS[kind]
    path = net(tmp_path, f"y = {text}", "float[n,6,9,8] x", "float[n,c,h,v] y", w=normal(*shape), b=normal(shape[0]))
    x = normal(2, 6, 9, 8, seed=1)
    exact_output, output = DoubleSession(path).run({"x": x})["y"], OrtSession(path, optimized=False).run({"x": x})["y"]
    assert exact_output.dtype == np.float64 and exact_output.shape == output.shape
    np.testing.assert_allclose(output, exact_output, rtol=1e-4, atol=1e-5)


def test_constants_casts_and_normalizations_are_widened(tmp_path: Path) -> None:
    text = """
        k = Constant<value_float=0.1>()
        i = Cast<to=7>(x)
        f = Cast<to=1>(i)
        s = Sub(x, f)
        t = Mul(s, k)
        y = LayerNormalization(t, w, b)
    """
    path = net(tmp_path, text, "float[n,16] x", "float[n,16] y", w=normal(16), b=normal(16))
    x = normal(3, 16, seed=1)
    part = x.astype(np.float64) - x.astype(np.int64)
    part = part * np.float64(np.float32(0.1))
    spread = np.sqrt(part.var(axis=1, keepdims=True) + np.float64(np.float32(1e-5)))
    expected = (part - part.mean(axis=1, keepdims=True)) / spread * normal(16) + normal(16)
    np.testing.assert_allclose(DoubleSession(path).run({"x": x})["y"], expected, rtol=1e-10)


def test_erf_and_large_weights_are_computed_in_float64(tmp_path: Path) -> None:
    path = net(tmp_path, "h = MatMul(x, w) y = Erf(h)", "float[n,32] x", "float[n,32] y", w=normal(32, 32))
    x = normal(3, 32)
    expected = [math.erf(value) for value in (x.astype(np.float64) @ normal(32, 32).astype(np.float64)).ravel()]
    np.testing.assert_allclose(DoubleSession(path).run({"x": x})["y"].ravel(), expected, rtol=1e-13)


def test_a_floor_grows_with_the_sums_and_a_missing_floor_has_a_reason(tmp_path: Path) -> None:
    path = net(tmp_path, "y = MatMul(x, w)", "float[n,512] x", "float[n,8] y", w=normal(512, 8))
    session = OrtSession(path, optimized=False)
    result = noise_floor(DoubleSession(path).run, session.run, {"golden": [{"x": normal(4, 512)}]})
    floor = result.floors["y"]["golden"]
    assert floor is not None and 125 < floor.sqnr_db < 150 and floor.max_rel < 1e-5
    assert "edge" not in result.floors["y"] and "z" not in result.floors
    assert decode(encode(result), Noise) == result

    def cannot(inputs: object) -> dict[str, np.ndarray]:
        raise ValueError("no such operator")

    assert noise_floor(cannot, session.run, {"golden": [{"x": normal(4, 512)}]}) == Noise(reason="no such operator")


def test_a_model_with_random_operators_has_no_floor(tmp_path: Path) -> None:
    path = net(tmp_path, "r = RandomNormalLike(x) y = Add(x, r)", "float[2] x", "float[2] y")
    with pytest.raises(ValueError, match="RandomNormalLike gives random results"):
        DoubleSession(path)


def test_an_output_without_any_noise_gives_no_floor(tmp_path: Path) -> None:
    path = net(tmp_path, "y = Relu(x)", "float[n,4] x", "float[n,4] y")
    session = OrtSession(path, optimized=False)
    assert noise_floor(DoubleSession(path).run, session.run, {"golden": [{"x": normal(2, 4)}]}).floors == {}


NOISE = Noise({"y": {"golden": OutputFloor(135.0, 1e-6)}})


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 105.0), ("fp16", 44.7), ("bf16", 26.7), ("int8", 15.0)])
def test_limits_are_a_documented_distance_below_the_floor(precision, limit) -> None:
    actual = budgets("engine", precision, NOISE)
    assert actual.of("y", "golden").sqnr_db == pytest.approx(limit, abs=0.05)
    assert actual.of("y", "edge") == actual.of("z", "golden") == default_budget("engine", precision)
    assert budgets("engine", precision, None).measured == {}


def test_limits_of_the_spec_replace_the_floor_too() -> None:
    assert budgets("engine", "fp32", NOISE).override({"sqnr_db": 50}).of("y", "golden").sqnr_db == 50
    lifted_budget = budgets("engine", "fp32", NOISE).override({"sqnr_db": None})
    assert lifted_budget.of("y", "golden").sqnr_db is None and not lifted_budget.notes
    assert budgets("engine", "fp32", NOISE).override({"cosine": 0.9}).of("y", "golden").cosine == 0.9


@pytest.mark.parametrize(("bits", "passes"), [(23, True), (18, True), (14, False), (10, False)])
def test_an_fp32_engine_that_computes_with_fewer_bits_fails(tmp_path: Path, bits: int, passes: bool) -> None:
    """TF32 rounds to 10 bits; 14 bits (84 dB) would pass the documented limit of 80."""
    x, w = normal(8, 256), normal(256, 8)
    path = net(tmp_path, "y = MatMul(x, w)", "float[n,256] x", "float[n,8] y", w=w)
    noise = noise_floor(DoubleSession(path).run, OrtSession(path, optimized=False).run, {"golden": [{"x": x}]})
    golden = GoldenSet((Case("golden 0", "golden", {"x": x}, {"y": x @ w}),), noise=noise)

    class Rounding:
        inputs = (TensorSpec("x", "float32", ("n", 256)),)
        outputs = (TensorSpec("y", "float32", ("n", 8)),)

        def run(self, inputs):
            return {"y": rounded(inputs["x"], bits) @ rounded(w, bits)}

    checks = expected_checks("engine", Rounding(), golden, budgets("engine", "fp32", golden.noise))
    check = next(item for item in checks if item.name == "sqnr_db")
    assert check.passed is passes
    assert "float32's own noise is" in check.note and check.limit > 95


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent).astype(np.float32)


def test_the_floor_is_part_of_the_golden_set(tmp_path: Path) -> None:
    x = normal(2, 4)
    GoldenSet((Case("golden 0", "golden", {"x": x}, {"y": x}),), noise=NOISE).save(tmp_path / "golden")
    assert GoldenSet.load(tmp_path / "golden").noise == NOISE
    GoldenSet((Case("golden 0", "golden", {"x": x}, {"y": x}),)).save(tmp_path / "plain")
    assert GoldenSet.load(tmp_path / "plain").noise is None
    assert not math.isclose(len((tmp_path / "golden").read_bytes()), len((tmp_path / "plain").read_bytes()))


@pytest.mark.parametrize(
    ("opset", "body", "message"),
    [
        (17, "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)", "RuntimeError"),
        (20, "y = com.microsoft.Gelu(x)", "NotImplementedError"),
    ],
)
def test_an_operator_that_the_evaluator_lacks_is_a_value_error(tmp_path, opset, body, message):
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> net (float[4] x) => (float[4] y)'
        f" <float s = {{0.1}}, int8 z = {{0}}> {{ {body} }}"
    )
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=message):
        DoubleSession(tmp_path / "model.onnx")
