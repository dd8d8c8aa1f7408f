"""Flows on a real server and worker: from an event to engines, and through everything that dies on the way."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from enginesmith.registry.versions import channel_state, lookup
from tests.pipeline.held import hold
from tests.pipeline.orchestration.flows.server import Prefect, prefect_server, until
from tests.pipeline.projects import Project, weights, write_model
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Prefect]:
    with prefect_server(home) as own_server:
        yield own_server


@pytest.fixture
def prefect(server: Prefect) -> Iterator[Prefect]:
    """The server; the worker that a test starts ends with it, however that went, and so do the flows it was running."""
    yield server
    server.end_worker()


def said(prefect: Prefect, run: str | None = None) -> list[str]:
    """What one run has said, or all of them."""
    expected = {"flow_run_id": {"any_": [run]}} if run else {}
    return [line["message"] for line in prefect.post("/logs/filter", {"logs": expected, "sort": "TIMESTAMP_ASC"})]


def served(project: Project) -> tuple[list[str], str | None]:
    """The model's versions, and the one that `stable` serves."""
    store = project.store
    channel = channel_state.read_channel(store, "tiny", "stable")
    return lookup.versions(store, "tiny"), channel.version if channel else None


def put_traffic(folder: Path) -> Path:
    folder.mkdir()
    x = np.random.default_rng(5).normal(size=(120, 1, 8)).astype(np.float32)
    np.savez(folder / "tiny.npz", at=np.arange(120) / 2000, x=x)
    return folder


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_registered_model_is_built_once_and_passes_its_canary(prefect, built, tmp_path):
    assert built.run("promote", "tiny@1", "tiny:stable", "--proven-only").code == 0
    traffic = put_traffic(tmp_path / "traffic")
    deploy = ("prefect", "deploy", "--registry", built.registry, "--traffic", traffic, "--json")
    assert {item["action"] for item in json.loads(prefect.enginesmith(*deploy).stdout)} == {"created"}
    prefect.start_worker()
    with prefect.in_reach():
        second_document = built.run("prefect", "deploy", "--traffic", traffic, "--json", "--slots", "sm_89=2").json
    assert [item["name"] for item in second_document if item["action"] != "unchanged"] == ["enginesmith-gpu-sm_89"]
    write_model(built.folder / "tiny.onnx", weights(seed=1))
    holder = hold(built, tmp_path, targets=["cpu", "sm_89"], golden={"data": "golden.npz", "labels": "label"})
    for _ in range(2):
        prefect.enginesmith("prefect", "register", built.spec, "--registry", built.registry)
    until("both run, and one waits", lambda: any("lock: waiting: compiling tiny" in text for text in said(prefect)))
    assert [run["state_type"] for run in prefect.runs("compile-model")] == ["RUNNING"] * 2
    holder.unlink()
    both_runs = prefect.ended("compile-model", 2)
    assert [run["state_type"] for run in both_runs] == ["COMPLETED"] * 2
    assert not any(task["tags"] for task in prefect.post("/task_runs/filter", {})), "for whose slots it would be asked"
    assert served(built) == (["1", "2"], "1"), "two events, one version"
    built_lines = [text for text in said(prefect) if text.startswith("sm_89 int8 tensorrt-rtx: built in")]
    assert len(built_lines) == 1, "one of the two built it"
    [canary] = prefect.ended("canary", 1)
    assert canary["name"] == "canary tiny@2"
    message = canary["state"]["message"]
    assert canary["state_type"] == "COMPLETED" and message.startswith("FAIL on ") and "answers that differ" in message
    messages = [run["state"]["message"] for run in prefect.ended("settle-canary", 1)]
    assert any("FAIL: tiny:stable was not moved to 2: " in message for message in messages)


@pytest.mark.server
@pytest.mark.slow
def test_unwanted_deployments_are_deleted_with_their_triggers(prefect: Prefect, project: Project) -> None:
    deploy = ("prefect", "deploy", "--only", "validate-pending", "--json", "--name")
    current_command = (*deploy, "l4", "--owner", "here", "--keep", "validate-pending/l4")
    with prefect.in_reach():
        for owner, name in (("here", "l4"), ("here", "h100"), ("there", "t4")):
            assert project.run(*deploy, name, "--owner", owner).code == 0
        both_documents = [project.run(*current_command, *dry_names).json for dry_names in (["--dry-run"], [])]
    for changes in both_documents:
        assert [item["name"] for item in changes if item["action"] == "deleted"] == ["validate-pending/h100"]
    names = {item["name"] for item in prefect.post("/automations/filter", {})}
    expected = {"validate-pending/l4 on enginesmith.engine.unproven"}
    assert {name for name in names if name.startswith(("validate-pending/l4", "validate-pending/h100"))} == expected
    of_owners = {"deployments": {"tags": {"any_": ["owner:here", "owner:there"]}}}
    assert {item["name"] for item in prefect.post("/deployments/filter", of_owners)} == {"l4", "t4"}


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_or_cancelled_run_loses_nothing_and_survives_worker_and_server(prefect, project, tmp_path):
    with prefect.in_reach():
        assert project.run("prefect", "deploy", "--only", "compile-model").code == 0
        holder = hold(project, tmp_path, targets=["cpu"])
        assert project.run("prefect", "register", project.spec, "--no-event").code == 0
    prefect.start_worker()

    killed_text, _, flow = in_the_middle(prefect, tmp_path)
    flow.send_signal(signal.SIGKILL)
    until("the worker sees that it is gone", lambda: prefect.state(killed_text) == "CRASHED")

    cancelled_text, step, flow = in_the_middle(prefect, tmp_path)
    prefect.cancel(cancelled_text)
    until("it is cancelled", lambda: prefect.state(cancelled_text) == "CANCELLED")
    assert psutil.wait_procs([step, flow], timeout=PATIENCE_S)[1] == [], "what it ran has stopped"
    assert served(project) == ([], None), "no half version"

    survivor, _, flow = in_the_middle(prefect, tmp_path)
    assert prefect.worker and prefect.server
    prefect.worker.kill()
    prefect.worker.wait()
    os.killpg(prefect.server.pid, signal.SIGKILL)
    prefect.server.wait()
    holder.unlink()
    prefect.start_server()
    until("it ends well", lambda: prefect.state(survivor) == "COMPLETED")
    assert served(project) == (["1"], None)
    seen = json.loads(project.run("status", "tiny", "--json").out)  # a killed server takes its last log lines along
    assert {item["name"]: item["state"] for item in seen["items"]}["export"] == "cached", "what was finished was kept"


def in_the_middle(prefect: Prefect, place: Path) -> tuple[str, psutil.Process, psutil.Process]:
    """A run in the middle of its calibration, the process of that step, and that of the flow."""
    (place / "pid").unlink(missing_ok=True)
    run = prefect.run("compile-model/enginesmith", spec="registered:tiny")
    text = until("it calibrates", lambda: (place / "pid").exists() and (place / "pid").read_text())
    step = psutil.Process(int(text))  # it started the process of the samples' code, which wrote this
    server = step.parent()  # the step was forked from it
    flow = server.parent() if server else None
    assert flow is not None
    return run, step, flow
