"""What is tried, on which machine; and what becomes of each try. Here over a stand-in and TensorRT-RTX's own builds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.cpu_kinds import CPU
from tests.validation.gpu.fakes import HOPPER, Fake, register
from validation.golden.golden_set import freeze
from validation.gpu.cases import TrialTerms, TryEngine, save_cases
from validation.gpu.devices import find_device
from validation.gpu.models import BuildTask, KitModel, other_tasks, own_tasks, write
from validation.gpu.results import Skipped, TrialOutcome
from validation.limits.noise_floor import DoubleSession

TERMS = TrialTerms("cpu", 0.01, Path())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> KitModel:
    folder = tmp_path_factory.mktemp("kit")
    graph_path = write("mlp", "fp32", "small", folder)
    golden = freeze([graph_path.sample(2)], graph_path.inputs, [graph_path.batch], DoubleSession(graph_path.path).run)
    save_cases(golden, "a" * 64, folder)
    return graph_path


def tried(task: BuildTask, model: KitModel, workdir: Path, **options: Any) -> TrialOutcome:
    entries = {**task.options, **options}
    trial = TryEngine(task.request, entries, CPU, model.path, model.path.parent, TERMS)
    return trial.run(WorkerContext(workdir))


@pytest.mark.parametrize(
    ("how", "outcome", "message"),
    [
        ("right", "passed", "15 checks passed"),
        ("wrong", "wrong", "engine max_rel of y"),
        ("no build", "build failed", "the compiler says no"),
        ("no load", "load failed", "no kernel image for cpu"),
        ("no run", "run failed", "illegal memory access"),
    ],
)
def test_a_trial_records_its_stage_and_message(how, outcome, message, model, tmp_path, monkeypatch):
    register(monkeypatch)
    (task, _) = own_tasks([model], HOPPER)
    assert isinstance(task, BuildTask)
    result = tried(task, model, tmp_path, how=how)
    assert result.outcome == outcome and message in str(result.reason), result
    assert (result.latency is not None) is (how == "right"), "a wrong engine's speed is not worth a look"
    if how == "right":
        rows = result.latency
        assert rows and [row.batch for row in rows] == [1, 2, 4]
        assert rows[0].device and rows[0].device.median_s == pytest.approx(5.5e-3) and rows[0].runs > 3
        assert result.notes == ("sm_90",), "it is built for its target, and presented as this device's"


def test_each_backends_answer_is_stored(model: KitModel, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "onnxruntime", "tensorrt", "tensorrt-rtx")
    actual = list(own_tasks([model], HOPPER))
    tasks = [item for item in actual if isinstance(item, BuildTask)]
    assert [(item.name, dict(item.options)) for item in tasks] == [
        ("fake mlp fp32 sm_90", {}), ("fake mlp fp32 sm_90 cuda_graphs=True", {"cuda_graphs": True})
    ]  # fmt: skip
    reason = {item.backend: (item.refused, item.reason) for item in actual if isinstance(item, Skipped)}
    assert reason["onnxruntime"] == (False, "builds no engines for sm_90")
    assert reason["tensorrt"][1].startswith("not installed; ")
    assert reason["tensorrt-rtx"][0] and "sm_90" in reason["tensorrt-rtx"][1]
    assert tasks[1].request.key != tasks[0].request.key
    with pytest.raises(UnknownNameError):
        list(own_tasks([model], HOPPER, ["fak"]))


def test_engines_for_every_other_generation_are_tried(model: KitModel, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "tensorrt-rtx")
    actual = list(other_tasks(model, HOPPER))
    built_for = [item.request.target.sm for item in actual if isinstance(item, BuildTask) and "rtx" in item.name]
    assert built_for == ["sm_80", "sm_86", "sm_89", "sm_120", "sm_121"], "fp32 is refused for sm_75"
    refused_texts = {item.built_for for item in actual if isinstance(item, Skipped)}
    assert {"sm_75", "sm_100", "sm_103"} == refused_texts
    assert "sm_90" not in {item.request.target.sm for item in actual if isinstance(item, BuildTask)}
    assert not list(other_tasks(model, find_device("cpu")))
    assert list(other_tasks(model, HOPPER, ["fake"]))
    monkeypatch.setattr(Fake, "capabilities", replace(Fake.capabilities, tunes_on_target=True))
    assert not list(other_tasks(model, HOPPER, ["fake"])), "it needs that GPU to build"
