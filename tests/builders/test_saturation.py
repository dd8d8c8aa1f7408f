"""Which files' int8 weights can saturate without VNNI, and how sessions open them there."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from builders.backends.onnxruntime.cpu import SATURATES
from builders.backends.onnxruntime.saturation import exact_source, file_may_saturate
from builders.backends.onnxruntime.session import session_options
from builders.onnx_graphs.shard_names import list_shards
from builders.onnx_graphs.shards import save_graph
from enginery.core.hardware.cpu_kinds import EXACT_SESSION, KINDS
from enginery.core.requirements import Cpu, SessionOption
from tests.builders import graphs

U8, S8, S32 = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32


def product(path: Path, *weights: tuple[str, np.ndarray], made: bool = False, zero: str = "") -> Path:
    """u times the int8 tensor 'w': one of `weights`, or an input (made)."""
    given = [("u", U8, ["n", 4]), *([("w", S8, [4, 2])] if made else [])]
    node = helper.make_node("MatMulInteger", ["u", "w", "", zero] if zero else ["u", "w"], ["y"], name="y")
    return graphs.save(path, [node], given, [("y", S32, ["n", 2])], weights)


def full(value: int, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.int8)


@pytest.mark.parametrize(("value", "saturates"), [(0, False), (64, False), (65, True), (-64, False), (-65, True)])
def test_a_weight_beyond_64_may_saturate(tmp_path, value, saturates):
    """One such value is enough, wherever it is stored."""
    weight = full(3, 4, 2)
    weight[2, 1] = value
    path = product(tmp_path / "m.onnx", ("w", weight))
    assert file_may_saturate(path) == saturates
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert (tmp_path / "m.bin").exists() and file_may_saturate(path) == saturates


def test_what_is_no_int8_weight_saturates_nothing(tmp_path):
    others = [("zero", full(-128, 1)), ("scalar", np.array(100, np.int8)), ("bias", np.full(2, 1000, np.int32))]
    others += [("u8", np.full((4, 2), 255, np.uint8)), ("empty", full(0, 0))]
    assert not file_may_saturate(product(tmp_path / "m.onnx", ("w", full(64, 4, 2)), *others, zero="zero"))
    assert not file_may_saturate(graphs.mlp(tmp_path / "float.onnx"))


def test_a_factor_that_is_made_at_run_time_may_saturate(tmp_path):
    assert file_may_saturate(product(tmp_path / "given.onnx", made=True))
    for kind, saturates in ((np.int8, True), (np.uint8, False)):
        node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], name="q")
        parts = [("s", np.array(0.1, "f")), ("z", np.array(0, kind))]
        out = ("y", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), ["n"])
        path = graphs.save(tmp_path / "q.onnx", [node], [("x", TensorProto.FLOAT, ["n"])], [out], parts)
        assert file_may_saturate(path) == saturates


def test_a_weight_within_a_nodes_graph_counts(tmp_path):
    out = helper.make_tensor_value_info("w", S8, [4])
    inner = helper.make_graph([], "inner", [], [out], [numpy_helper.from_array(full(100, 4), "w")])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=inner, else_branch=inner)
    path = graphs.save(tmp_path / "m.onnx", [node], [("c", TensorProto.BOOL, [])], [("y", S8, [4])])
    assert file_may_saturate(path)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_only_what_may_saturate_is_opened_in_another_way(tmp_path, level):
    opened = {}
    for value in (64, 65):
        path, options = product(tmp_path / "m.onnx", ("w", full(value, 4, 2))), session_options(level, 1)
        source = exact_source(path, options)
        opened[value] = isinstance(source, bytes), _asks(options)
    assert opened[64] == (False, False)
    assert opened[65] == (level == "ORT_DISABLE_ALL", True)


def test_what_cannot_be_read_is_left_to_onnxruntime(tmp_path):
    path, options = tmp_path / "m.onnx", session_options("ORT_ENABLE_ALL", 1)
    path.write_bytes(b"\xff\xff")
    assert exact_source(path, options) == str(path) and _asks(options)


def _asks(options: ort.SessionOptions) -> bool:
    try:
        return options.get_session_config_entry(EXACT_SESSION[0]) == EXACT_SESSION[1]
    except RuntimeError:
        return False  # onnxruntime's way to say that there is no such entry


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in ("x86-64-v3", "x86-64-v4-vnni")])
def test_an_engine_says_whether_its_weights_saturate_wherever_it_was_built(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("builders.backends.onnxruntime.session.this_kind", lambda: kind)
    said = {}
    for value in (64, 65):
        model = product(tmp_path / "m.onnx", ("w", full(value, 4, 2)))
        made = OnnxRuntime().build(graphs.request("cpu", backend="onnxruntime"), model, tmp_path)
        said[value] = made.notes, made.requires
    needed = (Cpu("cpu"),)
    assert said == {64: ((), needed), 65: ((SATURATES,), (*needed, SessionOption(*EXACT_SESSION)))}


def test_the_option_asks_for_7_bit_weights_and_is_part_of_the_build_key():
    plain, reduced = OnnxRuntime(), discovery.configure("onnxruntime", {"reduced_range": "always"})
    assert (plain.scheme().weight_levels, reduced.scheme().weight_levels) == (127, 64)
    keys = {graphs.request("cpu", options=discovery.options_of(tool)).key for tool in (plain, reduced)}
    assert len(keys) == 2


def test_a_graph_in_shards_is_rewritten_into_a_file_beside_it(tmp_path):
    weight = np.random.default_rng(0).integers(-128, 128, (64, 32)).astype(np.int8)
    node = helper.make_node("MatMulInteger", ["u", "w"], ["y"], name="y")
    ends = [("u", U8, ["n", 64])], [("y", S32, ["n", 32])]
    path = graphs.save(tmp_path / "m.onnx", [node], *ends, [("w", weight)])
    save_graph(onnx.load(path), path)
    source = exact_source(path, session_options("ORT_DISABLE_ALL", 1))
    assert isinstance(source, str) and source != str(path)
    assert {*list_shards(Path(source))} > {*list_shards(path)}
    u = np.full((1, 64), 255, np.uint8)
    found = ort.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"u": u})[0]
    assert np.array_equal(found, u.astype(np.int32) @ weight.astype(np.int32))
