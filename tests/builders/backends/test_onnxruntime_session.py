from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builders.backends.onnxruntime import OrtSession
from builders.backends.onnxruntime.session import why_unreadable, words_of
from enginesmith.core.errors import ModelError

SOURCE = "/onnxruntime_src/onnxruntime/core"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Reshape node. "
            f"Name:'/head/Reshape' Status Message: {SOURCE}/providers/cpu/tensor/reshape_helper.h:84 "
            "onnxruntime::ReshapeHelper::ReshapeHelper(const onnxruntime::TensorShape&, onnxruntime::TensorShapeVector"
            "&, bool) size != 0 && (input_shape_size % size) == 0 was false. The input tensor cannot be reshaped",
            "Reshape node '/head/Reshape': The input tensor cannot be reshaped",
        ),
        (
            f"[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/a.onnx failed:{SOURCE}/graph/model.cc:181 "
            "onnxruntime::Model::Model(onnx::ModelProto&&, const onnxruntime::PathString&, const "
            "onnxruntime::IOnnxRuntimeOpSchemaRegistryList*, const onnxruntime::logging::Logger&, const "
            "onnxruntime::ModelOptions&) Unsupported model IR version: 99, max supported IR version: 11\n",
            "Unsupported model IR version: 99, max supported IR version: 11",
        ),
        (
            f"[ONNXRuntimeError] : 1 : FAIL : Exception during initialization: {SOURCE}/framework/x.cc:7 static "
            "onnxruntime::common::Status onnxruntime::A<T>::operator()(const int (&)[3]) const [with T = float; U = "
            "std::vector<int>] n == 3 was false.",
            "Exception during initialization: a check in it failed",
        ),
        (
            f"{SOURCE}/y.h:1 onnxruntime::B::Run(int)::<lambda(onnxruntime::C&)> Too few values (2)",
            "Too few values (2)",
        ),
        (f"{SOURCE}/z.cc:12 nothing like a signature (at all)", "nothing like a signature (at all)"),
        ("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got 3 (expected 4) for x.h", "Got 3 (expected 4) for x.h"),
    ],
)
def test_errors_contain_no_internals(error: str, expected: str) -> None:
    assert words_of(RuntimeError(error)) == expected


def save(path: Path, node: onnx.NodeProto, opset: int, shape: tuple[int, ...] = ()) -> Path:
    """A model of one node from x [n, 2] to y; shape: the constant that the node reads as well."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [name, 2]) for name in ("x", "y")]
    constants = [helper.make_tensor("shape", TensorProto.INT64, [len(shape)], shape)] if shape else []
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:], constants)
    version = 8 if shape else 3
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version), path)
    return path


@pytest.mark.parametrize("opset", [1, 5])
def test_an_old_opset_error_names_the_opset_to_export_with(tmp_path: Path, opset: int) -> None:
    path = save(tmp_path / "old.onnx", helper.make_node("Relu", ["x"], ["y"]), opset)
    with pytest.raises(ModelError, match=f"no operator Relu of opset {opset}; .* opset 7 or later") as error:
        OrtSession(path)
    assert "leave the operator out" not in str(error.value)


def test_run_errors_contain_no_source_path(tmp_path: Path) -> None:
    path = save(tmp_path / "odd.onnx", helper.make_node("Reshape", ["x", "shape"], ["y"]), 20, (-1, 7))
    with OrtSession(path, name="models/mine.onnx") as session, pytest.raises(ModelError) as error:
        session.run({"x": np.zeros((3, 2), np.float32)})
    output = str(error.value)
    assert output.startswith("models/mine.onnx: onnxruntime failed while running: Reshape node: ") and "{3,2}" in output
    assert not [word for word in ("onnxruntime_src", "::", "[ONNXRuntimeError]", "was false") if word in output]


def test_a_very_long_name_is_shortened(tmp_path: Path) -> None:
    # A pattern that tries every start takes minutes.
    long_error = RuntimeError(f"Graph output ({'n' * 100_000}) does not exist")
    output = why_unreadable(long_error, tmp_path / "gone")
    assert output.startswith("onnxruntime cannot read it: Graph output (nnn") and len(output) < 5000
    unknown_error = RuntimeError("acme:Act(-1) is not a registered function/op")
    assert "no operator acme:Act " in why_unreadable(unknown_error, tmp_path / "gone")
