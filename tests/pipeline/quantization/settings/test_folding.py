import numpy as np
import onnx
import pytest

from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.settings import smooth
from pipeline.quantization.settings.groups import find_groups, matrices
from pipeline.quantization.settings.smooth import SmoothingPlan, apply_plans, find_folds
from tests.pipeline.quantization.search.outlier_nets import all_ranges
from tests.pipeline.quantization.small_nets import build, maker, of_type, run, values_of

WIDTH, HEADS = 12, 3
INPUT = f"float[batch,sequence,{WIDTH}] x"
OUTPUT = f"float[batch,sequence,{WIDTH}] y"
# Attention with three heads; what stands between the product and `a` is what the cases change.
VALUES = """
    v0 = MatMul(x, wv)
    v1 = Add(v0, bv)
    v2 = Reshape(v1, heads)
    v3 = Transpose<perm=[0,2,1,3]>(v2)
    k1 = Reshape(x, heads)
    q3 = Transpose<perm=[0,2,1,3]>(k1)
    k3 = Transpose<perm=[0,2,3,1]>(k1)
    s = MatMul(q3, k3)
    p = Softmax<axis=-1>(s)
    o = MatMul(p, v3)
    o1 = Transpose<perm=[0,2,1,3]>(o)
    a = Reshape(o1, whole)
"""


def attention(text: str = VALUES + "y = MatMul(a, wo)", inputs: str = INPUT, output: str = OUTPUT) -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    weights: dict[str, object] = {name: rng.normal(size=(WIDTH, WIDTH)) for name in ("wv", "wo")}
    weights |= {"bv": rng.normal(size=WIDTH), "heads": np.array([0, 0, HEADS, 4]), "whole": np.array([0, 0, WIDTH])}
    weights |= {"free": np.array([0, 0, -1]), "mix": rng.normal(size=(15, WIDTH))}
    return prepare_model(build(inputs, output, text, weights))


def inputs() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(5).normal(size=(2, 5, WIDTH)).astype(np.float32)}


def smoothed(model: onnx.ModelProto, activation: str = "a") -> tuple[onnx.ModelProto, SmoothingPlan]:
    """The model with factors for the channels of one group's activation, and weights that make up for them."""
    group = next(group for group in find_groups(model, find_sites(model)[0]) if group.activation == activation)
    factors = np.linspace(0.5, 8, WIDTH, dtype=np.float32)
    weights = {node: weight * factors[:, None] for node, weight in matrices(model, [group]).items()}
    plan = SmoothingPlan(group, 0.7, 1.0, factors, weights, -3.0, 3.0)
    return apply_plans(model, [plan], all_ranges(model, inputs()))[0], plan


def test_factors_of_an_attention_result_go_into_the_value_projection() -> None:
    model = attention()
    changed_model, plan = smoothed(model)
    assert len(changed_model.graph.node) == len(model.graph.node)
    a_before, a_after = (values_of(graph, inputs(), ("a",))["a"] for graph in (model, changed_model))
    np.testing.assert_allclose(a_after, a_before / plan.factors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run(changed_model, inputs()), run(model, inputs()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["h = MatMul(x, wv)", "h = Gemm<transB=1>(x2, wv, bv)"])
def test_factors_go_through_a_relu(head: str) -> None:
    gemm = "Gemm" in head
    text = ("x2 = Reshape(x, flat)\n" if gemm else "") + head + "\n a = Relu(h)\n y = MatMul(a, wo)"
    weights = {name: np.random.default_rng(3).normal(size=(WIDTH, WIDTH)) for name in ("wv", "wo")}
    weights |= {"bv": np.ones(WIDTH), "flat": np.array([-1, WIDTH])}
    model = prepare_model(build(INPUT, f"float[rows,{WIDTH}] y" if gemm else OUTPUT, text, weights))
    changed_model, _ = smoothed(model)
    assert not of_type(changed_model, "Mul")
    np.testing.assert_allclose(run(changed_model, inputs()), run(model, inputs()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "text",
    [
        VALUES + "y1 = MatMul(a, wo)\n y = Add(y1, a)",  # somebody else reads the result
        VALUES + "y1 = MatMul(a, wo)\n y = Add(y1, v1)",  # ... or the values
        VALUES.replace("v1 = Add(v0, bv)", "v1 = Sigmoid(v0)") + "y = MatMul(a, wo)",
        VALUES.replace("v1 = Add(v0, bv)", "v1 = Add(v0, x)") + "y = MatMul(a, wo)",
        VALUES.replace("o = MatMul(p, v3)", "vt = Transpose<perm=[0,1,3,2]>(v3)\n o = MatMul(v3, vt)").replace(
            "a = Reshape(o1, whole)", "a0 = Reshape(o1, free)\n a = MatMul(a0, mix)"
        )
        + "y = MatMul(a, wo)",  # channels are mixed
        VALUES.replace("o1 = Transpose<perm=[0,2,1,3]>(o)", "o1 = Transpose<perm=[0,2,3,1]>(o)")
        + "y = MatMul(a, wo)",  # another order of channels in memory
    ],
)
def test_folding_stops_at_operators_that_mix_channels(text: str) -> None:
    model = attention(text, f"float[batch,5,{WIDTH}] x", f"float[batch,5,{WIDTH}] y")
    group = next(group for group in find_groups(model, find_sites(model)[0]) if group.activation == "a")
    folds = find_folds(model, [group]).get(group.activation)
    changed_model, _ = smoothed(model)
    np.testing.assert_allclose(run(changed_model, inputs()), run(model, inputs()), rtol=1e-3, atol=1e-3)
    # The projection right in front of `a` may take the factors; the values' own may not.
    assert folds is None or all(node != maker(model, "v0").name for node, _, _ in folds.constants)


def test_a_model_is_analysed_once_for_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked_numbers = attention(), []
    inner_shapes = smooth.static_shapes
    monkeypatch.setattr(smooth, "static_shapes", lambda graph: looked_numbers.append(1) or inner_shapes(graph))
    groups = find_groups(model, find_sites(model)[0])
    weights = matrices(model, groups)
    factors = np.linspace(0.5, 8, WIDTH, dtype=np.float32)
    plans = [
        SmoothingPlan(group, 0.7, 1.0, factors, {n: weights[n] * factors[:, None] for n in group.nodes}, -3.0, 3.0)
        for group in groups
    ]
    changed_model, _ = apply_plans(model, plans, all_ranges(model, inputs()))
    assert len(plans) == 2 and len(looked_numbers) == 1
    np.testing.assert_allclose(run(changed_model, inputs()), run(model, inputs()), rtol=1e-4, atol=1e-4)
