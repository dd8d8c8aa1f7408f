import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.execution.jobs import Job, Watch, ignore_event
from builders.execution.local import LocalExecutor
from enginesmith.core import errors
from enginesmith.core.codec import encode
from enginesmith.core.hardware.cpu_kinds import kind_named
from enginesmith.core.types import BuildRequest, Target, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline import values
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps import calibration, exports, graphs, proofs
from pipeline.compile.steps.blobs import this_machine
from pipeline.compile.steps.engines import _failure, recall_engine, reproduce
from pipeline.compile.steps.exports import ExportOutcome, FrozenGolden, recorded_export, source_digests
from pipeline.compile.steps.proofs import CRASHED
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project, raising

MODEL, GOLDEN, ENGINE = "a" * 64, "b" * 64, "c" * 64
TENSOR = (TensorSpec("x", "float32", ("batch", 8)),)


class Answering:
    """An executor whose jobs give what the test says: `answer` of the job, which may raise."""

    def __init__(self, answer: Callable[[Job], Any]) -> None:
        self.answer = answer

    def run(self, job: Job, watch: Watch = ignore_event) -> Any:
        return self.answer(job)

    def cancel(self) -> None: ...


def answering(folder: Path, answer: Callable[[Job], Any]) -> RunContext:
    return RunContext(open_store(folder / "registry", create=True), Answering(answer), Answering(answer))


def run_context(folder: Path, error: errors.EnginesmithError) -> RunContext:
    return answering(folder, raising(error))


def an_engine() -> values.Built:
    request = BuildRequest(MODEL, "fp32", Target("cpu"), "onnxruntime", TENSOR, TENSOR, ())
    unit = values.Unit(request, values.Graph(values.GraphVariant("fp32"), MODEL, TENSOR, TENSOR), "build", "")
    return values.Built(unit, values.Recorded(request.key, ENGINE, 1, ".onnx", 1.0, ()))


EXPORTED = values.Exported(values.OnnxModel(MODEL, TENSOR, TENSOR, 20, carries_qdq=False), GOLDEN, values.Proof())


@pytest.mark.parametrize("error", [errors.ModelError("it cannot be read"), errors.StepError("it died", "crash")])
def test_an_engine_that_cannot_run_fails_and_does_not_stop_others(project, error):
    judged_result = proofs.validate(
        an_engine(), EXPORTED, Work(load_spec(project.spec), run_context(project.folder.parent, error))
    )
    assert judged_result.entry.status == "failed"
    assert str(error) in judged_result.entry.reason


@pytest.mark.parametrize(
    "error",
    [errors.UnavailableError("disk full"), errors.IntegrityError("bad blob"), errors.StepError("stopped", "cancelled")],
)
def test_errors_unrelated_to_the_engine_end_the_run(project: Project, error: errors.EnginesmithError) -> None:
    with pytest.raises(type(error), match=str(error)):
        proofs.validate(an_engine(), EXPORTED, Work(load_spec(project.spec), run_context(project.folder.parent, error)))


def proving(folder: Path) -> tuple[RunContext, list[str | None]]:
    """Every proof passes; the answers that each job had."""
    requests: list[str | None] = []
    proof = values.Proof((replace(CRASHED, passed=True),))
    return answering(folder, lambda job: requests.append(job.request.answers) or proof), requests


def test_a_failure_names_its_unit_once(project: Project, tmp_path: Path) -> None:
    unit = an_engine().unit
    error = errors.StepError(f"{unit.name}: still running", "timeout")
    failure = _failure(unit, Work(load_spec(project.spec), run_context(tmp_path, error)), error)
    assert (failure.unit, failure.reason) == (unit.name, "still running")


def test_a_proof_from_another_kind_of_cpu_is_not_reused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    context, proof_requests = proving(project.folder.parent)
    for kind, expected in (("x86-64-v4-vnni", 1), ("x86-64-v4-vnni", 1), ("x86-64-v4", 2), ("x86-64-v3", 3)):
        monkeypatch.setattr("pipeline.compile.steps.proofs.this_kind", lambda name=kind: kind_named(name))
        proofs.validate(an_engine(), EXPORTED, Work(load_spec(project.spec), context))
        assert len(proof_requests) == expected


def test_only_engines_of_the_exported_model_reuse_its_answers(project: Project) -> None:
    """And they are in no key: the proof is the same without them."""
    (context, requests), kept_answers = proving(project.folder.parent), values.KeptAnswers("d" * 64, this_machine())
    spec, export_value, engine = load_spec(project.spec), replace(EXPORTED, answers=kept_answers), an_engine()
    proofs.validate(engine, export_value, Work(spec, context))
    for change in ({"model": "e" * 64}, {"precision": "int8"}):
        other_engine = replace(engine, unit=replace(engine.unit, request=replace(engine.unit.request, **change)))
        proofs.validate(other_engine, export_value, Work(spec, context))
    proofs.validate(engine, EXPORTED, Work(spec, context))
    assert requests == [kept_answers.blob, None, None]


def test_the_build_key_follows_the_backends_revision(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builders.backends.tensorrt.TensorRTRTX.revision", 9)
    plan = built.run("plan", built.spec, "--json").json["units"]
    assert {unit["target"] for unit in plan if unit["action"] == "build"} == {"sm_75", "sm_89"}
    assert all("enginesmith-tensorrt-rtx: 4 -> 9" in unit["reason"] for unit in plan if unit["action"] == "build")


def editing(path: Path, result: object = None) -> Answering:
    """A file changes before a job runs. result: what comes of a job that is not what is looked at; None runs it."""

    def answer(job: Job) -> Any:
        path.write_bytes(path.read_bytes() + b" ")
        return result or LocalExecutor().run(job)

    return Answering(answer)


def test_a_file_that_changes_while_it_is_read_leaves_no_record(project: Project) -> None:
    write_entry_point(project)
    project.change_spec(precisions=["fp32"], calibration=None)  # whose input has another name
    store = open_store(project.registry, create=True)
    model = values.OnnxModel(store.put_bytes(b"model"), TENSOR, TENSOR, 20, carries_qdq=False)
    outcome = ExportOutcome(model, FrozenGolden(store.put_bytes(b"golden"), None, (), values.Proof()))
    executor = editing(project.folder / "model.py", outcome)
    with pytest.raises(errors.InputError, match="changed while they were read"):
        exports.export(Work(load_spec(project.spec), RunContext(store, executor, executor)))
    assert not list(store.list("records/export/"))


def test_calibration_data_that_changes_while_it_is_read_leaves_no_record(built: Project) -> None:
    store = built.store
    spec = load_spec(built.spec)
    record = recorded_export(Work(spec, RunContext(store, LocalExecutor(), LocalExecutor())))
    assert record is not None
    exported_record = replace(record, golden=GOLDEN, proof=values.Proof())
    text_before = set(store.list("records/calibrate/"))
    np.savez(built.folder / "calibration.npz", x=np.ones((3, 8), np.float32))
    executor = editing(built.folder / "calibration.npz")
    with pytest.raises(errors.DataError, match="changed while it was read"):
        calibration.observe((0, 1), exported_record, Work(spec, RunContext(store, executor, executor)))
    assert set(store.list("records/calibrate/")) == text_before


def write_entry_point(project: Project, imports: str = "torch") -> None:
    text = f"import {imports}\nimport torch\n\ndef build():\n    return torch.nn.Linear(8, 10)\n"
    (project.folder / "model.py").write_text(text)
    inputs = {"input": {"shape": ["batch", 8]}}
    project.change_spec(source={"torch": "model.py:build"}, inputs=inputs, golden=None, outputs=None)


def test_the_packages_that_the_entry_point_imports_are_part_of_the_key(project: Project) -> None:
    write_entry_point(project, imports="yaml, safetensors")
    context = run_context(project.folder.parent, errors.ModelError(""))
    assert source_digests(load_spec(project.spec), context)["packages"] == {
        "safetensors": version("safetensors"),
        "torch": version("torch"),
        "yaml": f"PyYAML {version('PyYAML')}",
    }


def test_the_command_that_reproduces_a_failure_survives_a_shell(project: Project) -> None:
    spaced_path = project.spec.rename(project.folder / "my spec.yaml")
    command = reproduce(an_engine().unit, load_spec(spaced_path), "/a registry")
    assert shlex.split(command)[:5] == ["enginesmith", "build", str(spaced_path), "--registry", "/a registry"]


def test_an_engine_is_recalled_unchanged_and_an_unreadable_record_is_forgotten(tmp_path: Path) -> None:
    context, request = run_context(tmp_path, errors.ModelError("")), an_engine().unit.request
    engine = context.store.put_bytes(b"engine")
    message = values.Recorded(request.key, engine, 6, ".onnx", 1.0, ())
    context.remember("build", {"build": request.key}, encode(message), [engine])
    assert recall_engine(request, context) == message
    context.remember("build", {"build": request.key}, {"digest": engine, "size_bytes": 6}, [engine])
    assert recall_engine(request, context) is None, "it is built again"


def test_overrides_of_a_quantized_model_are_reported(project: Project, tmp_path: Path) -> None:
    project.change_spec(quantization={"overrides": [{"match": "MatMul", "precision": "fp16"}]})
    spec, context = load_spec(project.spec), run_context(tmp_path, errors.StepError("nothing runs"))
    quantized = replace(EXPORTED, model=replace(EXPORTED.model, carries_qdq=True, narrow_share=0.02))
    with pytest.raises(errors.InputError, match=r"'MatMul' changes nothing.*remove the overrides"):
        graphs.quantize(values.GraphVariant("int8"), quantized, None, {}, Work(spec, context))
    assert graphs.quantize(values.GraphVariant("fp32"), quantized, None, {}, Work(spec, context)).model == MODEL
    project.change_spec(quantization=None)
    graph = graphs.quantize(values.GraphVariant("int8"), quantized, None, {}, Work(load_spec(project.spec), context))
    assert (graph.model, graph.share, graph.idle) == (MODEL, 0.02, None), "a small share is told, and built as it came"


def test_a_large_model_file_is_parsed_within_a_memory_limit(project, tmp_path, monkeypatch):
    spec = load_spec(project.spec)
    context = run_context(tmp_path, errors.StepError("a process of its own"))
    assert list(source_digests(spec, context)["files"]) == ["tiny.onnx"]
    monkeypatch.setattr("pipeline.compile.steps.exports._HERE_BYTES", 10)
    fresh_context = run_context(tmp_path / "other", errors.StepError("a process of its own"))
    with pytest.raises(errors.StepError, match="a process of its own"):
        source_digests(spec, fresh_context)
    real_context = RunContext(fresh_context.store, LocalExecutor(), LocalExecutor())
    assert source_digests(spec, real_context) == source_digests(spec, context)


def test_parts_that_the_cluster_cannot_see_are_observed_here(project: Project) -> None:
    """A node without the samples says so by None; one with other samples by a DataError."""
    project.change_spec(calibration={"data": "calibration.npz", "parts": 2})
    spec = load_spec(project.spec)

    for index, error in enumerate((None, errors.DataError("calibration.npz changed while it was read"))):
        parts: list[str] = []

        def blind(_: Job, asked: list[str] = parts, error: Exception | None = error) -> None:
            asked.append("cluster")
            if error:
                raise error

        store = open_store(project.folder.parent / f"registry {index}", create=True)
        seen = values.Observed(store.put_bytes(b"x"), store.put_bytes(b""), "y", 3)
        local, cluster = Answering(lambda _, asked=parts, seen=seen: asked.append("here") or seen), Answering(blind)
        assert calibration.observe((0, 2), EXPORTED, Work(spec, RunContext(store, local, cluster))) == seen
        assert parts == ["cluster", "here"]
        assert calibration.observe((0, 1), EXPORTED, Work(spec, RunContext(store, local, cluster))) == seen
        assert parts == ["cluster", "here", "here"], "a single part stays here"


def test_mistakes_are_searched_once_and_only_with_work(built, monkeypatch):
    monkeypatch.setattr("pipeline.compile.preflight.check_files", raising(errors.SpecError(["looked"])))
    assert built.build().json["cached"]
    data = dict(np.load(built.folder / "calibration.npz"))
    np.savez(built.folder / "calibration.npz", **{name: array[:-1] for name, array in data.items()})
    second_build = built.build()
    assert second_build.code == 2 and "looked" in second_build.err
