"""The table of operators against the onnx package's node tests: an operator's definition by example."""

import sys
import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.backend.test.loader import load_model_tests

from enginesmith.core.errors import ModelError
from tests.builders import graphs

jax = pytest.importorskip("jax")

from builders.backends.xla.jax_arrays import JAX  # noqa: E402
from builders.onnx_ops.graph import BoundGraph, known_operators  # noqa: E402
from builders.onnx_ops.reading import read  # noqa: E402
from builders.onnx_ops.table import Lookups  # noqa: E402

# Given as onnxruntime gives it, where the reference takes the unrounded length; see onnx_torch/test_node_cases.py.
OTHERWISE = {"test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners"}


def read_graph(path):
    return read(path, known_operators(JAX))


def run(program, inputs):
    return program.run(inputs, Lookups(JAX, clamped=False))


@pytest.fixture(scope="session")
def cases():
    """Those whose inputs and outputs are tensors of numbers: name -> case. Making them takes seconds, and warns."""
    entries = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in load_model_tests(kind="node"):
            values = [*case.model.graph.input, *case.model.graph.output] if case.model and case.data_sets else []
            tensors = [value.type.tensor_type.elem_type for value in values if value.type.HasField("tensor_type")]
            if values and len(tensors) == len(values) and _of_numbers(case):
                entries[case.name] = case
    return entries


def _of_numbers(case):
    return not any(np.asarray(value).dtype.kind in "OSU" for part in case.data_sets[0] for value in part)


def first_of_each_operator(cases):
    """In opsets before and after the change of most operators' attributes to inputs."""
    seen_values = {}
    for name, case in cases.items():
        for node in case.model.graph.node:
            seen_values.setdefault((node.op_type, case.model.opset_import[0].version >= 13), name)
    return {name: cases[name] for name in seen_values.values()}


def outcome(case, folder):
    """'passed' or 'refused'; raises when the numbers differ. The first input is traced, the others are constants."""
    path = folder / "model.onnx"
    path.write_bytes(case.model.SerializeToString())
    inputs, expected = ([np.asarray(value) for value in part] for part in case.data_sets[0])
    names = [value.name for value in case.model.graph.input]
    try:
        graph = read_graph(path)
    except ModelError:
        return "refused"
    for traced_names in (names[:1], []):
        fixed_arrays = {name: array for name, array in zip(names, inputs, strict=False) if name not in traced_names}
        bound_graph = replace(graph, constants={**graph.constants, **fixed_arrays}, inputs=tuple(traced_names))
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            try:
                program = BoundGraph(bound_graph, JAX, folded=sys.maxsize)
                actual = jax.jit(lambda *x, program=program: run(program, dict(zip(program.inputs, x, strict=True))))(
                    *inputs[: len(traced_names)]
                )
            except ModelError:
                continue
        for left_value, right_value in zip(actual, expected, strict=True):
            check(np.asarray(left_value), right_value, case)
        return "passed"
    return "refused"


def check(actual, expected, case):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    min_cosine = 2e-2 if expected.dtype.name == "bfloat16" else 1e-3
    if expected.dtype.kind == "V" or expected.dtype.name.startswith(("int", "uint", "bfloat", "float")):
        actual, expected = actual.astype("f8"), expected.astype("f8")
    np.testing.assert_allclose(actual, expected, rtol=max(case.rtol or 0, min_cosine), atol=max(case.atol or 0, 1e-6))


def tried(cases, folder):
    result, wrong_entries = [], {}
    for name, case in cases.items():
        try:
            result.append(outcome(case, folder))
        except AssertionError as error:
            wrong_entries[name] = str(error)
    assert wrong_entries.keys() <= OTHERWISE, wrong_entries
    return {kind: result.count(kind) for kind in ("passed", "refused")}


@pytest.mark.slow
def test_a_case_of_each_operator_is_right_or_refused(cases, tmp_path):
    assert tried(first_of_each_operator(cases), tmp_path)["passed"] > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_case_is_right_or_refused(cases, tmp_path):
    """Two minutes of CPU and more. onnx 1.23.2: 1404 passed, 234 refused, 2 otherwise."""
    counts = tried(cases, tmp_path)
    print(counts)
    assert counts["passed"] >= 1400


def test_constant_expressions_are_computed_once_and_large_constants_are_arguments(tmp_path):
    nodes = [
        helper.make_node("Mul", ["w", "two"], ["w2"], name="double"),
        helper.make_node("MatMul", ["x", "w2"], ["y"], name="product"),
    ]
    weights = [("w", np.ones((8, 16), "f")), ("two", np.array(2, "f"))]
    model = graphs.save(tmp_path / "m.onnx", nodes, [("x", 1, ("n", 8))], [("y", 1, ("n", 16))], weights)
    program = BoundGraph(read_graph(model), JAX, folded=sys.maxsize)
    assert list(program.constants) == ["w2"] and program.constants["w2"].max() == 2
    (outputs,) = run(program, {"x": np.ones((1, 8), "f"), "w2": np.ones((8, 16), "f")})
    assert outputs.max() == 8


def test_operators_with_only_a_function_body_are_inlined(tmp_path):
    node = helper.make_node("AffineGrid", ["x", "size"], ["y"], name="grid", align_corners=0)
    values = [("x", 1, (1, 2, 3))], [("y", 1, (1, 4, 3, 2))]
    graph = read_graph(graphs.save(tmp_path / "m.onnx", [node], *values, [("size", np.array([1, 1, 4, 3]))]))
    assert "AffineGrid" not in {node.op_type for node in graph.nodes} and len(graph.nodes) > 3


def test_an_index_out_of_bounds_gives_nan_and_fails_every_check(tmp_path):
    node = helper.make_node("Gather", ["table", "ids"], ["y"], name="rows")
    values = [("ids", 7, (3,))], [("y", 1, (3, 2))]
    graph = read_graph(graphs.save(tmp_path / "m.onnx", [node], *values, [("table", np.ones((4, 2), "f"))]))
    with jax.enable_x64(True):
        (outputs,) = run(BoundGraph(graph, JAX, folded=0), {"ids": jax.numpy.array([0, -1, 9])})
    assert np.isfinite(outputs[:2]).all() and np.isnan(outputs[2]).all()


@pytest.mark.parametrize("opset", range(13, 24))
def test_every_opset_of_the_supported_range_is_read(tmp_path, opset):
    """Axes move from attributes to inputs, Split gets num_outputs, ReduceMean takes axes as an input from 18 on."""
    axes = [] if opset < 18 else ["axes"]
    attributes = {"axes": [1]} if opset < 18 else {}
    nodes = [
        helper.make_node("ReduceMean", ["x", *axes], ["m"], name="mean", **attributes),
        helper.make_node("Squeeze", ["m", "axes"], ["s"], name="squeeze"),
        helper.make_node("Softmax", ["s"], ["p"], name="softmax"),
        helper.make_node("Split", ["p"], ["a", "b"], name="split", **({} if opset < 18 else {"num_outputs": 2})),
        helper.make_node("Sub", ["a", "b"], ["y"], name="sub"),
    ]
    path = graphs.save(tmp_path / "m.onnx", nodes, [("x", 1, (4, 3))], [("y", 1, (2,))], [("axes", np.array([1]))])
    model = onnx.load(path)
    model.opset_import[0].version = opset
    onnx.save(model, path)
    with jax.enable_x64(True):
        program = BoundGraph(read_graph(path), JAX, folded=0)
        (outputs,) = run(program, {"x": jax.numpy.arange(12, dtype="float32").reshape(4, 3)})
    means = np.arange(12).reshape(4, 3).mean(1)
    shares = np.exp(means - means.max()) / np.exp(means - means.max()).sum()
    np.testing.assert_allclose(outputs, shares[:2] - shares[2:], rtol=1e-5)
