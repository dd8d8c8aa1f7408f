import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.core.errors import ModelError
from enginesmith.core.types import Dim, TensorSpec
from pipeline.sources.export import export
from pipeline.sources.onnx_header import HeaderTensor, wrong_arguments
from pipeline.sources.request import ExportRequest
from tests.pipeline.sources.test_constant_ifs import count_ifs, model_of

RATE = HeaderTensor("rate", "int64", ())


def two_networks(path: Path) -> None:
    """y = |relu(2 x)| at a rate of 16000, else |-3 x|."""
    model = model_of([helper.make_node("Equal", ["rate", "wanted"], ["c"])], ["n", 3], {"wanted": np.array(16000)})
    model.graph.input.append(helper.make_tensor_value_info("rate", TensorProto.INT64, []))
    onnx.save(model, path)


@pytest.mark.parametrize(("rate", "factor"), [(16000, 2.0), (8000, 3.0)])
def test_the_branch_of_an_argument_is_built(rate: int, factor: float, tmp_path: Path) -> None:
    two_networks(tmp_path / "m.onnx")
    x, batch = TensorSpec("x", "float32", ("n", 3)), Dim("n", 1, 2, 4)
    workdir = tmp_path / "work"
    workdir.mkdir()
    request = ExportRequest("onnx", tmp_path, "m.onnx", (x,), (batch,), arguments={"rate": rate})
    result = export(request, None, None, workdir)
    model = onnx.load(result.onnx)
    assert [item.name for item in model.graph.input] == ["x"] and count_ifs(model) == 0
    assert all(check.passed for check in result.checks)
    weights = [onnx.numpy_helper.to_array(item) for item in model.graph.initializer]
    assert any(np.all(item == factor) for item in weights)


@pytest.mark.parametrize(
    ("tensor", "arguments", "words"),
    [
        (RATE, {"rates": 1}, "no such input; its inputs are rate"),
        (RATE, {"rate": 0.5}, "0.5 is not int64"),
        (RATE, {"rate": "16000"}, "'16000' is not int64"),
        (HeaderTensor("rate", "uint8", ()), {"rate": 256}, "256 is not uint8"),
        (HeaderTensor("rate", "int64", ("n",)), {"rate": 1}, r"is \[n\] in the model; only an input"),
        (HeaderTensor("rate", "int64", None), {"rate": 1}, "of unknown rank"),
    ],
)
def test_an_argument_that_does_not_fit_is_reported(tensor: HeaderTensor, arguments: dict[str, int], words: str) -> None:
    ((_, text),) = wrong_arguments([tensor], arguments)
    assert re.search(words, text)


def test_an_input_of_fixed_size_may_have_a_value(tmp_path: Path) -> None:
    assert not list(wrong_arguments([HeaderTensor("rate", "float32", (1, 1))], {"rate": 0.5}))
    two_networks(tmp_path / "m.onnx")
    request = ExportRequest("onnx", tmp_path, "m.onnx", (), arguments={"rate": 0.5})
    with pytest.raises(ModelError, match=r"source.arguments.rate: 0.5 is not int64"):
        export(request, None, None, tmp_path)
