import dataclasses

import onnx
import pytest
from onnx import TensorProto

from builders.backends.tensorrt import TensorRT, TensorRTRTX
from builders.backends.tensorrt.library import builder_reason, failure_kind
from enginesmith.core.errors import EnginesmithError, ModelError, digest_of_file
from enginesmith.core.types import NO_LAYERS, ShapeProfile, TensorSpec
from tests.builders import graphs

RTX = TensorRTRTX()
MAGIC = b"vtrt"
CAPABILITY_MASK_AT = 32

GRAPHS = {
    "fp32": lambda path: graphs.mlp(path),
    "fp16": lambda path: graphs.mlp(path, "float16"),
    "bf16": lambda path: graphs.mlp(path, "bfloat16"),
    "int8": lambda path: graphs.int8_mlp(path, "float16"),
    "fp8": lambda path: graphs.fp8_mlp(path),
    "int4": lambda path: graphs.int4_mlp(path),
}
REFUSED = {*(("sm_75", name) for name in ("fp32", "bf16", "fp8", "int4")), ("sm_80", "fp8"), ("sm_86", "fp8")}
BUILDS = [
    (target, precision)
    for target in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
    for precision in GRAPHS
    if (target, precision) not in REFUSED
]


def request_for(target, precision):
    if precision != "int4":
        return graphs.request(target, precision)
    return graphs.request(target, precision, profiles=(ShapeProfile((("image", (1, 64), (4, 64), (16, 64)),)),))


@pytest.mark.parametrize(("target", "precision"), BUILDS)
def test_real_engines_for_every_generation_and_precision(tmp_path, target, precision):
    request = request_for(target, precision)
    assert RTX.refuses(request) is None
    engine = RTX.build(request, GRAPHS[precision](tmp_path / "model.onnx"), tmp_path)
    data = engine.path.read_bytes()
    assert data.startswith(MAGIC)
    assert engine.size_bytes == len(data) and engine.digest == digest_of_file(engine.path)
    assert engine.path.parent == tmp_path and engine.path.suffix == engine.suffix == ".tensorrt-rtx"


def test_the_target_reaches_the_engine(tmp_path):
    model = graphs.mlp(tmp_path / "model.onnx", "float16")
    engines = [RTX.build(graphs.request(sm, "fp16"), model, tmp_path).path.read_bytes() for sm in ("sm_75", "sm_89")]
    assert len({engine[CAPABILITY_MASK_AT:][:4] for engine in engines}) == 2


def test_the_options_reach_the_engine(tmp_path):
    """A busy machine now and then makes other bytes of the same request, so several are compared with."""
    model = graphs.mlp(tmp_path / "model.onnx")
    digests = {RTX.build(graphs.request("sm_89"), model, tmp_path).digest for _ in range(3)}
    assert TensorRTRTX(tf32=True).build(graphs.request("sm_89"), model, tmp_path).digest not in digests


def test_one_optimization_profile_per_bucket(tmp_path):
    buckets = tuple(ShapeProfile((("image", (low, 8), (high, 8), (high, 8)),)) for low, high in ((1, 1), (2, 8)))
    model = graphs.mlp(tmp_path / "model.onnx")
    second_bytes = RTX.build(graphs.request("sm_89", profiles=buckets), model, tmp_path).size_bytes
    first_bytes = RTX.build(graphs.request("sm_89", profiles=buckets[:1]), model, tmp_path).size_bytes
    assert second_bytes > first_bytes


@pytest.mark.parametrize(("target", "precision", "words"), [
    ("sm_75", "fp32", "sm_75 has no FP32 GEMM in TensorRT-RTX; use fp16"),
    ("sm_75", "bf16", "sm_75 has no bfloat16; use fp16"),
    ("sm_75", "fp8", "sm_75 has no FP8 (e4m3), which begins with sm_89; use int8"),
    ("sm_86", "fp8", "sm_86 has no FP8"),
    ("sm_75", "int4", "no int4 weights on sm_75; use int8 or fp16"),
    ("sm_89", "int8-dynamic", "supports no activation scales computed at run time; use int8 with calibration"),
    ("sm_90", "fp16", "sm_90 is not in NVIDIA's support matrix of TensorRT-RTX"),
    ("sm_100", "int8", "nor a target of its compiler; build it with onnxruntime-cuda, on any machine, or"),
    ("sm_103", "fp32", "or tensorrt, on a worker with sm_103: add it to the spec's backends"),
    ("cpu", "fp32", "use onnxruntime"),
])  # fmt: skip
def test_requests_beyond_the_hardware_are_refused_with_a_remedy(target, precision, words):
    assert words in RTX.refuses(graphs.request(target, precision))


@pytest.mark.parametrize(("target", "precision"), sorted(REFUSED))
def test_refusals_match_the_compiler(tmp_path, target, precision):
    """Built all the same, they fail: when a new release learns them, this test says that the table is out of date."""
    with pytest.raises(EnginesmithError, match="use fp16") as error:
        RTX.build(request_for(target, precision), GRAPHS[precision](tmp_path / "model.onnx"), tmp_path)
    assert ".cpp" not in str(error.value)


def test_a_dynamic_dim_without_a_profile_is_refused():
    words = RTX.refuses(graphs.request("sm_89", profiles=()))
    assert words == "input 'image': dim 'batch' has no max; tensorrt-rtx needs one; add dims.batch.max"
    assert RTX.refuses(graphs.request("sm_89", profiles=(), inputs=(TensorSpec("image", "float32", (4, 8)),))) is None


def test_an_unsupported_input_type_is_refused():
    words = RTX.refuses(graphs.request("sm_89", inputs=(TensorSpec("image", "float64", (4, 8)),)))
    assert "'image' is float64" in words and "cast it" in words


def test_versions_name_api_bindings_and_libraries():
    versions = RTX.versions()
    assert {name.rpartition("-")[2] for name in versions} >= {"rtx", "bindings", "libs"}
    assert len(set(versions.values())) == 1


def test_full_tensorrt_builds_only_on_its_gpu(tmp_path):
    with pytest.raises(EnginesmithError, match="build on a node that has this GPU"):
        TensorRT().build(graphs.request("sm_90"), graphs.mlp(tmp_path / "model.onnx"), tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_invalid_models_are_refused_though_the_parser_takes_it(tmp_path, content):
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx is not a valid ONNX model"):
        RTX.build(graphs.request("sm_89"), tmp_path / "model.onnx", tmp_path)


def test_an_unsupported_operator_is_named_with_its_node(tmp_path):
    model = graphs.one_node(tmp_path / "model.onnx", "Foo", shape=(2, 4, 4), domain="acme")
    with pytest.raises(ModelError, match=r"node 'block/the_node' \(Foo\): .*Plugin not found.*invalid node") as error:
        RTX.build(graphs.request("sm_89", profiles=()), model, tmp_path)
    assert "/_src/" not in str(error.value) and "rewrite those operators" in str(error.value)


def test_a_profile_that_does_not_fit_the_model_is_reported(tmp_path):
    wrong_profile = ShapeProfile((("image", (1, 9), (4, 9), (16, 9)),))
    with pytest.raises(EnginesmithError, match=r"Dimension mismatch for tensor image.*make dims"):
        RTX.build(graphs.request("sm_89", profiles=(wrong_profile,)), graphs.mlp(tmp_path / "model.onnx"), tmp_path)


def test_too_small_a_workspace_names_the_option(tmp_path):
    request = graphs.request(
        "sm_89",
        inputs=(TensorSpec("image", "float32", ("batch", 3, 16, 16)),),
        profiles=(ShapeProfile((("image", (1, 3, 16, 16), (64, 3, 16, 16), (4096, 3, 16, 16)),)),),
    )
    with pytest.raises(EnginesmithError, match=r"raise backends\.tensorrt-rtx\.workspace_mib"):
        TensorRTRTX(workspace_mib=1).build(request, graphs.convnet(tmp_path / "model.onnx"), tmp_path)


def test_a_lack_of_memory_is_distinguished_and_retried_with_less():
    output = [("ERROR", "[virtualMemoryBuffer.cpp] Error Code 2: OutOfMemory (Requested size was 17179869184 bytes.)")]
    assert failure_kind(output) == "memory"
    none_found = ("ERROR", "Error Code 10: Could not find any implementation for node {ForeignNode[a...b]}.")
    texts = ("WARNING", "Skipping tactic 0x3e8 due to insufficient memory on requested size of 17179869184 detected")
    assert not failure_kind([none_found]) and not failure_kind([texts])
    assert failure_kind([texts, none_found]) == "memory", "out of memory, which speaks of implementations"
    words = builder_reason("TensorRT", "tensorrt", [texts, none_found])
    assert "Could not find any implementation" in words and "insufficient memory" in words
    assert "remedy: free GPU memory" in words
    single_text = builder_reason("TensorRT", "tensorrt", [none_found])
    assert "quantization.overrides" in single_text and "backends.tensorrt.workspace_mib" in single_text


def test_an_error_of_a_host_without_a_gpu_is_no_fault_of_the_model(monkeypatch):
    monkeypatch.setattr("builders.backends.tensorrt.library.cuda.gpus", list)
    output = [("ERROR", "IBuilder::build: Error Code 1: Cuda Runtime (In generateForCurrent at /_src/profile.cpp:187)")]
    assert "Cuda Runtime; remedy: update the NVIDIA driver, or use a node with" in builder_reason("", "", output)
    assert failure_kind(output) == "no-node"
    monkeypatch.setattr("builders.backends.tensorrt.library.cuda.gpus", lambda: ["a GPU"])
    assert not failure_kind(output) and "driver" not in builder_reason("", "", output)
    assert "build the engine again" in builder_reason("", "", [*output, ("ERROR", "magicTag is wrong")])


def test_an_error_for_a_branch_on_a_dim_has_the_remedy():
    output = "If_2: Must have inputs with equal ranks when condition is not a build-time constant."
    assert "remedy: give the dims that decide the branch" in builder_reason("TensorRT", "tensorrt", [("ERROR", output)])


def test_only_full_tensorrt_tunes_on_its_target():
    assert TensorRT.capabilities.tunes_on_target and not TensorRTRTX.capabilities.tunes_on_target


def test_an_earlier_failure_leaves_no_message(tmp_path):
    with pytest.raises(EnginesmithError):
        RTX.build(graphs.request("sm_75"), graphs.mlp(tmp_path / "model.onnx"), tmp_path)
    engine = RTX.build(graphs.request("sm_89"), tmp_path / "model.onnx", tmp_path)
    assert len(engine.notes) == 1 and engine.notes[0].startswith(f"{NO_LAYERS}: TensorRT-RTX's inspector needs")


def test_external_data_is_found_beside_the_model(tmp_path):
    model = onnx.load(graphs.mlp(tmp_path / "model.onnx"))
    onnx.save(model, tmp_path / "e.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert RTX.build(graphs.request("sm_89"), tmp_path / "e.onnx", tmp_path).size_bytes > 0


@pytest.mark.parametrize("backend", [RTX, TensorRT()])
def test_without_a_gpu_an_engine_neither_runs_nor_opens(tmp_path, backend, monkeypatch):
    monkeypatch.setattr("enginesmith.core.hardware.cuda.gpus", lambda: ())
    request = graphs.request("sm_89")
    assert backend.runs(request.target) == "no sm_89 GPU on this machine"
    engine = RTX.build(request, graphs.mlp(tmp_path / "model.onnx"), tmp_path)
    own_engine = dataclasses.replace(engine, request=dataclasses.replace(request, backend=backend.name))
    with pytest.raises(EnginesmithError, match=r"cannot run here|not installed here"):
        backend.open(own_engine)


def test_bf16_graphs_contain_bfloat16(tmp_path):
    model = onnx.load(graphs.mlp(tmp_path / "model.onnx", "bfloat16"))
    assert any(a.i == TensorProto.BFLOAT16 for node in model.graph.node for a in node.attribute)
