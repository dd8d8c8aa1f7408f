import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginesmith.registry.registered_specs import registrations
from enginesmith.registry.store.base import open_store
from pipeline.intake.registration import register, spec_at
from pipeline.orchestration.rebucketing import DriftAnswer, DriftRequest, answer_drift
from pipeline.orchestration.run import Executors, RunOptions, start_executors
from pipeline.progress import Progress
from pipeline.spec.model import load_spec
from pipeline.traffic.place import BucketOptions
from tests.pipeline.projects import Project

OPTIONS = BucketOptions(timing_s=0.01, max_profiles=3)


@pytest.fixture(scope="module")
def executors() -> Iterator[Executors]:
    with start_executors(RunOptions(), signals=False) as step_executors:
        yield step_executors


@pytest.fixture
def registered(project: Project) -> Project:
    project.change_spec(precisions=["fp32"], targets=["cpu"], calibration=None)
    register(open_store(project.registry, create=True), load_spec(project.spec))
    return project


def put_traffic(folder: Path, sizes: np.ndarray) -> str:
    """Requests of these numbers of samples, 100 a second."""
    folder.mkdir(exist_ok=True)
    with (folder / "tiny.jsonl").open("w") as file:
        for number, size in enumerate(sizes.tolist()):
            file.write(json.dumps({"at": number / 100, "inputs": {"x": np.zeros((size, 8)).tolist()}}) + "\n")
    return str(folder)


def answer(project: Project, traffic: str | None, executors: Executors, lines: list[str] | None = None) -> DriftAnswer:
    say = (lines if lines is not None else []).append
    request = DriftRequest("tiny", str(project.registry), traffic, OPTIONS)
    return answer_drift(request, Progress(), executors, say)


def test_a_dim_grows_to_hold_the_traffic_and_the_spec_is_registered_with_buckets(registered, executors, tmp_path):
    sizes = np.random.default_rng(0).choice([1, 2, 20], 400, p=[0.5, 0.3, 0.2])
    output: list[str] = []
    actual = answer(registered, put_traffic(tmp_path / "traffic", sizes), executors, output)
    assert output[0] == "batch grows from 8 to 20"
    assert actual.registration is not None and actual.edges["batch"][-1] == 20 and len(actual.edges["batch"]) <= 3
    assert actual.reason.startswith("registered with buckets batch: ")
    newest = registrations(registered.store, "tiny")
    assert [item.bundle.digest for item in newest][-1] == actual.registration.bundle.digest and len(newest) == 2
    with spec_at(actual.registration.address, str(registered.registry)) as place:
        assert place.load().named_dims()[0].edges == actual.edges["batch"]


def test_one_outlier_in_2000_requests_adds_no_bucket(registered: Project, executors: Executors, tmp_path: Path) -> None:
    sizes = np.full(2000, 8)
    sizes[1000] = 31
    actual = answer(registered, put_traffic(tmp_path / "traffic", sizes), executors)
    assert actual.registration is None and actual.reason.startswith("the present buckets stay: others would save ")
    assert len(registrations(registered.store, "tiny")) == 1


@pytest.mark.parametrize(
    ("traffic", "reason"),
    [(None, "`enginesmith prefect deploy --traffic LOCATION` names it"), ("empty", "has no traffic of tiny")],
)
def test_missing_traffic_is_reported(registered, executors, tmp_path, traffic, reason):
    (tmp_path / "empty").mkdir()
    assert reason in answer(registered, traffic and str(tmp_path / traffic), executors).reason


def test_an_unregistered_model_is_named(project: Project, executors: Executors, tmp_path: Path) -> None:
    open_store(project.registry, create=True)
    actual = answer(project, put_traffic(tmp_path / "traffic", np.ones(5, int)), executors)
    assert actual.registration is None and "`enginesmith prefect register SPEC` registers it" in actual.reason
