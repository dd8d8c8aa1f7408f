from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from enginesmith.core.errors import ModelError
from pipeline.sources.onnx_header import read_header
from pipeline.sources.onnx_model import load_onnx, specs_of
from tests.pipeline.quantization.small_nets import build

SIZES = st.one_of(st.none(), st.integers(-3, 1 << 40), st.sampled_from(["n", "?", "None", "-1", "größe", "a b"]))
TYPES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.lists(st.tuples(TYPES, st.lists(SIZES, max_size=5)), min_size=1, max_size=5))
def test_the_header_gives_the_parsers_result(tmp_path: Path, inputs: list[tuple[int, list[int | str | None]]]) -> None:
    values = [helper.make_tensor_value_info(f"x{i}", kind, shape) for i, (kind, shape) in enumerate(inputs)]
    values.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [200]))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [200], [1.0] * 200)
    nodes = [helper.make_node("Identity", ["x0"], ["y"]), helper.make_node("Identity", ["w"], ["v"])]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("y", inputs[0][0]), ("v", 1))]
    for output in outputs:
        output.type.tensor_type.shape.SetInParent()
    graph = helper.make_graph(nodes, "g", values, outputs, [weight])
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    header, (own_specs, given_outputs) = read_header(path), specs_of(load_onnx(path, tmp_path))
    assert [(item.name, item.dtype, item.shape) for item in header.inputs] == [
        (item.name, item.dtype, item.shape) for item in own_specs
    ]
    assert list(header.outputs) == [item.name for item in given_outputs]


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused_or_parsed(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "m.onnx"
    path.write_bytes(data)
    try:
        assert read_header(path).outputs
    except ModelError as error:
        assert "truncated or not an ONNX file" in str(error)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    onnx.save(build("float[3] x", "float[3] y", "y = Identity(x)", {}), tmp_path / "m.onnx")
    whole_data = (tmp_path / "m.onnx").read_bytes()
    for size in (0, 5, len(whole_data) // 2, len(whole_data) - 1):
        (tmp_path / "m.onnx").write_bytes(whole_data[:size])
        with pytest.raises(ModelError):
            read_header(tmp_path / "m.onnx")
