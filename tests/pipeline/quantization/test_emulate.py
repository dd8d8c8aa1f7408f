import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto

from pipeline.quantization.graph import element_types, tidy
from pipeline.quantization.schemes.cast import cast_float, emulate, needs_emulation
from tests.pipeline.quantization.small_nets import attention_net, build, conv_net, images, run, sentences

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
CHAIN = build("float[N] x", "float[N] y", "a = Mul(x, k) b = Add(a, x) y = Mul(b, b)", {"k": np.float32(0.3)})
EMULATED = {name: emulate(cast_float(CHAIN, name)[0]) for name in DTYPES}


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(-1e4, 1e4, width=32)), st.sampled_from(sorted(DTYPES))
)
def test_every_tensor_is_rounded_once_to_nearest_even(x: np.ndarray, precision: str) -> None:
    def rounded(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[precision]).astype(np.float32)

    half, k = rounded(x), rounded(np.float32([0.3]))
    with np.errstate(over="ignore"):
        b = rounded(rounded(half * k) + half)
        expected = rounded(b * b)
    np.testing.assert_array_equal(run(EMULATED[precision], {"x": x}, optimized=False), expected)


def test_fp16_overflow_shows_although_onnxruntime_hides_it() -> None:
    model = build("float[N] x", "float[N] y", "a = Mul(x, x) y = Sqrt(a)", {})
    half, x = cast_float(model, "fp16")[0], {"x": np.float32([1000])}
    assert np.isposinf(run(emulate(half), x, optimized=False)).all()
    assert run(half, x) == 1000  # the day this fails, onnxruntime computes fp16 for real


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("make", "data"), [(conv_net, images), (attention_net, sentences)])
def test_nothing_but_the_casts_is_16_bit(make: object, data: object, precision: str) -> None:
    result = emulate(cast_float(make(), precision)[0])
    types = element_types(result)
    for node in result.graph.node:
        if node.op_type != "Cast":
            assert {TensorProto.FLOAT16, TensorProto.BFLOAT16}.isdisjoint(types[name] for name in node.output)
    assert run(result, data(), optimized=False).dtype == np.float32


def test_16_bit_outputs_become_fp32_and_inputs_still_take_the_data_that_there_is() -> None:
    half, kept = (cast_float(conv_net(), "fp16", keep_io=keep_io)[0] for keep_io in (False, True))
    found = run(emulate(half), {name: value.astype(np.float16) for name, value in images().items()}, optimized=False)
    assert found.dtype == np.float32
    assert np.abs(found - run(emulate(kept), images(), optimized=False)).max() < 2e-3 * np.abs(found).max()


def test_only_16_bit_floats_and_constant_nodes_need_it() -> None:
    plain = build("float[N] x", "float[N] y", "y = Mul(x, k)", {"k": np.float32(0.3)})
    lifted = build("float[N] x", "float[N] y", "k = Constant <value_float = 0.3> () y = Mul(x, k)", {})
    within = build("float[N] x", "float[N] y", "h = Cast <to = 10> (x) y = Cast <to = 1> (h)", {})
    assert not needs_emulation(plain)
    assert all(needs_emulation(model) for model in (lifted, within, cast_float(plain, "fp16")[0]))
    assert emulate(plain).graph.node == tidy(plain).graph.node
