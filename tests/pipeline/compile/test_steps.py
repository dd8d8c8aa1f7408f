"""Single steps on the driver's side, with executors that do what the test says."""

import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from builders.execution.jobs import Job, Result, Watch, ignore_event
from builders.execution.local import LocalExecutor
from enginesmith.core.codec import encode
from enginesmith.core.errors import (
    DataError,
    EnginesmithError,
    InputError,
    IntegrityError,
    ModelError,
    SpecError,
    StepError,
    UnavailableError,
)
from enginesmith.core.hardware.cpu_kinds import kind_named
from enginesmith.core.types import BuildRequest, Target, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps import calibration, exports, graphs, proofs
from pipeline.compile.steps.blobs import this_machine
from pipeline.compile.steps.engines import _failure, recall_engine, reproduce
from pipeline.compile.steps.exports import ExportOutcome, FrozenGolden, recorded_export, source_digests
from pipeline.compile.steps.proofs import CRASHED
from pipeline.spec.model import load_spec
from pipeline.values import (
    Built,
    Exported,
    Graph,
    GraphVariant,
    KeptAnswers,
    Observed,
    OnnxModel,
    Proof,
    Recorded,
    Unit,
)
from tests.pipeline.projects import Project

MODEL, GOLDEN, ENGINE = "a" * 64, "b" * 64, "c" * 64
TENSOR = (TensorSpec("x", "float32", ("batch", 8)),)


class Raising:
    """An executor in which every job ends in the same error."""

    def __init__(self, error: EnginesmithError) -> None:
        self.error = error

    def run(self, job: Job, watch: Watch = ignore_event) -> NoReturn:
        raise self.error

    def cancel(self) -> None: ...


def run_context(folder: Path, error: EnginesmithError) -> RunContext:
    return RunContext(open_store(folder / "registry", create=True), Raising(error), Raising(error))


def an_engine() -> Built:
    request = BuildRequest(MODEL, "fp32", Target("cpu"), "onnxruntime", TENSOR, TENSOR, ())
    unit = Unit(request, Graph(GraphVariant("fp32"), MODEL, TENSOR, TENSOR), "build", "")
    return Built(unit, Recorded(request.key, ENGINE, 1, ".onnx", 1.0, ()))


EXPORTED = Exported(OnnxModel(MODEL, TENSOR, TENSOR, 20, carries_qdq=False), GOLDEN, Proof())


@pytest.mark.parametrize("error", [ModelError("it cannot be read"), StepError("it died", "crash")])
def test_an_engine_that_cannot_be_run_has_failed_and_stops_nobody_else(project, error):
    judged = proofs.validate(
        an_engine(), EXPORTED, Work(load_spec(project.spec), run_context(project.folder.parent, error))
    )
    assert judged.entry.status == "failed"
    assert str(error) in judged.entry.reason


@pytest.mark.parametrize(
    "error", [UnavailableError("disk full"), IntegrityError("bad blob"), StepError("stopped", "cancelled")]
)
def test_what_says_nothing_about_the_engine_ends_the_run(project: Project, error: EnginesmithError) -> None:
    with pytest.raises(type(error), match=str(error)):
        proofs.validate(an_engine(), EXPORTED, Work(load_spec(project.spec), run_context(project.folder.parent, error)))


class Measuring:
    """An executor that proves everything, and counts."""

    def __init__(self) -> None:
        self.jobs, self.answers = 0, None

    def run(self, job: Job[Proof], watch: Watch = ignore_event) -> Proof:
        self.jobs += 1
        self.answers = job.request.answers  # type: ignore[attr-defined]
        return Proof((replace(CRASHED, passed=True),))

    def cancel(self) -> None: ...


def test_a_failure_names_its_unit_once(project: Project, tmp_path: Path) -> None:
    unit = an_engine().unit
    error = StepError(f"{unit.name}: still running", "timeout")
    failed = _failure(unit, Work(load_spec(project.spec), run_context(tmp_path, error)), error)
    assert (failed.unit, failed.reason) == (unit.name, "still running")


def test_a_proof_is_not_taken_over_from_another_kind_of_cpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Measuring()
    context = RunContext(open_store(project.folder.parent / "registry", create=True), counting, counting)
    for kind, expected in (("x86-64-v4-vnni", 1), ("x86-64-v4-vnni", 1), ("x86-64-v4", 2), ("x86-64-v3", 3)):
        monkeypatch.setattr("pipeline.compile.steps.proofs.this_kind", lambda found=kind: kind_named(found))
        proofs.validate(an_engine(), EXPORTED, Work(load_spec(project.spec), context))
        assert counting.jobs == expected


def test_only_an_engine_of_the_exported_model_itself_is_proven_with_its_answers(project: Project) -> None:
    """And they are in no key: the proof is the same without them."""
    counting, kept = Measuring(), KeptAnswers("d" * 64, this_machine())
    context = RunContext(open_store(project.folder.parent / "registry", create=True), counting, counting)
    spec, exported, built = load_spec(project.spec), replace(EXPORTED, answers=kept), an_engine()
    proofs.validate(built, exported, Work(spec, context))
    assert counting.answers == kept.blob
    for change in ({"model": "e" * 64}, {"precision": "int8"}):
        other = replace(built, unit=replace(built.unit, request=replace(built.unit.request, **change)))  # type: ignore[arg-type]
        proofs.validate(other, exported, Work(spec, context))
        assert counting.answers is None
    assert counting.jobs == 3
    proofs.validate(built, EXPORTED, Work(spec, context))
    assert counting.jobs == 3


def test_the_build_key_follows_the_backends_revision(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builders.backends.tensorrt.TensorRTRTX.revision", 9)
    plan = built.run("plan", built.spec, "--json").json["units"]
    assert {unit["target"] for unit in plan if unit["action"] == "build"} == {"sm_75", "sm_89"}
    assert all("enginesmith-tensorrt-rtx: 3 -> 9" in unit["reason"] for unit in plan if unit["action"] == "build")


class Editing:
    """An executor that changes a file before it runs a job, as a person in an editor might.

    result: what comes of the job, where it is not what is looked at; None runs it.
    """

    def __init__(self, path: Path, result: object = None) -> None:
        self.path, self.local, self.result = path, LocalExecutor(), result

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> Result:
        self.path.write_bytes(self.path.read_bytes() + b" ")
        return self.result or self.local.run(job, watch)  # type: ignore[return-value]

    def cancel(self) -> None: ...


def test_a_file_that_changes_while_it_is_read_leaves_no_record(project: Project) -> None:
    write_entry_point(project)
    project.change_spec(precisions=["fp32"], calibration=None)  # whose input has another name
    store = open_store(project.registry, create=True)
    model = OnnxModel(store.put_bytes(b"model"), TENSOR, TENSOR, 20, carries_qdq=False)
    made = ExportOutcome(model, FrozenGolden(store.put_bytes(b"golden"), None, (), Proof()))
    executor = Editing(project.folder / "model.py", made)
    with pytest.raises(InputError, match="changed while they were read"):
        exports.export(Work(load_spec(project.spec), RunContext(store, executor, executor)))
    assert not list(store.list("records/export/"))


def test_calibration_data_that_changes_while_it_is_read_leaves_no_record(built: Project) -> None:
    store = open_store(built.registry)
    spec = load_spec(built.spec)
    known = recorded_export(Work(spec, RunContext(store, LocalExecutor(), LocalExecutor())))
    assert known is not None
    exported = replace(known, golden=GOLDEN, proof=Proof())
    before = set(store.list("records/calibrate/"))
    np.savez(built.folder / "calibration.npz", x=np.ones((3, 8), np.float32))
    executor = Editing(built.folder / "calibration.npz")
    with pytest.raises(DataError, match="changed while it was read"):
        calibration.observe((0, 1), exported, Work(spec, RunContext(store, executor, executor)))
    assert set(store.list("records/calibrate/")) == before


def write_entry_point(project: Project, imports: str = "torch") -> None:
    text = f"import {imports}\nimport torch\n\ndef build():\n    return torch.nn.Linear(8, 10)\n"
    (project.folder / "model.py").write_text(text)
    inputs = {"input": {"shape": ["batch", 8]}}
    project.change_spec(source={"torch": "model.py:build"}, inputs=inputs, golden=None, outputs=None)


def test_the_packages_that_the_entry_point_imports_are_part_of_the_key(project: Project) -> None:
    write_entry_point(project, imports="yaml, safetensors")
    context = run_context(project.folder.parent, ModelError(""))
    found = source_digests(load_spec(project.spec), context)["packages"]
    assert found == {
        "safetensors": version("safetensors"),
        "torch": version("torch"),
        "yaml": f"PyYAML {version('PyYAML')}",
    }


def test_the_command_that_reproduces_a_failure_survives_a_shell(project: Project) -> None:
    spaced = project.spec.rename(project.folder / "my spec.yaml")
    command = reproduce(an_engine().unit, load_spec(spaced), "/a registry")
    assert shlex.split(command)[:5] == ["enginesmith", "build", str(spaced), "--registry", "/a registry"]


def test_an_engine_is_recalled_as_it_was_recorded_and_a_record_that_cannot_be_read_is_forgotten(tmp_path: Path) -> None:
    context, request = run_context(tmp_path, ModelError("")), an_engine().unit.request
    engine = context.store.put_bytes(b"engine")
    told = Recorded(request.key, engine, 6, ".onnx", 1.0, ())
    context.remember("build", {"build": request.key}, encode(told), [engine])
    assert recall_engine(request, context) == told
    context.remember("build", {"build": request.key}, {"digest": engine, "size_bytes": 6}, [engine])
    assert recall_engine(request, context) is None, "it is built again"


def test_overrides_of_a_model_that_its_author_quantized_are_no_silent_wish(project: Project, tmp_path: Path) -> None:
    project.change_spec(quantization={"overrides": [{"match": "MatMul", "precision": "fp16"}]})
    spec, context = load_spec(project.spec), run_context(tmp_path, StepError("nothing runs"))
    quantized = replace(EXPORTED, model=replace(EXPORTED.model, carries_qdq=True))
    with pytest.raises(InputError, match=r"'MatMul' changes nothing.*remove the overrides"):
        graphs.quantize(GraphVariant("int8"), quantized, None, {}, Work(spec, context))
    assert graphs.quantize(GraphVariant("fp32"), quantized, None, {}, Work(spec, context)).model == MODEL
    project.change_spec(quantization=None)
    assert (
        graphs.quantize(GraphVariant("int8"), quantized, None, {}, Work(load_spec(project.spec), context)).model
        == MODEL
    )


def test_a_large_model_file_is_parsed_where_its_memory_has_a_limit(project, tmp_path, monkeypatch):
    spec = load_spec(project.spec)
    context = run_context(tmp_path, StepError("a process of its own"))
    assert list(source_digests(spec, context)["files"]) == ["tiny.onnx"]
    monkeypatch.setattr("pipeline.compile.steps.exports._HERE_BYTES", 10)
    fresh = run_context(tmp_path / "other", StepError("a process of its own"))
    with pytest.raises(StepError, match="a process of its own"):
        source_digests(spec, fresh)
    real = RunContext(fresh.store, LocalExecutor(), LocalExecutor())
    assert source_digests(spec, real) == source_digests(spec, context)


def test_parts_that_the_cluster_cannot_see_are_observed_here(project: Project) -> None:
    """A node without the samples says so by None; one with other samples by a DataError."""
    project.change_spec(calibration={"data": "calibration.npz", "parts": 2})
    spec = load_spec(project.spec)

    class Blind:
        def __init__(self, answer: object) -> None:
            self.answer, self.asked = answer, 0

        def run(self, job: Job, watch: Watch = ignore_event) -> object:
            self.asked += 1
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        def cancel(self) -> None: ...

    for index, answer in enumerate((None, DataError("calibration.npz changed while it was read"))):
        store = open_store(project.folder.parent / f"registry {index}", create=True)
        seen = Observed(store.put_bytes(b"x"), store.put_bytes(b""), "y", 3)
        local, cluster = Blind(seen), Blind(answer)
        assert calibration.observe((0, 2), EXPORTED, Work(spec, RunContext(store, local, cluster))) == seen
        assert (cluster.asked, local.asked) == (1, 1)
        assert calibration.observe((0, 1), EXPORTED, Work(spec, RunContext(store, local, cluster))) == seen
        assert cluster.asked == 1, "a single part stays here"


def test_mistakes_are_looked_for_where_there_is_work_and_not_again(built, monkeypatch):
    def found(_: object) -> None:
        raise SpecError(["looked"])

    monkeypatch.setattr("pipeline.compile.preflight.check_files", found)
    assert built.build().json["cached"]
    data = dict(np.load(built.folder / "calibration.npz"))
    np.savez(built.folder / "calibration.npz", **{name: array[:-1] for name, array in data.items()})
    again = built.build()
    assert again.code == 2 and "looked" in again.err
