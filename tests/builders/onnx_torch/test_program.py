import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from builders.backends.onnxruntime import OrtSession
from builders.onnx_ops.torch_arrays import to_tensor
from builders.onnx_torch import to_guarded_program, to_program
from enginesmith.core.errors import ModelError
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs
from tests.builders.onnx_torch.test_module import branched

ONE_TO_16 = ShapeProfile((("x", (1, 3), (4, 3), (16, 3)),))
# x [n, 3], t [m] -> reshapes, expansions, ranges, pads and slices whose sizes are computed from those of x and t.
SHAPES = """
    <ir_version: 10, opset_import: ["": 20]>
    g (float[n, 3] x, int64[m] t) => (float[a, b] y, float[c, d] z, int64[m] r, float[n, e] p)
    <int64 zero = {0}, int64 one = {1}, int64[1] minus = {-1}, int64[1] two = {2}, int64[1] axis = {0},
     int64[1] three = {3}, int64[1] first = {0}, int64[2] front = {0, 1}, float[1] k = {7.0}, int64[1] row = {1}>
    {
        s = Shape (x)
        n = Gather (s, zero)
        n1 = Unsqueeze (n, axis)
        m = Shape (t)
        nm = Concat <axis = 0> (n1, m)
        flat = Concat <axis = 0> (n1, minus)
        sum = Reshape (x, flat)
        wide = Unsqueeze (x, row)
        shape3 = Concat <axis = 0> (n1, m, three)
        spread = Expand (wide, shape3)
        both = Mul (n1, m)
        final = Concat <axis = 0> (both, three)
        y = Reshape (spread, final)
        doubled = Mul (nm, two)
        half = Div (doubled, two)
        zeros = ConstantOfShape (half)
        z = Add (zeros, k)
        ms = Squeeze (m)
        ramp = Range (zero, ms, one)
        r = Add (ramp, t)
        more = Slice (s, row, two)
        pads = Concat <axis = 0> (front, first, more)
        p = Pad (sum, pads)
    }
"""


def request(inputs, outputs, profiles):
    return graphs.request("cpu", inputs=inputs, outputs=outputs, profiles=profiles)


HALVES = """
    <ir_version: 10, opset_import: ["": 20]>
    g (float[n, 3] x) => (float[n, 3] y) <int64[3] pairs = {-1, 4, 3}, int64[2] rows = {-1, 3}>
    { a = Reshape (x, pairs)  b = Neg (a)  y = Reshape (b, rows) }
"""


@pytest.mark.slow
def test_a_dim_of_multiples_is_one_in_torch_too(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(HALVES), path)
    inputs, outputs = (TensorSpec("x", "float32", ("n", 3)),), (TensorSpec("y", "float32", ("n", 3)),)
    ranges = (("x", (8, 3), (8, 3), (28, 3)),)
    with pytest.raises(ModelError, match=r"shape '\[-1, 4, 3\]' is invalid"):
        to_program(path, request(inputs, outputs, (ShapeProfile(ranges),)))
    program = to_program(path, request(inputs, outputs, (ShapeProfile(ranges, (("x", (4, 1)),)),)))
    for rows in (8, 12, 28):
        x = torch.ones(rows, 3)
        assert torch.equal(program.module()(x)[0], -x)


def test_sizes_computed_from_sizes_stay_dynamic(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(SHAPES), path)
    inputs = (TensorSpec("x", "float32", ("n", 3)), TensorSpec("t", "int64", ("m",)))
    outputs = tuple(TensorSpec(name, "float32", ()) for name in "yzrp")
    both_profile = ShapeProfile((("x", (1, 3), (4, 3), (16, 3)), ("t", (2,), (3,), (9,))))
    program = to_program(path, request(inputs, outputs, (both_profile,)))
    module, reference = program.module(), OrtSession(path, optimized=False)
    for n, m in ((1, 2), (5, 9), (16, 3)):
        arrays = {"x": np.random.default_rng(n).random((n, 3), dtype="f"), "t": np.arange(m)}
        expected = reference.run(arrays)
        for tensor, name in zip(module(*map(to_tensor, arrays.values())), "yzrp", strict=True):
            np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=f"{name} at {n}, {m}")


def test_a_request_orders_inputs_and_outputs_and_its_profiles_span_the_sizes(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (float[n, 3] a, float[n, 3] b) => (float[n, 3] d, float[n, 3] s) { d = Sub (a, b)  s = Add (a, b) }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    low = ShapeProfile((("a", (1, 3), (1, 3), (1, 3)), ("b", (1, 3), (1, 3), (1, 3))))
    high = ShapeProfile((("a", (2, 3), (8, 3), (8, 3)), ("b", (2, 3), (8, 3), (8, 3))))
    swapped_specs = tuple(TensorSpec(name, "float32", ("n", 3)) for name in "ba")
    outputs = tuple(TensorSpec(name, "float32", ("n", 3)) for name in "sd")
    program = to_program(tmp_path / "model.onnx", request(swapped_specs, outputs, (low, high)))
    (limits,) = program.range_constraints.values()
    assert (limits.lower, limits.upper) == (1, 8)
    s, d = program.module()(torch.ones(1, 3), torch.full((1, 3), 5.0))  # b, a
    assert (s[0, 0].item(), d[0, 0].item()) == (6, 4)


def test_a_dim_that_the_graph_fixes_is_an_error_that_names_it(tmp_path):
    weights = [("rows", np.array([4, 3]))]
    nodes = [onnx.helper.make_node("Reshape", ["x", "rows"], ["y"], name="fixed")]
    path = graphs.save(
        tmp_path / "m.onnx",
        nodes,
        [("x", TensorProto.FLOAT, ("batch", 3))],
        [("y", TensorProto.FLOAT, (4, 3))],
        weights,
    )
    inputs, outputs = (TensorSpec("x", "float32", ("batch", 3)),), (TensorSpec("y", "float32", (4, 3)),)
    with pytest.raises(ModelError, match=r"fixed|is batch"):
        to_program(path, request(inputs, outputs, (ONE_TO_16,)))


def test_a_dim_without_a_range_and_other_names_are_refused(tmp_path):
    path = graphs.mlp(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"dim 'batch' has no range; add dims.batch.max"):
        to_program(path, graphs.request("cpu", profiles=()))
    with pytest.raises(ModelError, match=r"the model has the inputs \['image'\], the request \['x'\]"):
        to_program(
            path, graphs.request("cpu", inputs=(TensorSpec("x", "float32", ("batch", 8)),), profiles=(ONE_TO_16,))
        )


@pytest.mark.parametrize("condition", [True, None])
def test_a_constant_branch_is_included_and_a_data_dependent_one_is_refused(tmp_path, condition):
    path = branched(tmp_path / "model.onnx", condition)
    asked = request((TensorSpec("x", "float32", ("n", 3)),), (TensorSpec("y", "float32", ("n", 3)),), (ONE_TO_16,))
    if condition is None:
        with pytest.raises(ModelError, match=r"node 'choice' \(If\): its branch depends on data"):
            to_program(path, asked)
    else:
        (actual,) = to_program(path, asked).module()(torch.ones(2, 3))
        assert actual[0].tolist() == [1, 2, 3]


def test_a_guarded_program_reports_indices_and_a_plain_one_does_not(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (int64[n, 3] x, float[n, 3] t) => (float[n, 3] y)
        <int64 last = {-1}, int64[1] end = {1}, float[4] table = {0.0, 1.0, 2.0, 3.0}>
        { rows = Gather (table, x)  column = Gather <axis = 1> (t, last)  line = Unsqueeze (column, end)
          y = Add (rows, line) }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    inputs = (TensorSpec("x", "int64", ("n", 3)), TensorSpec("t", "float32", ("n", 3)))
    both_profile = ShapeProfile((("x", (1, 3), (4, 3), (16, 3)), ("t", (1, 3), (4, 3), (16, 3))))
    build_request = request(inputs, (TensorSpec("y", "float32", ("n", 3)),), (both_profile,))
    program, faults = to_guarded_program(tmp_path / "model.onnx", build_request)
    assert faults == ("an index is out of range at node 'rows'",)  # the index of 'column' is a constant
    arguments = torch.tensor([[0, 3, -4]]), torch.tensor([[0.0, 0.0, 9.0]])
    y, inner_value = program.module()(*arguments)
    assert y.tolist() == [[9, 12, 9]] and inner_value.tolist() == [True]
    assert program.module()(arguments[0] + 1, arguments[1])[1].tolist() == [False]
    (plain_program,) = to_program(tmp_path / "model.onnx", build_request).module()(*arguments)
    assert plain_program.tolist() == y.tolist()


def test_a_guarded_program_reports_divisions_by_zero_except_by_constants(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (int64[n] x, int64[n] by) => (int64[n] y, int64[n] rest)
        <int64 two = {2}, int64 less = {-1}>
        { half = Div (x, two)  turned = Div (half, less)  y = Div (turned, by)  rest = Mod (x, by) }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    inputs, outputs = (
        tuple(TensorSpec(name, "int64", ("n",)) for name in names) for names in (("x", "by"), ("y", "rest"))
    )
    build_request = request(inputs, outputs, (ShapeProfile((("x", (1,), (4,), (16,)), ("by", (1,), (4,), (16,)))),))
    program, faults = to_guarded_program(tmp_path / "model.onnx", build_request)
    # By -1, which may stand beside the lowest number, what is harmless is done as well, and told of for nothing.
    assert [fault.split(" at ")[1] for fault in faults] == ["node 'turned'", "node 'y'", "node 'rest'"]
    assert all(fault.startswith("an integer is divided by zero") for fault in faults)
    lowest_min = torch.iinfo(torch.int64).min
    y, rest, fine = program.module()(torch.tensor([7, lowest_min]), torch.tensor([-2, -1]))
    assert (y.tolist(), rest.tolist()) == ([1, lowest_min // 2], [-1, 0]) and fine.all()
    assert program.module()(torch.tensor([7, 7]), torch.tensor([1, 0]))[2].tolist() == [True, False, False]


@pytest.mark.parametrize(("length", "fine"), [(3, True), (4, False)])
def test_a_guarded_program_reports_too_long_sequences(tmp_path, length, fine):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (float[n, 3] x, int64[n] lengths) => (float[n, 3] y)
        { y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, lengths) }
    """)
    onnx.save(model, tmp_path / "model.onnx")
    inputs = (TensorSpec("x", "float32", ("n", 3)), TensorSpec("lengths", "int64", ("n",)))
    both_profile = ShapeProfile((("x", (1, 3), (4, 3), (16, 3)), ("lengths", (1,), (4,), (16,))))
    program, _ = to_guarded_program(
        tmp_path / "model.onnx", request(inputs, (TensorSpec("y", "float32", ("n", 3)),), (both_profile,))
    )
    y, inner_value = program.module()(torch.arange(6.0).reshape(2, 3), torch.tensor([2, length]))
    assert inner_value.tolist() == [fine] and y[0].tolist() == [1, 0, 2]
