import importlib
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.context import FlowRunContext
from prefect.events import DeploymentEventTrigger
from prefect.server.events.ordering import PRECEDING_EVENT_LOOKBACK
from prefect.settings import get_current_settings
from prefect.states import InfrastructurePending, Pending, Submitting
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values, find_placeholders

from enginesmith.core.errors import UnavailableError
from enginesmith.core.hardware.machine import GENERATIONS
from pipeline.orchestration.deployments import deploy
from pipeline.orchestration.deployments.plan import KINDS, DeploymentPlan, WantedDeployment
from pipeline.orchestration.flows.runner import limit_name
from pipeline.orchestration.gpu_workers import FIELDS
from tests.pipeline.orchestration.deployments.planned import deployed
from tests.pipeline.projects import raising

BUSY, REFUSED = ConcurrencySlotAcquisitionError("busy"), ConcurrencySlotAcquisitionError("no limit")
BUSY.__cause__ = TimeoutError()
ROOT = Path(__file__).parents[4]
EVERY = [
    *DeploymentPlan(
        "s3://bucket/r", ray_address="ray://head", traffic="s3://bucket/t", canary_s=9.0, fleet="apply"
    ).deployments()
]


@pytest.mark.parametrize("expected", EVERY, ids=lambda deployment: deployment.flow)
def test_a_deployment_names_a_flow_and_its_parameters(expected: WantedDeployment) -> None:
    flow = deploy.flow_of(expected)
    assert f"{flow.name}/{expected.name}" == expected.full_name
    schema = parameter_schema(flow)
    entries = {**expected.parameters, **(expected.trigger.parameters if expected.trigger else {})}
    assert entries.keys() <= schema.properties.keys()
    assert set(schema.required) <= entries.keys(), "nobody is there to fill in what is missing"
    assert importlib.import_module(expected.entrypoint.rpartition(".")[0])


def test_each_event_starts_one_run_with_its_payload() -> None:
    triggered_items = [item for item in EVERY if item.trigger]
    expected = ["compile_model", "validate_pending", "canary", "settle_canary", "choose_buckets"]
    assert [item.flow for item in triggered_items] == expected
    for item in triggered_items:
        assert item.trigger
        trigger = DeploymentEventTrigger.model_validate(item.trigger.to_json(item.full_name))
        assert trigger.expect == {item.trigger.event} and trigger.threshold == 1
        fields = {"model", "registry", *FIELDS[item.trigger.event]}
        assert item.trigger.parameters.keys() <= fields, "always in the payload"
        assert all(value == f"{{{{ event.payload.{name} }}}}" for name, value in item.trigger.parameters.items())


def test_the_end_of_a_run_ends_its_watch() -> None:
    end_events, begins = (
        {event.rpartition(".")[2] for event in automation.trigger.expect}
        for automation in (deploy.lost_runs("enginesmith"), deploy.unstarted_runs("enginesmith", {}))
    )
    flows = ROOT / "pipeline" / "orchestration" / "flows"
    names = {name for path in flows.glob("*.py") for name in re.findall(r'name="([A-Z]\w+)"', path.read_text())}
    assert "Skipped" in names and names <= end_events, "a state of ours that is not expected would be taken for silence"
    assert {"Completed", "Failed", "Cancelled", "Crashed", "heartbeat"} <= end_events and "Running" not in end_events
    heartbeats_s = get_current_settings().flows.heartbeat_frequency
    held_back_s = PRECEDING_EVENT_LOOKBACK.total_seconds()
    assert heartbeats_s and deploy.SILENT.total_seconds() > held_back_s + heartbeats_s, "one that is late is no death"
    assert begins == {*end_events - {"heartbeat"}, "Running", "Scheduled", "AwaitingRetry", "Cancelling"}
    pending = {state().name for state in (Pending, Submitting, InfrastructurePending)}
    assert deploy.unstarted_runs("enginesmith", {}).trigger.after == {f"prefect.flow-run.{name}" for name in pending}
    watches = [deploy.unstarted_runs("enginesmith", {"pod_watch_timeout_seconds": start_s}) for start_s in (60, 7200)]
    assert [watch.trigger.within.total_seconds() for watch in watches] == [1800, 14400], "a pod that still may begin"


@pytest.mark.parametrize("error", [UnavailableError("no Ray"), BUSY, httpx.ConnectError("no server"), REFUSED])
def test_a_build_of_a_started_process_is_restarted_up_to_a_limit(monkeypatch: Any, error: Exception) -> None:
    trigger = deploy.unserved_runs().trigger
    flow = deploy.flow_of(EVERY[0])
    assert trigger.match_related["prefect.resource.name"] == [flow.name]
    hopeless = deploy.hopeless_runs().trigger
    assert hopeless.expect == trigger.after, "a run that kills its machine would start for ever"
    assert hopeless.after <= trigger.expect and hopeless.threshold == deploy.TRIES, "what starts by hand has as many"
    end_texts = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled")}
    assert end_texts <= trigger.expect, "a run that was taken for lost, and ended, is not started again"
    assert {"prefect.flow-run.AwaitingRetry"} <= trigger.expect, "a person was faster"
    module = importlib.import_module("pipeline.orchestration.flows.compile_model")
    monkeypatch.setattr(module, "compile_any", raising(error))
    for name in ("get_run_logger", "FlowProgress"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "start_executors", lambda *_, **__: nullcontext())
    with pytest.raises(type(error)):
        flow.fn("spec.yaml")  # a person's, who sees it
    run = FlowRunContext.model_construct(flow_run=FlowRun(flow_id=uuid4(), deployment_id=uuid4()))
    with run, pytest.raises(type(error)) if error is REFUSED else nullcontext():
        ended_flow = flow.fn("spec.yaml")
    assert error is REFUSED or (ended_flow.is_failed() and f"prefect.flow-run.{ended_flow.name}" in trigger.after)


def test_every_generation_has_a_limit() -> None:
    assert [limit_name(name) for name in DeploymentPlan("").limits()] == [
        f"enginesmith-gpu-{g.sm}" for g in GENERATIONS
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_placeholder_of_a_template_is_a_variable(kind: str) -> None:
    result = deploy.template(kind)
    names = {placeholder.name for placeholder in find_placeholders(result["job_configuration"])}
    assert names == set(result["variables"]["properties"])


def test_a_kubernetes_job_gets_its_gpu_node_image_and_secrets() -> None:
    entries: dict[str, Any] = {
        "image": "registry.example/enginesmith:1",
        "gpu_count": 1,
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "env_from": [{"secretRef": {"name": "registry"}}],
    }
    job = apply_values(deploy.template("kubernetes")["job_configuration"], entries)["job_manifest"]
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert (container["image"], container["envFrom"]) == (entries["image"], entries["env_from"])
    assert (pod["nodeSelector"], pod["tolerations"]) == (entries["node_selector"], entries["tolerations"])
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    plain_manifest = apply_values(deploy.template("kubernetes")["job_configuration"], {"image": "x"})["job_manifest"]
    assert "nodeSelector" not in plain_manifest["spec"]["template"]["spec"], "what is not given is not asked for"


def test_places_are_absolute_for_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--traffic", "recorded", "--catalog", "specs", "--fleet", "report", "--fleet-catalog", "f.yaml")
    _, plan = deployed("--registry", "r", *words)
    assert plan
    inputs = {name: value for item in plan.deployments() for name, value in item.parameters.items()}
    assert inputs["traffic"] == str(tmp_path / "recorded") and inputs["specs"] == str(tmp_path / "specs")
    assert str(tmp_path / "f.yaml") in inputs.values()


def test_gpu_tasks_run_on_the_named_ray_workers() -> None:
    words = ["--registry", "r", "--name", "l4", "--only", "validate-pending", "--only", "canary"]
    words += ["--traffic", "s3://bucket/t"]
    ray = ["--executor", "ray", "--ray-address", "ray://head:1", "--wait-for-nodes", "15m"]
    placed_fields = {"executor": "ray", "ray_address": "ray://head:1", "wait_for_nodes_s": 900.0}
    for inputs, is_named in (([*ray, "--on", "l4"], True), (ray, False)):
        _, plan = deployed(*words, *inputs)
        assert plan
        proofs, canaries = (item.parameters for item in plan.deployments())
        assert {name: proofs.get(name) for name in ("on", *placed_fields)} == (
            {"on": "l4", **placed_fields} if is_named else dict.fromkeys(("on", *placed_fields))
        ), "without a name the machine of the flow run does it"
        assert {name: canaries.get(name) for name in ("target", *placed_fields)} == (
            {"target": "l4", **placed_fields} if is_named else dict.fromkeys(("target", *placed_fields))
        )
    assert "give --executor ray" in deployed(*words, "--on", "l4")[0]
    assert "'cpu' names no GPU" in deployed(*words, *ray, "--on", "cpu")[0]
    assert "ampere" in deployed(*words, *ray, "--on", "ampere")[0], "which is several"


def test_the_differences_of_a_deployment_name_only_changes() -> None:
    expected = next(expected for expected in EVERY if expected.cron and not expected.trigger)
    new = deploy._to_deployment(expected, "1", ["enginesmith"])
    compared_names = ("entrypoint", "version", "description", "tags", "parameters")
    fields = (*compared_names, "work_pool_name", "job_variables", "schedules")
    schema = new._parameter_openapi_schema.model_dump(exclude_unset=True)
    stub = SimpleNamespace(id="a", parameter_openapi_schema=schema, **{name: getattr(new, name) for name in fields})
    client: Any = SimpleNamespace(read_resource_related_automations=lambda _: [])
    assert deploy._differences(client, stub, new) == []
    for name, other_text, message in (("version", "2", "version"), ("tags", [], "tags"), ("schedules", [], "schedule")):
        changed_stub: Any = SimpleNamespace(**{**vars(stub), name: other_text})
        assert deploy._differences(client, changed_stub, new) == [message]
