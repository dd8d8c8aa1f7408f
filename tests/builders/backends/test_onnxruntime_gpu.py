"""No GPU here: what runs for real runs on the CPU wheel, whose Python API is that of the GPU wheel."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from builders.backends.onnxruntime import OrtSession
from builders.backends.onnxruntime import gpu as onnxruntime_gpu
from builders.backends.onnxruntime.gpu import (
    CPU,
    CUDA,
    TENSORRT,
    GpuSession,
    OnnxRuntimeCuda,
    OnnxRuntimeTensorRT,
    left_over,
    profile_options,
)
from enginesmith.core.errors import DataError, EnginesmithError, ModelError
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.evaluation import evaluate
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.types import Engine, ShapeProfile, TensorSpec
from tests.builders import graphs

BACKENDS = [OnnxRuntimeCuda, OnnxRuntimeTensorRT]
L4 = cuda.GpuDevice(0, "NVIDIA A100", (8, 0)), cuda.GpuDevice(1, "NVIDIA L4", (8, 9))


@pytest.fixture
def gpu_wheel(monkeypatch, tmp_path):
    """As if onnxruntime-gpu were installed over onnxruntime, on a machine with an A100 and an L4."""
    library = tmp_path / "provider.so"
    library.touch()
    monkeypatch.setattr(onnxruntime_gpu, "_library", lambda provider: library)
    monkeypatch.setattr(onnxruntime_gpu, "versions_of", installed("onnxruntime", "onnxruntime-gpu"))
    monkeypatch.setattr(cuda, "gpus", lambda: L4)
    return library


def installed(*there, version="1.31.1"):
    return lambda *names: {name: version for name in names if name in there}


def request(backend, target="l4", precision="fp32", **changes):
    return graphs.request(target, precision, backend.name, toolchain=tuple(backend.versions().items()), **changes)


def image(batch):
    return {"image": np.ones((batch, 8), "f")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsupported_requests_of_a_provider_are_refused_with_a_remedy(backend, gpu_wheel):
    compiler = backend()
    assert compiler.refuses(request(compiler)) is compiler.refuses(request(compiler, precision="fp16")) is None
    assert "use onnxruntime" in compiler.refuses(request(compiler, "cpu")) and "run on GPUs" in compiler.runs(L4_CPU)
    assert "use tensorrt" in compiler.refuses(request(compiler, precision="fp8"))
    assert "fp16" in compiler.refuses(request(compiler, "t4", "bf16"))
    native_request = request(compiler, inputs=(TensorSpec("image", "bfloat16", ("batch", 8)),))
    assert "cast it to float32" in compiler.refuses(native_request)


L4_CPU = graphs.request("cpu").target


def test_the_cuda_engine_is_built_with_either_wheel_and_opened_by_the_gpus(monkeypatch):
    backend = OnnxRuntimeCuda()
    version = backend.versions()["onnxruntime"]
    assert backend.refuses(request(backend)) is None, "this machine has the CPU wheel alone"
    runtime = backend.requires(dataclasses.replace(request(backend), toolchain=(("onnxruntime", version),)))[1]
    assert evaluate([runtime], Machine((8, 9), runtimes={"onnxruntime-gpu": version}))[0].state == "met"
    monkeypatch.setattr(cuda, "gpus", lambda: L4)
    assert "onnxruntime-gpu is not installed" in (backend.runs(request(backend).target) or "")
    monkeypatch.setattr(onnxruntime_gpu, "versions_of", lambda *_: {})
    assert "pip install onnxruntime" in (backend.refuses(request(backend)) or "")


def test_wheels_installed_over_each_other_are_refused(gpu_wheel, monkeypatch):
    compiler = OnnxRuntimeTensorRT()
    gpu_wheel.unlink()
    assert "onnxruntime was installed over onnxruntime-gpu" in compiler.refuses(request(compiler))
    entries = {"onnxruntime": "1.30.0", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(onnxruntime_gpu, "versions_of", lambda *names: {n: entries[n] for n in names if n in entries})
    assert "onnxruntime-gpu 1.31.1 and onnxruntime 1.30.0" in compiler.refuses(request(compiler))


def test_the_providers_library_is_searched_beside_the_running_module():
    path = onnxruntime_gpu._library(CUDA)
    assert path.parent.parent == onnxruntime_gpu.Path(onnxruntime.__file__).parent
    assert path.name == "libonnxruntime_providers_cuda.so" and not path.exists()


def test_a_cuda_engine_contains_the_whole_graph_in_one_file(tmp_path):
    model = onnx.load(graphs.mlp(tmp_path / "model.onnx", "float16"))
    onnx.save(model, tmp_path / "apart.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    for name in "ab":
        (tmp_path / name).mkdir()
    engines = [OnnxRuntimeCuda().build(request(OnnxRuntimeCuda()), tmp_path / "apart.onnx", tmp_path / n) for n in "ab"]
    assert engines[0].digest == engines[1].digest
    (tmp_path / "w.bin").unlink()
    with OrtSession(engines[0].path, optimized=False) as engine, OrtSession(tmp_path / "model.onnx") as graph:
        np.testing.assert_allclose(engine.run(image(3))["logits"], graph.run(image(3))["logits"], rtol=1e-2)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_an_invalid_model_file_is_a_model_error(tmp_path, content):
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelError, match="is not a valid ONNX model"):
        OnnxRuntimeCuda().build(request(OnnxRuntimeCuda()), tmp_path / "model.onnx", tmp_path)


def test_options_reach_the_provider(gpu_wheel):
    cuda = OnnxRuntimeCuda(tf32=True, convolution_search="heuristic", memory_mib=3)
    expected = {"device_id": "1", "use_tf32": "1", "cudnn_conv_algo_search": "HEURISTIC", "gpu_mem_limit": "3145728"}
    assert cuda.providers(request(cuda), 1) == [(CUDA, expected)]
    assert OnnxRuntimeCuda().providers(request(cuda), 0)[0][1]["use_tf32"] == "0"
    (first, options), (second, _) = OnnxRuntimeTensorRT(workspace_mib=1).providers(request(cuda, precision="int8"), 1)
    assert (first, second) == (TENSORRT, CUDA)
    enabled = [options[f"trt_{precision}_enable"] for precision in ("int8", "fp16", "bf16")]
    assert enabled == ["True", "True", "False"]
    assert options["trt_max_workspace_size"] == "1048576" and options["trt_profile_max_shapes"] == "image:16x8"


def test_each_profile_names_each_input_once():
    profiles = [ShapeProfile((("a", (1, 2), (2, 2), (4, 2)), ("b", (1,), (2,), (4,))))] * 2
    assert profile_options(profiles)["trt_profile_opt_shapes"] == "a:2x2,b:2,a:2x2,b:2"
    assert profile_options([]) == {}


def test_a_session_runs_only_within_its_profiles(tmp_path):
    model = graphs.mlp(tmp_path / "model.onnx")
    with GpuSession(model, [graphs.BATCHES], [(CPU, {})], cpu_operators=True) as session:
        assert session.run(image(16))["logits"].shape == (16, 3)
        with pytest.raises(DataError, match="no optimization profile holds"):
            session.run(image(17))
        with pytest.raises(DataError, match="no array for input 'image'"):
            session.run({})


@pytest.mark.parametrize(
    ("provider", "words"),
    [(CPU, "3 operators have no kernel .* MatMul .*cpu_operators: true"), (CUDA, "and no CUDAExecutionProvider")],
)
def test_operators_on_the_cpu_and_a_wheel_without_the_provider_are_refused(tmp_path, provider, words):
    with pytest.raises(EnginesmithError, match=words):
        GpuSession(graphs.mlp(tmp_path / "model.onnx"), [], [(provider, {})])


def test_shape_computations_may_run_on_the_cpu(tmp_path):
    nodes = [helper.make_node("Shape", ["x"], ["s"], name="s"), helper.make_node("Cast", ["s"], ["y"], name="c", to=1)]
    values = [("x", TensorProto.FLOAT, ("n", 2))], [("y", TensorProto.FLOAT, (2,))]
    with GpuSession(graphs.save(tmp_path / "model.onnx", nodes, *values), [], [(CPU, {})]) as session:
        assert session.run({"x": np.ones((5, 2), "f")})["y"].tolist() == [5, 2]


def test_when_onnxruntime_falls_back_to_the_cpu_the_session_is_refused(tmp_path, monkeypatch):
    """The real fallback: told to forbid it, ONNX Runtime warns and opens the model on the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    with (
        pytest.warns(UserWarning, match="not in available provider names"),
        pytest.raises(EnginesmithError, match="would run on CPUExecutionProvider"),
    ):
        GpuSession(graphs.mlp(tmp_path / "model.onnx"), [], [(CUDA, {"device_id": "0"})], cpu_operators=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_opens_on_the_gpu_of_its_capability_or_not_at_all(tmp_path, backend, gpu_wheel, monkeypatch):
    compiler = backend()
    path = graphs.mlp(tmp_path / "m.onnx")
    engine = Engine(request(compiler), path, "0" * 64, path.stat().st_size, ".onnx")
    seen_args = []
    monkeypatch.setattr(onnxruntime_gpu, "GpuSession", lambda *args, **kw: seen_args.append(args) or nullcontext())
    with compiler.open(engine):
        pass
    assert seen_args[0][2][0][1]["device_id"] == "1", "the L4 is the second GPU"
    monkeypatch.setattr(cuda, "gpus", lambda: L4[:1])
    with pytest.raises(EnginesmithError, match="no sm_89 GPU"), compiler.open(engine):
        pass


def test_a_tensorrt_engine_of_another_onnxruntime_version_is_refused(tmp_path, gpu_wheel):
    compiler = OnnxRuntimeTensorRT()
    expected = dataclasses.replace(request(compiler), toolchain=(("onnxruntime-gpu", "1.30.0"),))
    with (
        pytest.raises(EnginesmithError, match=r"needs onnxruntime-gpu 1\.30\.0, found 1\.31\.1; install that"),
        compiler.open(Engine(expected, tmp_path / "engine.onnx", "0" * 64, 1, ".onnx")),
    ):
        pass


def test_tensorrt_is_built_on_its_gpu_only(tmp_path, gpu_wheel, monkeypatch):
    compiler, model = OnnxRuntimeTensorRT(), graphs.mlp(tmp_path / "model.onnx")
    with pytest.raises(
        EnginesmithError, match=r"no sm_90 GPU .*, which has .*sm_89.*; build on a node that has this GPU"
    ):
        compiler.build(request(compiler, "h100"), model, tmp_path)
    with pytest.raises(EnginesmithError, match="no TensorrtExecutionProvider"):
        compiler.build(request(compiler), model, tmp_path)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CPU])
    with pytest.raises(ModelError, match="Failed to add provider of type 'TensorrtExecutionProvider'"):
        compiler.build(request(compiler), model, tmp_path)


def test_the_compile_api_refuses_a_model_without_compiled_operators(tmp_path, gpu_wheel, monkeypatch):
    """Really called, on the CPU provider, which compiles nothing."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CPU])
    monkeypatch.setattr(OnnxRuntimeTensorRT, "providers", lambda *_: [])
    compiler = OnnxRuntimeTensorRT()
    with pytest.raises(ModelError, match="Unable to compile any nodes"):
        compiler.build(request(compiler), graphs.mlp(tmp_path / "model.onnx"), tmp_path)


def test_a_note_lists_operators_outside_tensorrt_engines(tmp_path):
    context = helper.make_node("EPContext", ["x"], ["a"], name="engine", domain="com.microsoft")
    rest = helper.make_node("NonZero", ["a"], ["y"], name="rest")
    values = [("x", 1, (2,))], [("y", 7, (1, "n"))]
    path = graphs.save(tmp_path / "both.onnx", [context, rest], *values, domains=["com.microsoft"])
    assert left_over(path) == ("1 operators are outside of TensorRT's engines and run on the CUDA provider: NonZero",)
    single_path = graphs.save(tmp_path / "alone.onnx", [context], *values, domains=["com.microsoft"])
    assert left_over(single_path) == ()
