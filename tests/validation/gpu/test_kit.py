import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builders.execution.jobs import Job
from builders.execution.process import run_job
from enginesmith.core.errors import UnavailableError
from enginesmith.core.reports.latency import Ratio
from enginesmith.core.reports.proof import Check
from enginesmith.core.text import now
from tests.validation.gpu.fakes import HOPPER
from validation.gpu import devices
from validation.gpu.__main__ import main
from validation.gpu.page import page
from validation.gpu.results import (
    BatchCosts,
    BatchLatency,
    DeviceLatency,
    KitTrial,
    ModelCosts,
    OfflineTrial,
    Peaks,
    PeerComparison,
    Results,
    Skipped,
)
from validation.latency.measurement.quantiles import Quantile

ROOT = Path(__file__).parents[3]
# What a GPU machine with torch, numpy and onnx does not have.
ABSENT = (
    "pydantic", "prefect", "ray", "click", "rich", "boto3", "botocore", "yaml", "psutil", "blake3", "safetensors",
    "onnxruntime", "matplotlib", "sqlalchemy", "scipy", "onnx_ir", "onnxscript",
)  # fmt: skip
HOOK = f"""
import importlib.abc, importlib.util, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}, as on a bare machine", name=name)
sys.meta_path.insert(0, Absent())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] in {ABSENT!r} else find_spec(name, package)
)
"""
EVERY_MODULE = """
import importlib, pathlib, builders, validation.gpu
for package in (builders, validation.gpu):
    folder = pathlib.Path(package.__path__[0])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] in ("dispatch", "onnx_torch"):  # Ray's, and torch's, which takes seconds and is seen below
            continue
        try:
            importlib.import_module(".".join((package.__name__, *parts)))
        except ModuleNotFoundError as error:  # rooms of one compiler may need that compiler, and nothing else
            if "as on a bare machine" in str(error):
                raise
print("all imported")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python without what a bare machine lacks; its children have it, too."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HOOK)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def python(bare: dict[str, str], folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_builders_and_the_kit_import_on_a_bare_machine(bare: dict[str, str], tmp_path: Path) -> None:
    result = python(bare, tmp_path, "-c", EVERY_MODULE)
    assert result.returncode == 0 and "all imported" in result.stdout, result.stderr
    blocked_python = python(bare, tmp_path, "-c", "import click")
    assert "as on a bare machine" in blocked_python.stderr, "the hook hides nothing, and this test says nothing"


@pytest.mark.slow
def test_the_kit_runs_on_a_bare_machine_and_its_page_says_what_it_saw(bare: dict[str, str], tmp_path: Path) -> None:
    """With torch alone; ONNX Runtime is registered here, and missing: that is its row."""
    words = ("--device", "cpu", "--size", "small", "--model", "mlp", "--peer", "eager", "--seconds", "0.01")
    words += ("--no-peaks", "--precision", "fp32")
    result = python(bare, tmp_path, "-m", "validation.gpu", *words, "--backend", "onnxruntime", "--out", "r.json")
    document = Results.load(tmp_path / "r.json")
    assert result.returncode == 1 and "1 bad" in result.stdout, result.stderr
    outcomes = {(item.backend, item.precision): item.outcome for item in document.tries}
    assert outcomes["eager", "fp32"] == "passed", document.tries[0].reason
    assert outcomes["onnxruntime", "fp32"] == "not finished"
    assert "as on a bare machine" in str(next(item for item in document.tries if item.backend == "onnxruntime").reason)
    text = page([document])
    assert "| mlp fp32 | PyTorch, op by op | passed |" in text and "no GPU: the CPU as the kit's device" in text


def test_a_missing_gpu_and_wrong_arguments_give_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if not find_gpu():
        assert main(["--out", str(tmp_path / "x")]) == 3
        assert "no NVIDIA GPU on this machine" in capsys.readouterr().err
    assert main(["page", str(tmp_path / "none")]) == 2
    (tmp_path / "bad").write_text("{}")
    assert main(["page", str(tmp_path / "bad")]) != 0
    assert "no results of the GPU kit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--model", "resnet"])
    assert "'resnet' is not one of mlp, conv, block" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--seconds", "-1"), ("--seconds", "nan"), ("--timeout", "0"), ("--timeout", "x")])
def test_impossible_times_are_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *words])
    assert f"{words[1]!r} is not a number of seconds above 0" in capsys.readouterr().err


QUICK = ["--device", "cpu", "--model", "mlp", "--size", "small", "--peer", "none", "--no-peaks", "--seconds", "0.01"]


def test_an_unknown_backend_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--backend", "onnxruntime,onnxruntim"]) == 2
    assert capsys.readouterr().err == "error: backend 'onnxruntim' is not known; did you mean 'onnxruntime'?\n"


def test_measurements_are_stored_however_the_kit_ends(capsys, monkeypatch, tmp_path):
    """After the first try the file has it: here Ctrl-C ends the second, where a lost machine would as well."""
    out_path, tried_names = tmp_path / "new" / "out.json", []

    def run_one(job: Job, workdir: Path) -> object:
        tried_names.append(job.name)
        if len(tried_names) == 2:
            assert [item.outcome for item in Results.load(out_path).tries] == ["passed"]
            raise KeyboardInterrupt
        return run_job(job, workdir)

    monkeypatch.setattr("validation.gpu.kit.run_job", run_one)
    assert main([*QUICK, "--backend", "onnxruntime", "--out", str(out_path)]) == 130
    assert "interrupted; what was measured so far is kept" in capsys.readouterr().err
    assert len(Results.load(out_path).tries) == 1 and [path.name for path in out_path.parent.iterdir()] == ["out.json"]


def test_an_unwritable_file_is_reported_at_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("validation.gpu.kit.run_job", lambda *_: pytest.fail("something was tried"))
    (tmp_path / "file").touch()
    assert main([*QUICK, "--backend", "onnxruntime", "--out", str(tmp_path / "file" / "out.json")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def find_gpu() -> bool:
    try:
        return not devices.find_device("cuda").is_cpu
    except UnavailableError:
        return False


def test_the_committed_page_matches_the_committed_results() -> None:
    results = [Results.load(path) for path in sorted((ROOT / "docs/reference/gpu-results").glob("*.json"))]
    results_page = ROOT / "docs/reference/gpu-results.md"
    if results:
        assert results_page.read_text() == page(results)
    else:
        assert not results_page.exists()
        assert "never run on a GPU" in (ROOT / "docs/reference/gpu-check.md").read_text()


def ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio(0.5, value, low, high, None)


ENGINE = KitTrial(
    kind="engine", model="mlp fp16", backend="tensorrt-rtx", precision="fp16", built_for="sm_90",
    options={"cuda_graphs": True}, name="x", outcome="passed", build_s=1.0, load_s=2.0,
    checks=(Check("engine", "sqnr_db", "y", "golden", math.inf, 20.0, True),),
    latency=(
        BatchLatency(
            16, {"x": (16, 8)}, 100, True, 2e-3, (Quantile(0.99, 3e-3, None, None, 100.0, 1000),),
            device=DeviceLatency(10, 1e-3, 1e-3, 1e-3),
        ),
    ),
    races=(
        PeerComparison("eager", None, 16, "faster", (ratio(0.5, 0.4, 0.6),), (1.0, 2.0), 10, 3),
        PeerComparison("compile", None, 16, "no difference shown", (ratio(1.0, 0.9, 1.1),), (1.0, 1.0), 10, 3),
        PeerComparison("compile-autotune", "out of memory"),
    ),
)  # fmt: skip


def test_each_number_is_in_its_place_on_the_page() -> None:
    peaks = Peaks(3e12, {"float16": 8e14}, 2e-6, {"fp8": "no | such"})
    trial = KitTrial(
        kind="other generation", model="mlp fp16", backend="tensorrt-rtx", precision="fp16", built_for="sm_80",
        options={}, outcome="load failed", reason="no\nkernel image",
    )  # fmt: skip
    published = OfflineTrial(
        model="digits", version="4", manifest="", golden="", engine="", build_key="", unit="sm_90 int8 x",
        created_at="", outcome="recorded",
    )  # fmt: skip
    sizes = tuple(BatchCosts(batch, 1, 1, 5e-4) for batch in (1, 16, 64))
    results = Results(
        "2026-11-22T03:00:00+00:00", HOPPER, {}, {"torch": "2.13.0"}, peaks, (ModelCosts("mlp fp16", sizes),),
        (ENGINE, trial), (Skipped("tvm", "", "tvm", "", "sm_90", "no cubin", refused=True),), (published,), 2.0, "real",
    )  # fmt: skip
    text = page([results])
    assert "## NVIDIA H100, 2026-11-22" in text and "driver 580.1 (CUDA 13.0)" in text
    assert "3000 GB/s" in text and "float16 800" in text and "fp8 (no | such)" in text
    row = next(line for line in text.splitlines() if "cuda_graphs=True" in line)
    assert "| passed | 1.00 | 2.00 | 2 | 3 | 1 | 50% |" in row
    assert "PyTorch, op by op: 0.50 times its latency [0.40, 0.60]" in row
    assert "torch.compile: no difference shown; torch.compile, max-autotune: not run, out of memory" in row
    assert "| tensorrt-rtx | sm_80 | load failed | no kernel image |" in text
    assert "| tvm | refused | no cubin |" in text and "| digits@4 sm_90 int8 x | recorded |" in text
    decoded_results = Results.from_json(json.loads(results.to_bytes()))
    assert decoded_results == results and page([decoded_results]) == text
    assert json.loads(results.to_bytes())["kind"] == "enginesmith-gpu-results"


def test_a_machine_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.find_device("cpu")
    assert device.is_cpu and device.compute_capability is None and device.memory_bytes > 1 << 28
    assert (HOPPER.target.name, HOPPER.target.product) == ("sm_90", "h100")
    assert devices.software()["numpy"] and now()[10] == "T"
