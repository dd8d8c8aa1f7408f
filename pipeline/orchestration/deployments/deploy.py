"""Registers a `DeploymentPlan` with a Prefect server: creates missing objects, and updates different ones."""

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from typing import TYPE_CHECKING

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import StateType, VersionInfo
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType

from enginesmith.core.errors import InputError, UnavailableError
from enginesmith.core.parsing import read
from enginesmith.core.requirements import JsonObject
from enginesmith.core.text import pluralize
from enginesmith.core.types import Untyped
from pipeline.compile.run_context import version_of
from pipeline.orchestration.deployments.plan import DeploymentPlan, WantedDeployment
from pipeline.orchestration.flows.api import api_in_reach
from pipeline.orchestration.flows.runner import limit_name

if TYPE_CHECKING:
    from prefect import Flow

TAGS = ("enginesmith",)
# Builds at once on a GPU generation that has no limit yet.
_DEFAULT_SLOTS = 1
_UNSERVED_RUNS = "enginesmith: start builds again that crashed or had no cluster"
_HOPELESS_RUNS = "enginesmith: end builds that start again and again in vain"
# A build's event comes once. What it needs may be away for an hour; a run that kills its machine is not for ever.
AGAIN, TRIES = timedelta(minutes=10), 12
# The server may hold a sign of life back for 15 minutes, until it has the event before it
# (prefect.server.events.ordering.PRECEDING_EVENT_LOOKBACK). One of each run comes every three minutes by default
# (PREFECT_FLOWS_HEARTBEAT_FREQUENCY).
SILENT = timedelta(minutes=20)
# At least: twice what a pod has to start where that is more, as its worker reports it then, and two would build.
UNSTARTED = timedelta(minutes=30)
_SIGN = "prefect.flow-run.heartbeat"
_PENDING = {f"prefect.flow-run.{name}" for name in ("Pending", "Submitting", "InfrastructurePending")}
_RETRY = "prefect.flow-run.AwaitingRetry"
_STARTS = {_RETRY, *(f"prefect.flow-run.{name}" for name in ("Scheduled", "Running", "Cancelling"))}
# Names of states in Prefect's events; 'Skipped' and 'Unreachable' are ours. Not 'Running', which may come after the
# first sign.
_UNSERVED = {f"prefect.flow-run.{name}" for name in ("Crashed", "Unreachable")}
_ENDS = {
    *_UNSERVED,
    *(f"prefect.flow-run.{name}" for name in ("Completed", "Skipped", "Failed", "TimedOut", "Cancelled")),
}
_BUILD = {"prefect.resource.role": "flow", "prefect.resource.name": "compile-model"}


@dataclass(frozen=True)
class DeploymentChange:
    """One thing on the server. action: 'created', 'updated', 'unchanged' or 'deleted'; with a dry run, what would be.

    detail: what it is, or what differed.
    """

    kind: str
    name: str
    action: str
    detail: str = ""


def deploy(plan: DeploymentPlan, *, dry: bool = False) -> list[DeploymentChange]:
    """Bring work pool, concurrency limits, deployments, and the automations for lost and unserved runs to what the plan
    says.

    With `plan.keep` the owner's deployments that are neither in the plan nor named there are deleted.
    dry: only say what would be done.
    Raises InputError for a pool of another kind or unknown job variables, UnavailableError without a server.
    """
    if not PREFECT_API_URL.value():
        raise UnavailableError("no Prefect server is configured, and the deployments need one; set PREFECT_API_URL")
    pool_variables = read(template(plan.kind), "variables.properties", dict)
    if unknown_names := [repr(name) for name in plan.variables if name not in pool_variables]:
        variables_text = ", ".join(sorted(pool_variables))
        raise InputError(f"a {plan.kind} pool has no job variable {unknown_names[0]}; it has {variables_text}")
    run_automations = (lost_runs(*TAGS), unstarted_runs(*TAGS, plan.variables), unserved_runs(), hopeless_runs())
    with api_in_reach(), get_client(sync_client=True) as client:
        change_lists = (_pool(client, plan, dry), _limits(client, plan, dry), _deployments(client, plan, dry))
        return [
            *(change for change_list in change_lists for change in change_list),
            *_unwanted_deployments(client, plan, dry),
            *(_automation(client, run_automation, dry) for run_automation in run_automations),
        ]


def _pool(client: SyncPrefectClient, plan: DeploymentPlan, dry: bool) -> Iterator[DeploymentChange]:
    pool_template = template(plan.kind)
    try:
        pool = client.read_work_pool(plan.pool)
    except ObjectNotFound:
        if not dry:
            client.create_work_pool(WorkPoolCreate(name=plan.pool, type=plan.kind, base_job_template=pool_template))
        yield DeploymentChange("work pool", plan.pool, "created", plan.kind)
        return
    if pool.type != plan.kind:
        raise InputError(f"work pool {plan.pool} is of type {pool.type}, not {plan.kind}; name another one with --pool")
    if pool.base_job_template == pool_template:
        yield DeploymentChange("work pool", plan.pool, "unchanged", plan.kind)
        return
    if not dry:
        client.update_work_pool(plan.pool, WorkPoolUpdate(base_job_template=pool_template))
    yield DeploymentChange("work pool", plan.pool, "updated", "base job template")


def _limits(client: SyncPrefectClient, plan: DeploymentPlan, dry: bool) -> Iterator[DeploymentChange]:
    for generation, slots in plan.limits().items():
        name = limit_name(generation)
        try:
            live_slots = client.read_global_concurrency_limit_by_name(name).limit
        except ObjectNotFound:
            count = slots or _DEFAULT_SLOTS
            if not dry:
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=count))
            yield DeploymentChange("concurrency limit", name, "created", pluralize(count, "slot"))
            continue
        if slots is None or slots == live_slots:
            yield DeploymentChange("concurrency limit", name, "unchanged", pluralize(live_slots, "slot"))
            continue
        if not dry:
            client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))
        yield DeploymentChange("concurrency limit", name, "updated", f"{pluralize(slots, 'slot')}, before {live_slots}")


def _deployments(client: SyncPrefectClient, plan: DeploymentPlan, dry: bool) -> Iterator[DeploymentChange]:
    version = version_of("enginesmith")
    for deployment_spec in plan.deployments():
        runner_deployment = _to_deployment(deployment_spec, version, _tags(plan.owner))
        detail = f"cron {deployment_spec.cron} UTC" if deployment_spec.cron else "by hand"
        detail = f"on {deployment_spec.trigger.event}" if deployment_spec.trigger else detail
        try:
            live_deployment = client.read_deployment_by_name(deployment_spec.full_name)
        except ObjectNotFound:
            action = "created"
        else:
            differences = _differences(client, live_deployment, runner_deployment)
            action, detail = ("updated", ", ".join(differences)) if differences else ("unchanged", detail)
        if action != "unchanged" and not dry:
            # Without this Prefect would look at the git repository of the current folder for a version.
            runner_deployment.apply(version_info=VersionInfo(type="prefect:simple", version=version))
        yield DeploymentChange("deployment", deployment_spec.full_name, action, detail)


def _unwanted_deployments(client: SyncPrefectClient, plan: DeploymentPlan, dry: bool) -> Iterator[DeploymentChange]:
    """Delete the owner's deployments that the plan no longer has, such as those of a removed GPU group."""
    if not (plan.owner and plan.keep):
        return
    planned_names = {*plan.keep, *(deployment_spec.full_name for deployment_spec in plan.deployments())}
    owner_filter = DeploymentFilter(tags=DeploymentFilterTags(all_=_tags(plan.owner)))
    for live_deployment in client.read_deployments(deployment_filter=owner_filter):
        name = f"{client.read_flow(live_deployment.flow_id).name}/{live_deployment.name}"
        if name in planned_names:
            continue
        if not dry:
            client.delete_resource_owned_automations(f"prefect.deployment.{live_deployment.id}")
            client.delete_deployment(live_deployment.id)
        yield DeploymentChange("deployment", name, "deleted", f"of {plan.owner}, and not wanted")


def _tags(owner: str | None) -> list[str]:
    return [*TAGS, *([f"owner:{owner}"] if owner else [])]


def _automation(client: SyncPrefectClient, run_automation: AutomationCore, dry: bool) -> DeploymentChange:
    """An automation, one for all deployments of a server, whatever their names."""
    matches = client.read_automations_by_name(run_automation.name)
    if not matches:
        action = "created"
        if not dry:
            client.create_automation(run_automation)
    elif _comparable(matches[0]) == _comparable(run_automation):
        action = "unchanged"
    else:
        action = "updated"
        if not dry:
            # A person may have disabled it: that stays.
            client.update_automation(matches[0].id, run_automation.model_copy(update={"enabled": matches[0].enabled}))
    return DeploymentChange("automation", run_automation.name, action, run_automation.description)


def _to_deployment(wanted_deployment: WantedDeployment, version: str, tags: list[str]) -> RunnerDeployment:
    wanted_triggers = [wanted_deployment.trigger] if wanted_deployment.trigger else []
    runs = wanted_deployment.full_name
    deployment = flow_of(wanted_deployment).to_deployment(
        wanted_deployment.name,
        cron=wanted_deployment.cron,
        parameters=dict(wanted_deployment.parameters),
        triggers=[DeploymentEventTrigger.model_validate(trigger.to_json(runs)) for trigger in wanted_triggers],
        description=wanted_deployment.description,
        tags=tags,
        version=version,
        work_pool_name=wanted_deployment.pool,
        job_variables=dict(wanted_deployment.variables),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    if not isinstance(deployment, RunnerDeployment):
        raise TypeError("flow.to_deployment gave a coroutine: `deploy` was called inside of an event loop")
    return deployment


def flow_of(deployment: WantedDeployment) -> "Flow[..., object]":
    """The flow that a deployment runs."""
    module, _, function = deployment.entrypoint.rpartition(".")
    flow: Flow[..., object] = getattr(importlib.import_module(module), function)
    return flow


def _differences(
    client: SyncPrefectClient, live_deployment: DeploymentResponse, deployment: RunnerDeployment
) -> list[str]:
    """Names of the fields in which a deployment on the server differs from the plan, except whether it is paused."""
    schema = deployment._parameter_openapi_schema.model_dump(exclude_unset=True)
    schedules = [
        [getattr(schedule.schedule, "cron", None) for schedule in each_deployment.schedules or ()]
        for each_deployment in (live_deployment, deployment)
    ]
    # By name, as automations that other people made may run the deployment too.
    names = {getattr(trigger, "name", None) for trigger in deployment.triggers}
    automations = client.read_resource_related_automations(f"prefect.deployment.{live_deployment.id}")
    for trigger in deployment.triggers:
        trigger.set_deployment_id(live_deployment.id)
    field_pairs: dict[str, tuple[object, object]] = {
        "entrypoint": (live_deployment.entrypoint, deployment.entrypoint),
        "version": (live_deployment.version, deployment.version),
        "description": (live_deployment.description, deployment.description),
        "tags": (sorted(live_deployment.tags), sorted(deployment.tags)),
        "parameters": (live_deployment.parameters, deployment.parameters),
        "parameter schema": (live_deployment.parameter_openapi_schema, schema),
        "work pool": (live_deployment.work_pool_name, deployment.work_pool_name),
        "job variables": (live_deployment.job_variables, deployment.job_variables),
        "schedule": (schedules[0], schedules[1]),
        "trigger": (
            [_comparable(automation) for automation in automations if automation.name in names],
            [_comparable(trigger.as_automation()) for trigger in deployment.triggers],
        ),
    }
    return [name for name, (live_field, planned_field) in field_pairs.items() if live_field != planned_field]


def _comparable(automation: AutomationCore) -> JsonObject:
    """An automation without the server's ids and the flag whether it is enabled."""
    document = automation.model_dump(mode="json", include={"name", "description", "trigger", "actions"})
    trigger = read(document, "trigger", dict)
    trigger_fields = {name: sorted(value) if isinstance(value, list) else value for name, value in trigger.items()}
    return {**document, "trigger": {name: value for name, value in trigger_fields.items() if name != "id"}}


def template(kind: str) -> dict[str, object]:
    """The base job template of a kind of pool ('process', 'kubernetes'): Prefect's own, and what a GPU build needs."""
    job_template: dict[str, object] = json.loads(
        (files("pipeline.orchestration.deployments") / f"{kind}.json").read_text()
    )
    return job_template


def lost_runs(tag: str, silent: timedelta = SILENT) -> AutomationCore:
    """The automation that has the server report runs with this tag Crashed after `silent` without a sign of life.

    A worker reports how its runs end; where the machine of both is lost nothing does, and a run would stay Running.
    """
    reason = f"no sign of life for {silent.total_seconds():g} s: its machine is lost, or does not reach the server"
    return _crash("enginesmith: mark silent runs as Crashed", tag, reason, {_SIGN}, {_SIGN}, silent)


def unstarted_runs(tag: str, variables: Mapping[str, object]) -> AutomationCore:
    """As `lost_runs`, of runs that are Pending for twice what a pod may take to start by these job variables, and for
    `UNSTARTED` at least: those of a worker that was killed before it started them."""
    pod_start_s = variables.get("pod_watch_timeout_seconds")
    pending = max(UNSTARTED, timedelta(seconds=2 * pod_start_s if isinstance(pod_start_s, int) else 0))
    reason = f"Pending for {pending.total_seconds():g} s: no process began it"
    return _crash("enginesmith: mark runs that no process began as Crashed", tag, reason, _PENDING, _STARTS, pending)


def _crash(name: str, tag: str, reason: str, after: set[str], expect: set[str], within: timedelta) -> AutomationCore:
    of_tag = {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
    action = ChangeFlowRunState(state=StateType.CRASHED, message=f"{reason}; the steps that it finished are recorded")
    return _on_runs(name, reason, action, match_related=of_tag, after=after, expect=expect | _ENDS, within=within)


def unserved_runs() -> AutomationCore:
    """The automation that starts a `compile-model` run again, `AGAIN` after its state became Crashed or Unreachable.

    Registering a spec starts only one run. Without this automation, the spec would wait for the nightly build.
    """
    description = f"The same run again after {AGAIN.total_seconds():g} s, {TRIES} times at most."
    action = ChangeFlowRunState(name="AwaitingRetry", state=StateType.SCHEDULED, message="starts again by itself")
    trigger = {"match_related": _BUILD, "after": _UNSERVED, "expect": (_PENDING | _STARTS | _ENDS) - _UNSERVED}
    return _on_runs(_UNSERVED_RUNS, description, action, **trigger, within=AGAIN)


def hopeless_runs() -> AutomationCore:
    """The automation that ends a `compile-model` run as Failed after `TRIES` restarts without success. Prefect's own
    run count leaves out restarts whose process never began."""
    message = f"crashed or had no cluster {TRIES + 1} times; fix the cause (states, worker's log), and start it again"
    action = ChangeFlowRunState(state=StateType.FAILED, message=message)
    trigger = {"match_related": _BUILD, "after": {_RETRY}, "expect": _UNSERVED, "posture": Posture.Reactive}
    return _on_runs(_HOPELESS_RUNS, message, action, **trigger, threshold=TRIES, within=timedelta(days=30))


def _on_runs(name: str, description: str, action: ChangeFlowRunState, **fields: Untyped) -> AutomationCore:
    """The automation of this action on the events of each run. fields: of its trigger, by default that of the first
    event of `after` without one of `expect` soon enough."""
    runs = {"match": {"prefect.resource.id": "prefect.flow-run.*"}, "for_each": {"prefect.resource.id"}}
    trigger = EventTrigger(**{"posture": Posture.Proactive, "threshold": 1, **runs, **fields})
    return AutomationCore(name=name, description=description, enabled=True, trigger=trigger, actions=[action])
