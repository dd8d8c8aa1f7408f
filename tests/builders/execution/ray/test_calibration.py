import pytest

from builders.execution.jobs import Job, Watch, ignore_event
from builders.execution.local import LocalExecutor
from enginesmith.registry.store.base import open_store
from pipeline.compile.composition import Run
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps import exports
from pipeline.compile.steps.calibration import ObservePartRemotely
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project, write_project

pytest.importorskip("ray")
pytestmark = [pytest.mark.server, pytest.mark.slow]


class Listed:
    """An executor that lists what it was given."""

    def __init__(self, inner) -> None:
        self.inner, self.requests = inner, []

    def run(self, job: Job, watch: Watch = ignore_event):
        self.requests.append(type(job.request))
        return self.inner.run(job, watch)

    def cancel(self) -> None: ...


def test_parts_observed_on_the_cluster_equal_one_pass(executor, tmp_path):
    write_project(tmp_path / "project")
    project = Project(tmp_path / "project")
    local_executor, fleet = LocalExecutor(2), Listed(executor)
    context = RunContext(store := open_store(str(tmp_path / "registry"), create=True), local_executor, local_executor)
    spec = load_spec(project.spec)
    export = exports.export(Work(spec, context))
    one_pass_observations = Run(spec, context).observe(export)
    project.change_spec(calibration={"data": "calibration.npz", "parts": 2})
    observations = Run(load_spec(project.spec), RunContext(store, local_executor, fleet)).observe(export)
    assert one_pass_observations and observations and observations.observations == one_pass_observations.observations
    assert fleet.requests == [ObservePartRemotely] * 2
