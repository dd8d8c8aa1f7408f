import numpy as np
import onnx
import pytest
import torch

from builders.backends.onnxruntime import OrtSession
from builders.onnx_torch import to_program
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs
from tests.builders.onnx_torch import to_module


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", ["", "<axis = 2>", "<axis = -2>", "<axis = 0>"])
def test_before_opset_13_all_axes_from_the_given_one_are_joined(tmp_path, operator, axis):
    text = f"""<ir_version: 7, opset_import: ["": 11]> g (float[2, 3, 4] x) => (float[2, 3, 4] y)
               {{ y = {operator} {axis} (x) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f")
    expected = OrtSession(tmp_path / "model.onnx", optimized=False).run({"x": x})["y"]
    (actual,) = to_module(tmp_path / "model.onnx")(torch.from_numpy(x))
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-6)


def test_axes_attributes_before_opset_13_are_read_for_arrays_and_sizes(tmp_path):
    text = """<ir_version: 7, opset_import: ["": 11]> g (float[n, 3] x) => (float[n, 1, 3] y, float[m, 1] z)
              <int64 first = {0}, int64[1] one = {1}> {
                  y = Unsqueeze <axes = [1]> (x) s = Shape (x) n0 = Gather (s, first)
                  n1 = Unsqueeze <axes = [0]> (n0) n2 = Squeeze <axes = [0]> (n1) n3 = Unsqueeze <axes = [0]> (n2)
                  size = Concat <axis = 0> (n3, one) z = ConstantOfShape (size) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    y, z = to_module(tmp_path / "model.onnx")(torch.ones(4, 3))
    assert (tuple(y.shape), tuple(z.shape)) == ((4, 1, 3), (4, 1))


def test_a_size_that_is_cast_twice_stays_a_size(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 4, 6] x) => (float[n, 2, 12] y)
              <int64[1] at = {0}, int64[1] end = {1}, int32[2] rest = {2, 12}> {
                  s = Shape (x) s32 = Cast <to = 6> (s) n0 = Slice (s32, at, end)
                  shape = Concat <axis = 0> (n0, rest) s64 = Cast <to = 7> (shape) y = Reshape (x, s64) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    request = graphs.request(
        "cpu",
        inputs=(TensorSpec("x", "float32", ("n", 4, 6)),),
        outputs=(TensorSpec("y", "float32", ("n", 2, 12)),),
        profiles=(ShapeProfile((("x", (1, 4, 6), (2, 4, 6), (8, 4, 6)),)),),
    )
    module = to_program(tmp_path / "model.onnx", request).module()
    for n in (1, 5, 8):
        assert tuple(module(torch.ones(n, 4, 6))[0].shape) == (n, 2, 12)
