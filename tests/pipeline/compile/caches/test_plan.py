"""Compile caches as units of a plan: where they are made, which are refused, what a build does of them elsewhere."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from builders.execution.jobs import Job, Result, Watch, ignore_event
from builders.execution.local import LocalExecutor
from enginesmith.core.errors import EnginesmithError, SpecError, StepError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.registry.store.base import open_store
from pipeline.compile.caches.make_cache import MakeCache, check_worker
from pipeline.compile.caches.maker import CPU_LABEL, wanted_runtimes
from pipeline.compile.caches.plan import check_required_caches, needs_of, plan_caches
from pipeline.compile.caches.step import make_cache
from pipeline.compile.composition import Run
from pipeline.compile.forecast import foresee, on_record, open_records
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.exports import export
from pipeline.orchestration.runs.recorder import new_run, new_tracker
from pipeline.progress.events import PlannedCaches
from pipeline.spec.model import ModelSpec, load_spec
from pipeline.values import Selection
from tests.pipeline.compile.caches.test_build import MAY_FAIL
from tests.pipeline.compile.caches.test_make_cache import NET, SPEC

ALL = Selection()
(ARM,), (CPU,) = parse_targets("arm64"), parse_targets("cpu")


def write_spec(folder: Path, more: str = "", targets: str = "[cpu]") -> ModelSpec:
    (folder / "net.py").write_text(NET.format(factor=2))
    text = SPEC.format(source="{torch: 'net.py:build'}").replace("[cpu]", targets)
    (folder / "net.yaml").write_text(f"{text}backends: {{onnxruntime: {{}}}}\n{more}")
    return load_spec(folder / "net.yaml")


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry in which the export is on record, to be copied: it takes seconds, and is not what is looked at."""
    folder = tmp_path_factory.mktemp("exported")
    export(Work(write_spec(folder), context_of(folder, Cluster())))
    return folder / "registry"


class Cluster:
    """An executor whose machine does not see the spec's folder."""

    def __init__(self, error: EnginesmithError | None = None) -> None:
        self.jobs: list[Job[object]] = []
        self._error, self._inner = error, LocalExecutor(1)

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> Result:
        self.jobs.append(job)
        if self._error:
            raise self._error
        assert isinstance(job.request, MakeCache)
        model = replace(job.request.model, root=Path("/nowhere"))
        return self._inner.run(replace(job, request=replace(job.request, model=model)), watch)

    def cancel(self) -> None: ...


def context_of(folder: Path, cluster: Cluster) -> RunContext:
    store = open_store(str(folder / "registry"), create=True)
    return RunContext(store, LocalExecutor(1), cluster, remote=True)


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_spec_makes_the_cache_once(tmp_path: Path) -> None:
    spec, cluster = write_spec(tmp_path), Cluster()
    context = context_of(tmp_path, cluster)
    exported = export(Work(spec, context))
    (unit,) = plan_caches(spec, ALL, exported, context)
    assert (unit.action, unit.name) == ("build", "cpu fp32 torch-compile") and "on a node" in unit.reason
    entry = make_cache(unit, spec, exported, context).entry
    assert entry.status == "proven" or entry.reason.startswith(MAY_FAIL), entry.reason
    assert entry.cpu and [item.kind for item in entry.requires] == ["cpu", "runtime", "installation"]
    (again,) = plan_caches(spec, ALL, exported, context)
    assert again.action == "cached"
    assert make_cache(again, spec, exported, context).entry.notes == entry.notes and len(cluster.jobs) == 1
    (here,) = plan_caches(spec, ALL, exported, replace(context, remote=False))
    assert here.action == "build"  # what the cluster made is no cache of this machine


def test_one_that_fails_elsewhere_keeps_its_reason_and_stops_nothing(tmp_path: Path, exported_once: Path) -> None:
    shutil.copytree(exported_once, tmp_path / "registry")
    spec, cluster = write_spec(tmp_path, targets="[arm64, l4]"), Cluster(StepError("no node", "no-node"))
    context = context_of(tmp_path, cluster)
    exported = export(Work(spec, context))
    made = [make_cache(unit, spec, exported, context) for unit in plan_caches(spec, ALL, exported, context)]
    assert [(item.entry.status, item.entry.reason) for item in made] == [("failed", "no node")] * 2
    assert [job.needs.labels for job in cluster.jobs] == [
        {CPU_LABEL: "arm64"},
        {"enginesmith/sm": "sm_89", "enginesmith/product": "l4"},
    ]
    assert [(job.needs.gpus, job.needs.required) for job in cluster.jobs] == [(0, True), (1, True)]
    assert not needs_of(CPU, 0).required


def test_a_worker_of_another_kind_or_with_other_versions_refuses() -> None:
    with pytest.raises(EnginesmithError, match=rf"torch compiles for this CPU.*{CPU_LABEL}=KIND"):
        check_worker(ARM, wanted_runtimes())
    with pytest.raises(EnginesmithError, match="install the same versions on every node"):
        check_worker(CPU, {"torch": "1.0"})
    check_worker(CPU, wanted_runtimes())


def test_a_plan_lists_caches_before_and_after_the_export(tmp_path: Path, exported_once: Path) -> None:
    spec = write_spec(tmp_path, targets="[cpu, arm64]")
    nothing_yet = open_records(open_store(str(tmp_path / "empty"), create=True))
    run = Run(spec, nothing_yet)
    before = foresee(on_record(run), run)
    assert [unit.action for unit in before.caches] == ["unknown", "refused"]
    context = RunContext(open_store(str(exported_once)), LocalExecutor(1), LocalExecutor(1))
    records = open_records(context.store)
    run = Run(spec, records)
    after = foresee(on_record(run), run)
    assert [unit.action for unit in after.caches] == ["build", "refused"] and after.count("build") >= 1
    rows = [row for row in after.to_json()["units"] if row["backend"] == "torch-compile"]
    assert [bool(row["build_key"]) for row in rows] == [True, False]
    tracker = new_tracker(new_run("net", "net.yaml", context.store))
    tracker.emit(PlannedCaches(after.caches))
    states = [(item.backend, item.state) for item in tracker.snapshot("").items]
    assert states == [("torch-compile", "planned"), ("torch-compile", "refused")]


def test_a_required_cache_that_is_refused_stops_the_run_before_anything_is_built(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "build: {required: [arm64 fp32 torch-compile]}", "[cpu, arm64]")
    records = open_records(open_store(str(tmp_path / "registry"), create=True))
    with pytest.raises(EnginesmithError, match="arm64 fp32 torch-compile: torch compiles for this CPU"):
        check_required_caches(plan_caches(spec, ALL, None, records))
    check_required_caches(plan_caches(spec, ALL, None, replace(records, remote=True)))
    with pytest.raises(SpecError, match="covers no unit of this spec"):
        write_spec(tmp_path, "build: {required: [cpu int8 torch-compile]}")
