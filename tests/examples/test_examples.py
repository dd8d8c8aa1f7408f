"""Examples are what their README says: real data, parity with PyTorch, and engines from both compilers."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import enginesmith
from builders.backends import discovery
from builders.backends.onnxruntime import OrtSession
from builders.backends.request_checks import profiles
from builders.reference import ReferenceSession
from enginesmith.core.errors import digest_of_file
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import BuildRequest, QuantizationScheme
from enginesmith.user_code.entry_point import call_entry_point, importing_from
from pipeline.quantization.schemes.block_floats import emulate_blocks
from pipeline.quantization.schemes.write import write
from pipeline.sources.export import ExportResult, export
from pipeline.sources.onnx_model import specs_of
from pipeline.sources.request import ExportRequest
from pipeline.spec.model import ModelSpec, load_spec
from tests.pipeline.quantization.search.outlier_nets import all_ranges
from validation.comparison.sessions import expected_checks
from validation.comparison.tasks import task_checks
from validation.data.samples import Samples
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import default_budget
from validation.metrics.tasks.terms import AccuracyMetric

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("digits", "encoder")


def spec_of(name: str) -> ModelSpec:
    return load_spec(EXAMPLES / name / f"{name}.yaml")


def request_of(spec: ModelSpec) -> ExportRequest:
    source = spec.source
    return ExportRequest(
        source.kind, spec.folder, spec.source_file, spec.tensors(), spec.named_dims(), spec.outputs,
        source.function, source.arguments, source.weights, source.opset,
    )  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def exported(request, tmp_path_factory) -> tuple[ModelSpec, ExportResult]:
    spec = spec_of(request.param)
    labels = [spec.golden.labels] if spec.golden.labels else []
    samples = Samples.open(spec.file(spec.golden.data), spec.tensors(), spec.named_dims(), labels)
    column = samples.column(labels[0]) if labels else None
    return spec, export(request_of(spec), samples, column, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
def test_onnx_agrees_with_pytorch_on_real_data_and_at_every_edge(exported):
    spec, result = exported
    assert {"golden"} < {check.case for check in result.checks}
    assert [check for check in result.checks if not check.passed] == []
    golden = GoldenSet.load(result.golden)
    metrics = [AccuracyMetric("logits", floor=0.97, against="labels")] if spec.golden.metric else []
    with OrtSession(result.onnx, optimized=True) as session:
        checks = expected_checks("engine", session, golden, default_budget("engine", "fp32"))
        assert [check for check in [*checks, *task_checks(session, golden, metrics)] if not check.passed] == []
    inputs, outputs = specs_of(onnx.load(result.onnx))
    assert inputs == spec.tensors()
    assert [output.name for output in outputs] == list(spec.outputs)


@pytest.mark.slow
def test_tensorrt_rtx_compiles_examples(exported, tmp_path):
    spec, result = exported
    backend = discovery.configure("tensorrt-rtx", {})
    inputs, outputs = specs_of(onnx.load(result.onnx))
    ranges = tuple(profiles(inputs, spec.named_dims()))
    (target,) = parse_targets("sm_89")
    request = BuildRequest(digest_of_file(result.onnx), "fp32", target, "tensorrt-rtx", inputs, outputs, ranges)
    assert backend.refuses(request) is None
    assert backend.build(request, result.onnx, tmp_path).size_bytes > 100_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pulled_engines_detect_voices(tmp_path: Path) -> None:
    registry, folder = tmp_path / "registry", EXAMPLES / "vad"
    outcome = enginesmith.build(folder / "vad.yaml", registry=registry, targets="cpu", precisions="fp32,int8")
    assert [item.entry.status for item in outcome.engines] == ["proven", "proven"]
    pulled_engine = enginesmith.pull("vad", registry=registry, precision="int8", dest=tmp_path / "dest")
    streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled_engine), pulled_engine.description)
    with importing_from(folder, "listen.py"), np.load(folder / "golden.npz") as arrays:
        sounds = call_entry_point(folder, "listen.py", "frames_of", {"path": None})
        received_point = call_entry_point(folder, "listen.py", "listen", {"sounds": sounds, "streams": streams})
        assert np.mean(received_point.ravel() == arrays["voice"]) > 0.94


@pytest.fixture(scope="module")
def transformer(tmp_path_factory) -> tuple[ModelSpec, ExportResult, Samples]:
    spec = load_spec(EXAMPLES / "digits" / "vit.yaml")
    samples = Samples.open(spec.file("golden.npz"), spec.tensors(), spec.named_dims(), ["label"])
    result = export(request_of(spec), samples, samples.column("label"), tmp_path_factory.mktemp("vit"))
    return spec, result, samples


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_120", "sm_121"])
@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4", "nvfp4-weights"])
def test_the_vision_transformer_recognises_digits_and_compiles_in_block_floats(
    transformer, precision, target, tmp_path
):
    spec, result, samples = transformer
    graph, (batch, *_) = onnx.load(result.onnx), [*samples.batches(256)]
    half_scheme = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
    narrow_path, notes = write(graph, precision, half_scheme, all_ranges(graph, batch))
    assert len(notes.quantized) == 6 * 3 + 1, "all products but the patches' own, of depth 4"
    onnx.save(narrow_path, tmp_path / "narrow.onnx")
    onnx.save(emulate_blocks(narrow_path), tmp_path / "twin.onnx")
    with ReferenceSession(tmp_path / "twin.onnx") as actual_session:
        (check,) = task_checks(actual_session, GoldenSet.load(result.golden), [spec.golden.metric])
    assert check.passed, check
    backend, shapes = discovery.configure("tensorrt-rtx", {}), tuple(profiles(spec.tensors(), spec.named_dims()))
    (expected,) = parse_targets(target)
    inputs, outputs = specs_of(graph)
    request = BuildRequest("0" * 64, precision, expected, "tensorrt-rtx", inputs, outputs, shapes)
    assert backend.build(request, tmp_path / "narrow.onnx", tmp_path).size_bytes > 100_000


def test_no_digit_is_in_two_files_and_none_was_trained_on():
    files = [np.load(EXAMPLES / "digits" / f"{name}.npz") for name in ("calibration", "golden", "held_out")]
    images = [image.tobytes() for arrays in files for image in arrays["image"]]
    assert len(set(images)) == len(images) == 128 + 256 + 256
    with importing_from(EXAMPLES / "digits", "train.py"):
        trained_on = call_entry_point(EXAMPLES / "digits", "train.py", "splits", {})["train"][0]
    assert not set(images) & {image.tobytes() for image in trained_on}


@pytest.mark.parametrize("name", [*NAMES, "tinylm", "vad"])
def test_examples_are_small_and_exporting_leaves_no_file(name):
    files = [path for path in (EXAMPLES / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    assert {path.suffix for path in files} <= {".py", ".md", ".yaml", ".npz", ".safetensors"}


def test_the_onnx_reader_pulls_for_the_cpu_despite_a_gpu_engine() -> None:
    calls = re.findall(r"enginesmith\.pull\(([^)]*)\)", "".join(path.read_text() for path in EXAMPLES.rglob("*.py")))
    assert len(calls) > 3 and all('target="cpu"' in call for call in calls)


def test_the_encoders_masks_hide_real_padding():
    folder = EXAMPLES / "encoder"
    with np.load(folder / "golden.npz") as arrays:
        lengths = arrays["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) > 10
    assert lengths.min() >= 1
    assert digest_of_file(folder / "golden.npz") != digest_of_file(folder / "calibration.npz")
