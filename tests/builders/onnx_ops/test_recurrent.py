"""LSTM, GRU and RNN in both libraries against onnxruntime: every attribute and input that is taken, and the refused."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from builders.backends.onnxruntime import OrtSession
from builders.onnx_ops.graph import BoundGraph, known_operators
from builders.onnx_ops.reading import read
from builders.onnx_ops.table import Lookups
from builders.onnx_ops.torch_arrays import to_tensor
from builders.onnx_torch import to_program
from enginesmith.core.errors import ModelError
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs
from tests.builders.onnx_torch import to_module

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, WIDTH, HIDDEN = 6, 3, 5, 4


def layer(path, kind, inputs=(), time="t", **attributes):
    """x [time, n, 5] -> one layer of 4 hidden units -> y, h (and c). inputs: optional ones that are there."""
    rng, number = np.random.default_rng(7), 2 if attributes.get("direction") == "bidirectional" else 1
    rows, states = GATES[kind] * HIDDEN, ["h", "c"] if kind == "LSTM" else ["h"]
    sizes = {"w": (number, rows, WIDTH), "r": (number, rows, HIDDEN), "b": (number, 2 * rows)}
    weights = [
        (name, rng.standard_normal(size).astype("f")) for name, size in sizes.items() if name != "b" or "b" in inputs
    ]
    names = [name if name in inputs else "" for name in ("b", "lengths", "h0", "c0")[: 4 if kind == "LSTM" else 3]]
    x = ("x", 1, ("n", time, WIDTH) if attributes.get("layout") else (time, "n", WIDTH))
    start = ("n", number, HIDDEN) if attributes.get("layout") else (number, "n", HIDDEN)
    items = [x, *(("lengths", 6, ("n",)) if name == "lengths" else (name, 1, start) for name in inputs if name != "b")]
    node = helper.make_node(
        kind, ["x", "w", "r", *names], ["y", *states], name="layer", hidden_size=HIDDEN, **attributes
    )
    outputs = [("y", 1, [None] * 4), *((name, 1, [None] * 3) for name in states)]
    return graphs.save(path, [node], items, outputs, weights)


def arrays(path, time=STEPS, batch=BATCH):
    rng = np.random.default_rng(3)
    values = {}
    for value in onnx.load(path).graph.input:
        dims = [dim.dim_value or {"t": time, "n": batch}[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        values[value.name] = rng.standard_normal(dims).astype("f")
    if "lengths" in values:
        values["lengths"] = np.array([time, 1, time // 2][:batch], np.int32)
    return values


def with_torch(path, inputs):
    return [tensor.numpy() for tensor in to_module(path)(*map(to_tensor, inputs.values()))]


def with_jax(path, inputs):
    jax = pytest.importorskip("jax")
    from builders.backends.xla.jax_arrays import JAX

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        program = BoundGraph(read(path, known_operators(JAX)), JAX, folded=0)
        return [np.asarray(output) for output in program.run(inputs, Lookups(JAX, clamped=False))]


CASES = [
    ("LSTM", (), {}),
    ("LSTM", ("b", "h0", "c0"), {"direction": "bidirectional"}),
    ("LSTM", ("b", "lengths", "h0", "c0"), {"direction": "bidirectional"}),
    ("LSTM", ("b", "lengths"), {"direction": "reverse", "activations": ["Sigmoid", "Softsign", "Relu"]}),
    ("GRU", ("b", "h0"), {}),
    ("GRU", ("b",), {"linear_before_reset": 1, "direction": "bidirectional"}),
    ("GRU", ("b", "lengths", "h0"), {"direction": "reverse", "activations": ["Sigmoid", "Softplus"]}),
    ("RNN", ("b", "h0"), {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
    ("RNN", ("lengths",), {}),
]


@pytest.mark.parametrize("run", [with_torch, with_jax])
@pytest.mark.parametrize(("kind", "inputs", "attributes"), CASES)
def test_a_layer_gives_the_results_of_onnxruntime(tmp_path, run, kind, inputs, attributes):
    path = layer(tmp_path / "model.onnx", kind, inputs, **attributes)
    actual = arrays(path)
    expected = OrtSession(path, optimized=False).run(actual)
    for output, (name, array) in zip(run(path, actual), expected.items(), strict=True):
        assert (output.shape, output.dtype) == (array.shape, array.dtype), name
        np.testing.assert_allclose(output, array, atol=2e-6, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("run", [with_torch, with_jax])
@pytest.mark.parametrize("kind", GATES)
def test_layout_1_is_layout_0_with_the_batch_first(tmp_path, run, kind):
    """onnxruntime has no kernels for it."""
    inputs = ("b", "h0")
    usual_layer = layer(tmp_path / "usual.onnx", kind, inputs, direction="bidirectional")
    actual = arrays(usual_layer)
    y, *end_result = run(usual_layer, actual)
    turned_result = run(
        layer(tmp_path / "turned.onnx", kind, inputs, direction="bidirectional", layout=1),
        {name: np.ascontiguousarray(array.swapaxes(0, 1)) for name, array in actual.items()},
    )
    np.testing.assert_allclose(turned_result[0], y.transpose(2, 0, 1, 3), atol=2e-6)
    for left_value, right_value in zip(turned_result[1:], end_result, strict=True):
        np.testing.assert_allclose(left_value, right_value.swapaxes(0, 1), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "inputs"), [("LSTM", ("b", "lengths", "h0", "c0")), ("GRU", ("b",))])
def test_a_program_loops_over_the_number_of_steps(tmp_path, kind, inputs):
    path = layer(tmp_path / "model.onnx", kind, inputs, direction="bidirectional")
    names = [value.name for value in onnx.load(path).graph.input]
    sizes = {"x": ("t", "n", WIDTH), "lengths": ("n",), "h0": (2, "n", HIDDEN), "c0": (2, "n", HIDDEN)}
    specs = [TensorSpec(name, "int32" if name == "lengths" else "float32", sizes[name]) for name in names]
    end_fields = {low: {"t": low, "n": low} for low in (1, 4, 16)}
    profile = ShapeProfile(tuple((spec.name, *(spec.at(size) for size in end_fields.values())) for spec in specs))
    outputs = [TensorSpec("y", "float32", ("t", 2, "n", HIDDEN)), TensorSpec("h", "float32", (2, "n", HIDDEN))]
    outputs += [TensorSpec("c", "float32", (2, "n", HIDDEN))] if kind == "LSTM" else []
    request = graphs.request("cpu", inputs=tuple(specs), outputs=tuple(outputs), profiles=(profile,))
    module = to_program(path, request).module()
    for time, batch in ((1, 1), (6, 3), (13, 2)):
        actual = arrays(path, time, batch)
        expected = OrtSession(path, optimized=False).run(actual)
        for output, array in zip(module(*map(to_tensor, actual.values())), expected.values(), strict=True):
            np.testing.assert_allclose(output.numpy(), array, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "attributes", "words"),
    [
        ("LSTM", {"clip": 1.0}, "clip is not supported"),
        ("LSTM", {"input_forget": 1}, "input_forget is not supported"),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"]}, "'HardSigmoid' is not one of"),
        ("RNN", {"activation_alpha": [1.0]}, "attribute 'activation_alpha' is not known"),
        ("RNN", {"direction": "sideways"}, "'sideways' is not one of ONNX's"),
    ],
)
def test_layers_with_other_results_are_refused(tmp_path, kind, attributes, words):
    path = layer(tmp_path / "model.onnx", kind, **attributes)
    with pytest.raises(ModelError, match=rf"node 'layer' \({kind}\).*{words}"):
        to_module(path)(torch.zeros(2, 1, WIDTH))
