"""What runtimes tell about the inside of a run: ONNX Runtime's trace, TensorRT's layers (over stand-ins, not a GPU)."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.backends.discovery import load_runtime
from builders.backends.onnxruntime import OnnxRuntime
from builders.backends.onnxruntime.session import read_trace
from builders.backends.optional_methods import NodeTime, element_name
from builders.backends.tensorrt import TensorRTRTX
from builders.backends.tensorrt.session import EngineSession, profile_layers
from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.types import Engine
from tests.builders import graphs


def test_an_engines_nodes_are_timed_with_shapes_and_packed_weights(tmp_path):
    model = graphs.int8_mlp(tmp_path / "model.onnx", "float32")
    backend = OnnxRuntime()
    engine = backend.build(graphs.request("cpu", "int8", "onnxruntime"), model, tmp_path)
    with backend.open(engine) as session:
        (spec,) = session.inputs
    shape = tuple(3 if isinstance(dim, str) else dim for dim in spec.shape)
    result = backend.profile(engine, {spec.name: np.ones(shape, np.float32)}, 8, tmp_path)
    assert result.runs == 4 and result.seconds > 0
    products = [node for node in result.nodes if "MatMul" in node.op_type or "Gemm" in node.op_type]
    assert products, [node.op_type for node in result.nodes]
    for node in products:  # the kernel has packed the weight, and the trace does not show it
        weight = "uint8" if this_kind().saturates else "int8"  # of an engine that is opened to be exact there
        assert any(dtype == weight and len(seen_input) == 2 for dtype, seen_input in node.inputs), node
        assert node.outputs[0][1][0] == 3
    assert sum(node.seconds for node in result.nodes) < result.seconds


def event(name, at, lasts, kind="Node", **options):
    return {"name": name, "ts": at, "dur": lasts, "cat": kind, "args": options}


def write_trace(folder, events):
    (folder / "trace.json").write_text(json.dumps([{"name": "process_name"}, *events]))
    weight = numpy_helper.from_array(np.ones((4, 2), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product"), helper.make_node("Relu", ["y"], ["z"])]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, [1, 4])], [value("z", 1, [1, 2])], [weight])
    onnx.save(helper.make_model(graph), folder / "executed.onnx")
    return folder / "trace.json", folder / "executed.onnx"


def one_run(at, product, relu):
    runs = [{"float": [1, 2]}]
    return [
        event("model_run", at, 100, "Session"),
        event("product_kernel_time", at + 1, product, op_name="MatMul", input_type_shape=[], output_type_shape=runs),
        event("Relu_1_kernel_time", at + 60, relu, op_name="Relu", input_type_shape=runs, output_type_shape=runs),
        event("inner_kernel_time", at + 61, 1, op_name="Body", input_type_shape=runs, output_type_shape=runs),
        event("Relu_1_fence_before", at + 59, 1, op_name="Relu"),
    ]


def test_times_are_means_over_the_quicker_runs_and_bodies_are_part_of_their_node(tmp_path):
    events = [*one_run(0, 40, 9), *one_run(200, 10, 4), *one_run(400, 20, 6), *one_run(600, 50, 30)]
    events[15]["dur"] = 900  # the last run was interrupted
    trace = read_trace(*write_trace(tmp_path, events), {"x": ("float32", (1, 4))}, discard=1)
    assert [(node.name, node.op_type) for node in trace.nodes] == [("product", "MatMul"), ("Relu_1", "Relu")]
    assert [node.seconds for node in trace.nodes] == pytest.approx([15e-6, 5e-6])
    assert trace.nodes[0].inputs == (("float32", (1, 4)), ("float32", (4, 2)))
    assert trace.nodes[1].inputs == trace.nodes[0].outputs == (("float32", (1, 2)),)


def test_a_trace_in_another_format_is_named(tmp_path):
    with pytest.raises(ModelError, match="contains no run"):
        read_trace(*write_trace(tmp_path, one_run(0, 1, 1)), {}, discard=1)
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_trace(tmp_path / "trace.json", tmp_path / "executed.onnx", {}, discard=0)


def test_types_have_the_names_of_numpy():
    kinds = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.BFLOAT16)
    assert [element_name(kind) for kind in kinds] == ["float32", "float64", "float16", "uint8", "bfloat16"]


def test_the_names_of_tensorrts_profiler_are_those_of_the_bindings():
    trt = pytest.importorskip("tensorrt_rtx")
    assert hasattr(trt.IProfiler, "report_layer_time") and hasattr(trt.IExecutionContext, "profiler")


class FakeContext:
    """Reports two layers in each run once it has a profiler."""

    profiler = None

    def report(self):
        if self.profiler is not None:
            self.profiler.report_layer_time("/encoder/MatMul_3 + /encoder/Add", 2.0)
            self.profiler.report_layer_time("Reformatting CopyNode", 0.5)


class FakeSession(EngineSession):
    def __init__(self):
        self._context = FakeContext()
        self._lanes = [SimpleNamespace(context=self._context)]

    def run(self, inputs):
        self._context.report()
        return {}


def test_layers_are_timed_after_a_warm_up():
    trt = load_runtime(TensorRTRTX())
    actual = profile_layers(trt, FakeSession(), {}, 4)
    assert actual.nodes == [
        NodeTime("/encoder/MatMul_3 + /encoder/Add", "MatMul", 2e-3),
        NodeTime("Reformatting CopyNode", "Reformatting CopyNode", 5e-4),
    ]


def test_an_engine_without_our_session_has_no_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(TensorRTRTX, "open", lambda self, engine: nullcontext(object()))
    engine = Engine(graphs.request("sm_89"), tmp_path / "e.engine", "a" * 64, 1, ".engine")
    with pytest.raises(EnginesmithError, match="no layers to time"):
        TensorRTRTX().profile(engine, {}, 1, tmp_path)
