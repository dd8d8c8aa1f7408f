"""The deployments as values: which flow, when it runs, with which parameters. Nothing here knows Prefect.

The deployments as a `prefect.yaml`, for those who register with `prefect deploy --all`.

It makes no work pool and no concurrency limits, which `prefect.yaml` cannot hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import yaml

from enginery.core.hardware.targets import GENERATIONS
from pipeline.compile.run_context import version_of
from pipeline.orchestration.payloads import JUDGED, PUBLISHED, REGISTERED, UNPROVEN

NAME = "enginery"
POOL = "enginery"
KINDS = ("process", "kubernetes")
FLEET = ("off", "say", "apply")
FLEET_CRON = "30 * * * *"


@dataclass(frozen=True)
class Trigger:
    """An event that starts a run. parameters: Jinja over the event, which the server fills in."""

    event: str
    parameters: Mapping[str, str]

    def to_json(self, runs: str) -> dict[str, object]:
        """As `prefect.yaml` has it: a run for each event. runs: what it runs, for the automation's name."""
        return {
            "name": f"{runs} on {self.event}",
            "type": "event",
            "enabled": True,
            "posture": "Reactive",
            "expect": [self.event],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True)
class WantedDeployment:
    """One deployment. flow: the name of both its file and its function in `flows`.  cron: in UTC.

    variables: of the pool's base job template.
    """

    flow: str
    description: str
    parameters: Mapping[str, object]
    trigger: Trigger | None = None
    cron: str | None = None
    name: str = NAME
    pool: str = POOL
    variables: Mapping[str, object] = field(default_factory=dict)

    @property
    def entrypoint(self) -> str:
        """Where a worker, which has Enginery installed, finds the flow."""
        return f"pipeline.orchestration.flows.{self.flow}.{self.flow}"

    @property
    def full_name(self) -> str:
        """As Prefect calls it: 'compile-model/enginery'."""
        return f"{self.flow.replace('_', '-')}/{self.name}"


@dataclass(frozen=True)
class DeploymentPlan:
    """Everything that `enginery deploy` was asked for.

    registry: URI that the workers reach.  traffic: place of recorded requests, None for none.  canary_s: how much
    of it canaries replay, in seconds; None: all of it, once.  catalog: place of specs,
    or 'registered'.  channel: what canaries compare with, promote to and roll back.  delete: whether the nightly
    collection deletes.  executor, ray_address: of builds; wait_for_nodes_s: how long one waits for a Ray node to come.
    on: the GPU of those Ray nodes that prove and run canaries ('l4', 'sm_89'); None: the machine of the flow run does.
    only: flows; empty for all.  slots: builds at once of each
    generation; what is not named gets 1 where it has no limit yet.  variables: of the pool's base job template.
    fleet: whether the cluster's nodes are compared with the registry, and what they lack is told ('apply') or only
    said.  fleet_catalog: path on the workers of what must be served where.  fleet_cron: when, in UTC.
    owner: whose the deployments are, as a tag.  keep: full names; with any, the owner's others are deleted.
    """

    registry: str
    name: str = NAME
    pool: str = POOL
    kind: str = KINDS[0]
    traffic: str | None = None
    canary_s: float | None = None
    catalog: str = "registered"
    channel: str = "stable"
    delete: bool = False
    executor: str = "local"
    ray_address: str | None = None
    wait_for_nodes_s: float = 0.0
    on: str | None = None
    only: tuple[str, ...] = ()
    slots: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, object] = field(default_factory=dict)
    fleet: str = FLEET[0]
    fleet_catalog: str | None = None
    fleet_cron: str = FLEET_CRON
    owner: str | None = None
    keep: tuple[str, ...] = ()

    def deployments(self) -> tuple[WantedDeployment, ...]:
        """Those that are wanted."""
        placed: dict[str, object] = {"executor": self.executor}
        placed |= {"ray_address": self.ray_address} if self.ray_address else {}
        placed |= {"wait_for_nodes_s": self.wait_for_nodes_s} if self.wait_for_nodes_s else {}
        builds = {"registry": self.registry, **placed, "gpu_slots": True}
        proofs, canaries = ({name: self.on, **placed} if self.on else {} for name in ("on", "target"))
        hardware = f"Ray's workers with {self.on}" if self.on else "the workers of this pool"
        replays: dict[str, object] = {"registry": self.registry, "channel": self.channel, "traffic": self.traffic}
        replays |= {"duration": self.canary_s} if self.canary_s else {}
        found = (
            WantedDeployment(
                "compile_model",
                "Builds, proves and publishes a model when its spec is registered.",
                builds,
                Trigger(REGISTERED, _from_event("spec", "registry")),
            ),
            WantedDeployment(
                "compile_catalog",
                "Compiles every spec of the catalog; what did not change is not built again.",
                {"specs": self.catalog, **builds},
                cron="0 2 * * *",
            ),
            WantedDeployment(
                "validate_pending",
                f"Proves unproven engines that can run on {hardware}.",
                {"registry": self.registry, **proofs},
                Trigger(UNPROVEN, _from_event("model", "version", "target", "registry")),
                cron="15 * * * *",
            ),
            WantedDeployment(
                "canary",
                f"Sets a published version against what the channel serves, on {hardware}.",
                {**replays, **canaries},
                Trigger(PUBLISHED, _from_event("model", "version", "registry")),
            ),
            WantedDeployment(
                "settle_canary",
                "Promotes what passed its canaries, rolls back what failed one.",
                {"registry": self.registry, "channel": self.channel},
                Trigger(JUDGED, _from_event("model", "report", "registry", "channel")),
                cron="45 * * * *",
            ),
            WantedDeployment(
                "collect_garbage",
                "Lists what the registry does not need any more, or deletes it.",
                {"registry": self.registry, "delete": self.delete},
                cron="0 4 * * *",
            ),
            WantedDeployment(
                "reconcile_fleet",
                "Compares the cluster's nodes with the registry, and says or tells what they lack.",
                {"registry": self.registry, "catalog": self.fleet_catalog, "apply": self.fleet == "apply"},
                cron=self.fleet_cron,
            ),
        )
        return tuple(_place(item, self) for item in found if self._asks_for(item.flow))

    def _asks_for(self, flow: str) -> bool:
        """Everything unless a part is named; the fleet only where it is asked for, as it takes a cluster to read."""
        return flow in self.only if self.only else flow != "reconcile_fleet" or self.fleet != "off"

    def limits(self) -> dict[str, int | None]:
        """Slots of each GPU generation; None: 1 where there is no limit yet, and otherwise as it is."""
        return {generation.sm: self.slots.get(generation.sm) for generation in GENERATIONS}


def _from_event(*names: str) -> dict[str, str]:
    return {name: f"{{{{ event.payload.{name} }}}}" for name in names}


def _place(item: WantedDeployment, plan: DeploymentPlan) -> WantedDeployment:
    return replace(item, name=plan.name, pool=plan.pool, variables=plan.variables)


FLOWS = tuple(item.flow for item in DeploymentPlan("", fleet="say").deployments())


# Prefect puts the environment variable in when it deploys.
REGISTRY = "{{ $ENGINERY_REGISTRY }}"

_HEAD = """\
# Written by `enginery deploy --print-yaml`; a test keeps it so. `enginery deploy` registers the same, and with it the
# work pool and the limits of GPU generations that these need:
#
#     ENGINERY_REGISTRY=s3://bucket/registry prefect --no-prompt deploy --all
"""


def text(plan: DeploymentPlan) -> str:
    """The file. The registry may be `REGISTRY`."""
    document = {"name": "enginery", "deployments": [_entry(item) for item in plan.deployments()]}
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=120)


def _entry(item: WantedDeployment) -> dict[str, object]:
    pool: dict[str, object] = {"name": item.pool}
    if item.variables:
        pool["job_variables"] = dict(item.variables)
    entry: dict[str, object] = {
        "name": item.name,
        "version": version_of("enginery"),
        "description": item.description,
        "entrypoint": item.entrypoint,
        "tags": ["enginery"],
        "parameters": dict(item.parameters),
        "work_pool": pool,
        # No step: workers have Enginery installed.
        "pull": [],
    }
    if item.trigger:
        entry["triggers"] = [item.trigger.to_json(item.full_name)]
    if item.cron:
        entry["schedules"] = [{"cron": item.cron, "timezone": "UTC"}]
    return entry
