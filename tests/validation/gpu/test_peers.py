from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import DataError, StepError, UnavailableError
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.types import BuildRequest
from validation.golden.golden_set import freeze
from validation.gpu import cases
from validation.gpu.cases import save_cases
from validation.gpu.kit import _describe_end
from validation.gpu.models import request_for, write
from validation.gpu.peers import TorchSession
from validation.gpu.results import Peaks, PeerComparison, TrialOutcome, measure_peaks, seconds_of
from validation.limits.noise_floor import DoubleSession

torch = pytest.importorskip("torch")


def test_a_pytorch_session_has_arrays_and_device_times(tmp_path: Path) -> None:
    """That it runs the very graph is seen in test_kit, where it is exported on a bare machine."""
    model = write("mlp", "fp32", "small", tmp_path)
    request = BuildRequest("", "fp32", CPU, "torch", model.inputs, model.outputs, (model.profile,))
    session = TorchSession(request, lambda x: (2 * x,), "cpu")
    inputs = model.sample(3)
    assert np.array_equal(session.run(inputs)["y"], 2 * inputs["x"])
    assert len(session.device_seconds(inputs, 5)) == 5
    with pytest.raises(DataError, match="is float64"):
        session.run({"x": inputs["x"].astype(np.float64)})


def test_a_failing_peer_costs_no_number_of_the_engine(tmp_path, monkeypatch):
    def made(peer: str, *_: object) -> Callable[..., Any]:
        if peer == "eager":
            return lambda x: (x + 1,)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(cases, "make_peer", made)
    model = write("mlp", "fp32", "small", tmp_path)
    golden = freeze([model.sample(2)], model.inputs, [model.batch], DoubleSession(model.path).run)
    save_cases(golden, "a" * 64, tmp_path)
    request = request_for(discovery.configure("onnxruntime", {}), model, CPU)
    terms = cases.TrialTerms("cpu", 0.02, tmp_path, ("eager", "compile"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    result = cases.TryEngine(request, {}, CPU, model.path, tmp_path, terms).run(WorkerContext(tmp_path))
    eager_judgement, races = result.races or ()
    assert result.outcome == "passed" and eager_judgement.verdict in ("faster", "slower", "no difference shown")
    assert eager_judgement.runs and eager_judgement.runs > 1 and eager_judgement.batch == 2
    assert races == PeerComparison("compile", "RuntimeError: CUDA error: out of memory")


def test_measured_roofs_bound_a_runs_time() -> None:
    precision_before = torch.backends.cuda.matmul.fp32_precision
    actual = measure_peaks("cpu")
    assert torch.backends.cuda.matmul.fp32_precision == precision_before
    assert actual.bytes_per_s > 1e7 and actual.launch_s > 0
    assert actual.operations_per_s.keys() | actual.missing.keys() == {"float32", "float16", "bfloat16", "int8"}
    peaks = Peaks(1e9, {"float16": 1e12}, 1e-6)
    assert peaks.least_s(1e12, 1e6, "float16") == 1.0, "bound by operations"
    assert peaks.least_s(1e6, 1e9, "float16") == 1.0, "bound by bytes"
    assert peaks.least_s(1e6, 1e9, "fp4") is None


class _Event:
    """As much of torch.cuda.Event as is used; each record is a millisecond after the last."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Event.now += 1.0
        self.at = _Event.now

    def elapsed_time(self, other: "_Event") -> float:
        return other.at - self.at


def test_gpu_seconds_are_measured_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, waited_counts = [], []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited_counts.append(len(calls)))
    assert seconds_of(lambda: calls.append(1), "cuda", 4) == pytest.approx([1e-3] * 4)
    assert len(calls) == 5 and waited_counts == [5], "one before, and read after all are done"


def test_only_a_signal_counts_against_the_engine() -> None:
    outcomes = {
        kind: _describe_end(StepError("x", kind, "a\nb")).outcome for kind in ("crash", "timeout", "memory", "error")
    }
    assert outcomes == {
        "crash": "crashed",
        "timeout": "not finished",
        "memory": "not finished",
        "error": "not finished",
    }
    assert _describe_end(UnavailableError("no driver")) == TrialOutcome(outcome="not finished", reason="no driver")
    killed_text = _describe_end(StepError("killed by SIGSEGV", "crash", "1\n2\n3\n4\n"))
    assert killed_text.reason == "killed by SIGSEGV | 2 | 3 | 4"
