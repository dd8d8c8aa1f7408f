"""The deployments as values: which flow, when it runs, with which parameters. Prefect is not imported here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from enginesmith.core.hardware.machine import GENERATIONS
from pipeline.orchestration.gpu_workers import DRIFTED, JUDGED, PUBLISHED, REGISTERED, UNPROVEN

NAME = "enginesmith"
POOL = "enginesmith"
KINDS = ("process", "kubernetes")
FLEET = ("off", "report", "apply")
FLEET_CRON = "30 * * * *"


@dataclass(frozen=True)
class Trigger:
    """An event that starts a run. parameters: Jinja templates that the server fills in from the event."""

    event: str
    parameters: Mapping[str, str]

    def to_json(self, runs: str) -> dict[str, object]:
        """The trigger as Prefect takes it: a run for each event. runs: the deployment, for the automation's name."""
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
    """One deployment. flow: the name of its file in `flows` and of the function there.  cron: in UTC.

    variables: values for the job variables of the pool.
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
        """Where a worker, which has Enginesmith installed, finds the flow."""
        return f"pipeline.orchestration.flows.{self.flow}.{self.flow}"

    @property
    def full_name(self) -> str:
        """The deployment's name on Prefect's server: 'compile-model/enginesmith'."""
        return f"{self.flow.replace('_', '-')}/{self.name}"


@dataclass(frozen=True)
class DeploymentPlan:
    """The options of `enginesmith prefect deploy`, checked.

    canary_s: seconds of traffic that canaries replay; None: all of it, once.  on: the GPU of the Ray nodes that prove
    and run canaries ('l4', 'sm_89'); None: the machine of the flow run does.  only: flows; empty for all.  slots:
    builds at once by GPU generation; one that is not named gets 1 where it has no limit yet.  fleet_cron: in UTC.
    keep: full names of deployments; with any, the owner's others are deleted.
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
        """The deployments to register."""
        run_parameters: dict[str, object] = {"executor": self.executor}
        run_parameters |= {"ray_address": self.ray_address} if self.ray_address else {}
        run_parameters |= {"wait_for_nodes_s": self.wait_for_nodes_s} if self.wait_for_nodes_s else {}
        build_params = {"registry": self.registry, **run_parameters, "gpu_slots": True}
        proof_params, canary_params = (
            {name: self.on, **run_parameters} if self.on else {} for name in ("on", "target")
        )
        hardware = f"Ray's workers with {self.on}" if self.on else "the workers of this pool"
        replay_params: dict[str, object] = {"registry": self.registry, "channel": self.channel, "traffic": self.traffic}
        replay_params |= {"duration": self.canary_s} if self.canary_s else {}
        all_deployments = (
            WantedDeployment(
                "compile_model",
                "Builds, proves and publishes a model when its spec is registered.",
                build_params,
                Trigger(REGISTERED, _from_event("spec", "registry")),
            ),
            WantedDeployment(
                "compile_catalog",
                "Compiles every spec of the catalog; what did not change is not built again.",
                {"specs": self.catalog, **build_params},
                cron="0 2 * * *",
            ),
            WantedDeployment(
                "validate_pending",
                f"Proves unproven engines that can run on {hardware}.",
                {"registry": self.registry, **proof_params},
                Trigger(UNPROVEN, _from_event("model", "version", "target", "registry")),
                cron="15 * * * *",
            ),
            WantedDeployment(
                "canary",
                f"Sets a published version against what the channel serves, on {hardware}.",
                {**replay_params, **canary_params},
                Trigger(PUBLISHED, _from_event("model", "version", "registry")),
                cron="30 * * * *",
            ),
            WantedDeployment(
                "settle_canary",
                "Promotes what passed its canaries, rolls back what failed one.",
                {"registry": self.registry, "channel": self.channel},
                Trigger(JUDGED, _from_event("model", "report", "registry", "channel")),
                cron="45 * * * *",
            ),
            WantedDeployment(
                "choose_buckets",
                "Chooses buckets from recorded traffic when that has drifted, and registers the spec with them.",
                {"registry": self.registry, "traffic": self.traffic},
                Trigger(DRIFTED, _from_event("model", "registry")),
            ),
            *self._housekeeping(),
        )
        # The fleet only where it is asked for, as that takes a cluster to read.
        omitted_flows = {"reconcile_fleet"} if self.fleet == "off" else set()
        return tuple(
            replace(deployment, name=self.name, pool=self.pool, variables=self.variables)
            for deployment in all_deployments
            if (deployment.flow in self.only if self.only else deployment.flow not in omitted_flows)
        )

    def _housekeeping(self) -> tuple[WantedDeployment, ...]:
        """Scheduled flows for the whole registry and the fleet."""
        return (
            WantedDeployment(
                "collect_garbage",
                "Lists what the registry does not need any more, or deletes it.",
                {"registry": self.registry, "delete": self.delete},
                cron="0 4 * * *",
            ),
            WantedDeployment(
                "advance_rollouts",
                "Makes the steps of rollouts that are due, every 15 s for as long as one runs.",
                {"registry": self.registry},
                cron="*/10 * * * *",
            ),
            WantedDeployment(
                "reconcile_fleet",
                "Compares the cluster's nodes with the registry, and says or tells what they lack.",
                {"registry": self.registry, "catalog": self.fleet_catalog, "apply": self.fleet == "apply"},
                cron=self.fleet_cron,
            ),
        )

    def limits(self) -> dict[str, int | None]:
        """Slots of each GPU generation; None: 1 where there is no limit yet, and otherwise unchanged."""
        return {generation.sm: self.slots.get(generation.sm) for generation in GENERATIONS}


def _from_event(*names: str) -> dict[str, str]:
    return {name: f"{{{{ event.payload.{name} }}}}" for name in names}


FLOWS = tuple(deployment.flow for deployment in DeploymentPlan("", fleet="report").deployments())
