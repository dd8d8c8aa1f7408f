"""Options of both editions. Full TensorRT is not here: its options go to TensorRT-RTX, whose calls are the same."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders.backends.tensorrt import TensorRT, TensorRTRTX, build, editions, library
from builders.backends.tensorrt.build import monitor, parse_network
from builders.backends.tensorrt.library import recorder, refit
from enginesmith.core.errors import EnginesmithError, StepError, digest_of_bytes
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.requirements import Library, LibraryBuild
from enginesmith.core.types import NO_LAYERS
from tests.builders import graphs

RTX = TensorRTRTX()
REQUEST = graphs.request("sm_89", backend="tensorrt")


@pytest.fixture
def trt():
    return pytest.importorskip("tensorrt_rtx")


@dataclasses.dataclass(frozen=True)
class OverRtx(TensorRT):
    """Full TensorRT's own code, over the library of TensorRT-RTX, which takes the same calls and needs no GPU."""

    runtime = "tensorrt_rtx"
    distributions = TensorRTRTX.distributions

    def _check_host(self, target):
        """There is no GPU to tune on."""


def configured(trt, **options):
    config = trt.Builder(recorder("tensorrt_rtx")).create_builder_config()
    TensorRT(**options)._configure(trt, config, REQUEST)
    return config


def flags(trt, config):
    names = [name for name in dir(trt.BuilderFlag) if name.isupper()]
    return {name for name in names if config.get_flag(getattr(trt.BuilderFlag, name))}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, set()),
        ({"tf32": True}, {"TF32"}),
        ({"version_compatible": True}, {"VERSION_COMPATIBLE"}),
        ({"weight_streaming": True}, {"WEIGHT_STREAMING"}),
        ({"refittable": True}, {"REFIT"}),
        ({"strip_weights": True}, {"REFIT", "STRIP_PLAN"}),
    ],
)
def test_options_become_flags_of_the_builder(trt, options, more):
    assert flags(trt, configured(trt, **options)) == more


def test_options_become_settings_of_the_builder(trt):
    config = configured(trt, workspace_mib=64, optimization_level=5, layer_information="names")
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 64 << 20
    assert config.builder_optimization_level == 5
    assert config.profiling_verbosity == trt.ProfilingVerbosity.LAYER_NAMES_ONLY
    assert configured(trt).profiling_verbosity == trt.ProfilingVerbosity.DETAILED


def test_weight_streaming_reaches_an_rtx_engine(tmp_path):
    model = graphs.convnet(tmp_path / "model.onnx")
    profiles = (graphs.ShapeProfile((("image", (1, 3, 16, 16), (4, 3, 16, 16), (16, 3, 16, 16)),)),)
    request = graphs.request("sm_89", profiles=profiles)
    streams = TensorRTRTX(weight_streaming=True).build(request, model, tmp_path).digest
    assert streams not in {RTX.build(request, model, tmp_path).digest for _ in range(3)}


def test_a_compatible_engine_requires_ampere():
    tool = OverRtx(hardware_compatibility="ampere_plus")
    assert "begins with sm_80" in tool.refuses(graphs.request("sm_75", "fp16", "tensorrt"))
    assert tool.refuses(graphs.request("sm_80", "fp16", "tensorrt")) is None


def test_a_release_that_breaks_refittable_engines_is_refused(monkeypatch):
    monkeypatch.setattr(build, "versions_of", lambda *names: dict.fromkeys(names, "11.3.0.99"))
    assert "11.3 drops GEMM biases" in TensorRT(refittable=True).refuses(REQUEST)
    assert "11.3 drops GEMM biases" in TensorRT(strip_weights=True).refuses(REQUEST)
    assert TensorRT().refuses(REQUEST) is None
    monkeypatch.setattr(build, "versions_of", lambda *names: dict.fromkeys(names, "11.4.0.106"))
    assert TensorRT(refittable=True).refuses(REQUEST) is None


def test_plugins_lie_beside_the_graph_by_digest_and_are_checked_before_they_are_loaded(tmp_path):
    def library_of(data: bytes, entry: str) -> Library:
        digest = digest_of_bytes(data)
        (tmp_path / digest).write_bytes(data)
        return Library("a.so", entry, (LibraryBuild(f"linux-{this_kind().machine}", digest),))

    loaded_items = []
    owner = SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(load_library=loaded_items.append))
    plugin, other_library = library_of(b"plugin", "getCreators"), library_of(b"other", "RegisterCustomOps")
    with pytest.raises(EnginesmithError, match=r"a\.so cannot be loaded, or its plugins are registered"):
        library.load(owner, (other_library, plugin), tmp_path)
    assert loaded_items == [str(tmp_path / plugin.builds[0].sha256)]
    Path(loaded_items[0]).write_bytes(b"hostile")
    with pytest.raises(EnginesmithError, match="was published; pull it again"):
        library.load(owner, (plugin,), tmp_path)
    assert len(loaded_items) == 1


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_full_tensorrt_code_builds_with_the_installed_library(trt, tmp_path):
    """The whole of `build` but for what a GPU gives: the layers, which are missing with a reason."""
    tool = OverRtx(workspace_mib=512, optimization_level=1)
    engine = tool.build(graphs.request("sm_89", backend="tensorrt"), graphs.mlp(tmp_path / "model.onnx"), tmp_path)
    assert engine.path.read_bytes().startswith(b"vtrt") and engine.suffix == ".tensorrt"
    assert engine.extras == () and "layers and tactics are not on record: " in engine.notes[-1]
    quiet_rtx = OverRtx(layer_information="none")
    notes = quiet_rtx.build(REQUEST, tmp_path / "model.onnx", tmp_path).notes
    assert [note for note in notes if "layers" in note] == [f"{NO_LAYERS}: layer_information was none"]


def test_layers_from_the_inspector_are_kept(tmp_path):
    inspector = SimpleNamespace(get_engine_information={"json": "not json"}.get)
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: loaded_stub)
    loaded_stub = SimpleNamespace(create_engine_inspector=lambda: inspector)
    trt = SimpleNamespace(Runtime=lambda log: runtime, LayerInformationFormat=SimpleNamespace(JSON="json"))
    logger = SimpleNamespace(messages=[("WARNING", "of the build")])
    (tmp_path / "engine.tensorrt").write_bytes(b"plan")
    assert "cannot be read" in editions.kept_layers(trt, logger, tmp_path / "engine.tensorrt", lambda runtime: None)[1]
    layers = '{"Layers": [{"Name": "conv1", "TacticName": "sm80_xmma"}], "Bindings": []}'
    inspector.get_engine_information = {"json": layers}.get
    path, reason = editions.kept_layers(trt, logger, tmp_path / "engine.tensorrt", lambda runtime: None)
    assert reason == "" and "sm80_xmma" in path.read_text() and logger.messages == [("WARNING", "of the build")]


def test_a_build_reports_phases_and_ends_on_request(trt, tmp_path, monkeypatch):
    monkeypatch.setattr("builders.backends.tensorrt.build._TELL_S", 0.0)
    monkeypatch.setattr("builders.backends.tensorrt.build._ASK_S", 0.0)
    phases = []
    monkeypatch.setattr("builders.backends.tensorrt.build.enter_phase", phases.append)
    model = graphs.mlp(tmp_path / "model.onnx")
    RTX.build(graphs.request("sm_89"), model, tmp_path)
    assert "compiling: optimizing graph" in phases and "compiling: timing graph nodes" in phases
    assert len(phases) == len([a for a, b in zip(phases, [*phases[1:], None], strict=True) if a != b])
    stop_answers = iter([False, False, True])
    monkeypatch.setattr("builders.backends.tensorrt.build.heed_stop", lambda: lambda: next(stop_answers, True))
    with pytest.raises(StepError, match="was cancelled") as error:
        RTX.build(graphs.request("sm_89"), model, tmp_path)
    assert error.value.kind == "cancelled"
    assert next(stop_answers, None) is None, "it was asked, and no more after that"


def test_a_step_reads_the_clock_once(trt, monkeypatch):
    """pytorch/TensorRT#3215: what a monitor does in each step, the build waits for."""
    stop_calls, message = [], []
    watching_monitor = monitor(trt, lambda: bool(stop_calls.append(1)), message.append)
    watching_monitor.phase_start("Timing tactics", None, 9)
    for step in range(1000):
        assert watching_monitor.step_complete("Timing tactics", step)
    assert len(stop_calls) == 1 and message == ["compiling: timing tactics"]


def refitted(tmp_path, fits=True, num_errors=0, missing=(), takes=True):
    error = SimpleNamespace(desc=lambda: "[refit.cpp::a::1] conv1.weight has another shape")
    parser = SimpleNamespace(refit_from_file=lambda path: fits, num_errors=num_errors, get_error=lambda index: error)
    refitter = SimpleNamespace(get_missing_weights=lambda: missing, refit_cuda_engine=lambda: takes)
    trt = SimpleNamespace(Refitter=lambda loaded, log: refitter, OnnxParserRefitter=lambda of, log: parser)
    refit(trt, SimpleNamespace(messages=[]), object(), tmp_path / "new.onnx")


def test_weights_that_an_engine_refuses_are_named(tmp_path):
    refitted(tmp_path)
    with pytest.raises(
        EnginesmithError, match=r"new\.onnx do not fit: conv1\.weight has another shape; build the engine"
    ):
        refitted(tmp_path, fits=False, num_errors=1)
    with pytest.raises(EnginesmithError, match=r"lacks a, b, c, d, e and 1 more; build it again"):
        refitted(tmp_path, missing=list("abcdef"))
    with pytest.raises(EnginesmithError, match="did not accept the new weights: TensorRT gives no reason"):
        refitted(tmp_path, takes=False)


def test_a_stripped_engine_stays_unchanged_and_needs_no_gpu(tmp_path):
    stripped_engine = graphs.an_engine(tmp_path, b"plan without weights", "tensorrt")
    tool = TensorRT(strip_weights=True)
    request = dataclasses.replace(stripped_engine.request, model="1" * 64)
    refit = tool.refit(stripped_engine, tmp_path / "new.onnx", request, tmp_path)
    assert refit.digest == stripped_engine.digest and refit.request == request and refit.path != stripped_engine.path
    assert tool.refits(request) is None and not tool.refit_needs_gpu()
    whole_backend = TensorRT(refittable=True)
    assert whole_backend.refits(request) is None and whole_backend.refit_needs_gpu()
    assert "without refittable" in TensorRT().refits(request)
    with pytest.raises(EnginesmithError, match="no sm_89 GPU on this machine"):
        whole_backend.refit(stripped_engine, tmp_path / "new.onnx", request, tmp_path)


@pytest.mark.parametrize(
    ("release", "network_flags"), [("10.16.1.11", 2), ("11.0.0.114", 0), ("11.4.0.106", 0), ("1.7.1.116", 0)]
)
def test_strong_typing_is_requested_only_from_tensorrt_10(release, network_flags):
    """Later releases have nothing else, deprecate the flag and may lose it."""
    networks = []
    kinds = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1), __version__=release)
    parser = SimpleNamespace(parse_from_file=lambda path: True, num_errors=0)
    kinds.OnnxParser = lambda network, log: parser
    builder = SimpleNamespace(create_network=lambda value: networks.append(value) or SimpleNamespace(num_layers=1))
    parse_network(kinds, None, builder, Path("m.onnx"), ("TensorRT", "tensorrt"))
    assert networks == [network_flags]
