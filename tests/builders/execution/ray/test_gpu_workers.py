import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from builders.execution.jobs import Needs, ProcessLimits
from builders.execution.local import LocalExecutor
from builders.execution.ray import RayExecutor
from enginesmith import cli
from enginesmith.core.errors import StepError, canonical_json, digest_of
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.recording.recorder import ObservationLog
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import publish
from pipeline.canary.automatic import CanaryRequest
from pipeline.compile.run_context import RunContext
from pipeline.operations.validate import Pending, list_pending, pending_of
from pipeline.orchestration import gpu_workers
from pipeline.orchestration.gpu_workers import canary_on_worker, validate_on_worker
from pipeline.progress import Progress
from pipeline.progress.events import Event, Started
from tests.builders.execution.ray.test_fleet import raylets
from tests.calls import call_job
from tests.enginesmith.registries import approval, report
from tests.pipeline.orchestration.flows.server import until
from tests.pipeline.projects import Project, write_project
from tests.waiting import PATIENCE_S

pytest.importorskip("ray")
pytestmark = pytest.mark.server
L4, B300 = (parse_targets(name)[0] for name in ("l4", "b300"))


class Places(Progress):
    def __init__(self) -> None:
        self.started_on: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started_on.append(f"{event.name}: {event.where.partition(' ')[0]}")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with two versions, of which the second has an engine for a GPU, too; stable serves the first."""
    place = tmp_path_factory.mktemp("built")
    write_project(place / "project")
    project = Project(place / "project")
    for targets in (["cpu"], ["cpu", "sm_89"]):
        project.change_spec(precisions=["fp32"], targets=targets, calibration=None)
        with pytest.raises(SystemExit) as error:
            cli.main(["build", str(project.spec), "--registry", str(project.registry)])
        assert not error.value.code
    store = open_store(project.registry)
    channels.promote(store, load(store, "tiny", "1"), "stable")
    return project.registry


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Store:
    shutil.copytree(built, tmp_path / "registry")
    return open_store(tmp_path / "registry")


def unproven(store: Store) -> Pending:
    """Version 2 once more, as a machine that could not run its engine would have published it."""
    manifest = load(store, "tiny", "2")
    [cpu] = [entry for entry in manifest.engines if entry.hardware.is_cpu]
    entry = replace(cpu, status="unproven", reason="no such machine")
    entry = replace(entry, report=store.put_bytes(canonical_json(report(entry).to_json())))
    draft = replace(manifest, version="", content=digest_of("again"), engines=())
    version = publish(store, draft, [(entry, approval(entry))]).version
    return pending_of(store, "tiny", version)


def put_traffic(folder: Path, apart_s: float) -> str:
    folder.mkdir()
    x = np.random.default_rng(5).normal(size=(60, 1, 8)).astype(np.float32)
    np.savez(folder / "tiny.npz", at=np.arange(60) * apart_s, x=x)
    return str(folder)


@pytest.fixture
def context(store: Store, executor: RayExecutor, generations: None) -> RunContext:
    return RunContext(store, LocalExecutor(), executor, Places())


@pytest.fixture
def on_l4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries of CPU engines are placed as if they were for an l4."""
    monkeypatch.setattr(gpu_workers, "gpu_named", lambda _: L4)


@pytest.mark.slow
def test_an_engine_is_proven_on_a_worker_of_its_gpu_and_the_registry_has_the_report(store, context):
    item = unproven(store)
    assert [entry.status for entry in judge_entries(store, item.manifest)] == ["unproven"]
    [row] = validate_on_worker(item, L4, context)
    assert (row.verdict, row.reference, row.unit) == ("proven", "tiny@3", "cpu fp32 onnxruntime")
    assert context.progress.started_on == ["prove tiny@3 on l4: sm_89"]
    assert [entry.status for entry in judge_entries(store, item.manifest)] == ["proven"]


@pytest.mark.slow
def test_a_worker_reports_engines_that_it_cannot_run(store, context):
    [item] = list_pending(store, on=L4)
    assert [entry.unit for entry in item.engines] == ["sm_89 fp32 tensorrt-rtx"]
    [row] = validate_on_worker(item, L4, context)
    assert (row.verdict, row.reason) == ("unproven", "no sm_89 GPU on this machine"), "the fleet's GPUs are numbers"


@pytest.mark.slow
def test_a_canary_runs_both_engines_in_one_task_with_requests_in_flight(store, context, on_l4, tmp_path):
    traffic = put_traffic(tmp_path / "traffic", 1 / 2000)
    with ObservationLog(tmp_path / "traffic" / "tiny.observed.jsonl") as log:
        for index in range(9):
            log.append(0.0025, time_s=index / 1000)
    output: list[str] = []
    done = canary_on_worker(CanaryRequest("tiny", "2", traffic=traffic, target="cpu"), context, output.append)
    assert context.progress.started_on == ["canary tiny@2 on l4: sm_89"]
    assert done.report and done.report.traffic.in_flight == 3
    assert [line.startswith("judged after 60 of 60 requests: ") for line in output] == [True], "as the worker said it"
    [row] = canaries(store, load(store, "tiny", "2"))
    assert (row.verdict, row.report) == (done.report.verdict, done.blob) and row.verdict in ("INSUFFICIENT", "FAIL")


@pytest.mark.slow
def test_a_gpu_without_a_group_is_named_with_the_remedy(store, context):
    with pytest.raises(StepError) as error:
        validate_on_worker(unproven(store), B300, context)
    assert error.value.kind == "no-node"
    for words in ("no node with enginesmith/product=b300 and enginesmith/sm=sm_103 and 1 GPU", "`gpuGroups`"):
        assert words in str(error.value)


def engines_below(process: psutil.Process) -> list[psutil.Process]:
    """The engines of canaries: processes that multiprocessing started."""
    items = []
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            items += [child] if "multiprocessing.spawn" in " ".join(child.cmdline()) else []
    return items


@pytest.mark.slow
def test_a_cancelled_canary_ends_both_engines_and_releases_the_gpu(
    fleet, generations, executor, store, on_l4, tmp_path
):
    traffic = put_traffic(tmp_path / "traffic", 1.0)
    raylet = psutil.Process(raylets(fleet)["sm_89"])
    with RayExecutor(fleet.address) as own_executor, ThreadPoolExecutor(1) as pool:
        context = RunContext(store, LocalExecutor(), own_executor)
        expected = CanaryRequest("tiny", "2", traffic=traffic, target="cpu")
        running_future = pool.submit(canary_on_worker, expected, context, print)
        try:
            both_value = until("both engines are open", lambda: len(result := engines_below(raylet)) == 2 and result)
        finally:
            own_executor.cancel()
        with pytest.raises(StepError) as error:
            running_future.result(PATIENCE_S)
    assert error.value.kind == "cancelled"
    assert psutil.wait_procs(both_value, timeout=PATIENCE_S)[1] == []
    needs = Needs({"enginesmith/sm": "sm_89"}, required=True, gpus=1)
    following_job = call_job("next", "tests.builders.jobs:add", {"a": 1, "b": 2}, limits=ProcessLimits(60), needs=needs)
    assert executor.run(following_job) == 3


class Failing:
    def __init__(self, kind: str) -> None:
        self._kind, self.needs = kind, []

    def run(self, job, watch=None):
        self.needs.append(job.needs)
        raise StepError(f"{job.name}: {self._kind}", self._kind)

    def cancel(self) -> None: ...


@pytest.mark.slow
def test_a_failed_task_is_its_versions_row_and_an_unstarted_one_is_not(store):
    item = unproven(store)
    for kind in ("crash", "node-lost", "timeout"):
        [row] = validate_on_worker(item, L4, RunContext(store, LocalExecutor(), failing := Failing(kind)))
        assert failing.needs == [Needs({"enginesmith/sm": "sm_89", "enginesmith/product": "l4"}, required=True, gpus=1)]
        assert (row.reference, row.verdict, row.reason) == ("tiny@3", "error", f"prove tiny@3 on l4: {kind}")
        assert not row.good
    for kind in ("cancelled", "no-node"):
        with pytest.raises(StepError, match=kind):
            validate_on_worker(item, L4, RunContext(store, LocalExecutor(), Failing(kind)))


def test_no_worker_is_requested_without_a_comparison(store, on_l4, tmp_path):
    context = RunContext(store, LocalExecutor(), Failing("a worker would start"))

    def reason(**options: object) -> str:
        result = canary_on_worker(CanaryRequest("tiny", "2", **options), context, print)
        assert result.report is None
        return result.reason

    assert reason(traffic=str(tmp_path), target="l4") == (
        "there is nothing to run on l4: tiny@1 has no engine for sm_89 (l4): it has engines for cpu"
    )
    assert "no recorded traffic is named" in reason(target="l4")
    (tmp_path / "empty").mkdir()
    assert "has no traffic of tiny" in reason(traffic=str(tmp_path / "empty"), target="cpu")
    with pytest.raises(StepError, match="a worker would start"):
        reason(traffic=put_traffic(tmp_path / "traffic", 1.0), target="cpu")
