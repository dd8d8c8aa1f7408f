"""`enginesmith prefect deploy`: registers flows with a Prefect server.

Every option is checked here: a mistake would else show hours later, in each flow run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import click

from enginesmith.cli.options import Option, command, duration, emit, say, takes
from enginesmith.cli.tables import print_table
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.machine import GENERATIONS
from enginesmith.core.names import STABLE, check_channel
from enginesmith.registry.store.base import EXAMPLES, absolute_uri, is_in_bucket, place_in_bucket
from pipeline.cli.run_options import Building
from pipeline.intake.registration import place_at
from pipeline.orchestration.deployments.plan import FLEET, FLEET_CRON, FLOWS, KINDS, NAME, POOL, DeploymentPlan
from pipeline.orchestration.gpu_workers import gpu_named


def pair(value: object) -> tuple[str, object]:
    """(name, value) of 'name=value', JSON where it reads as JSON, else text. Raises click's usage error without '='."""
    if isinstance(value, tuple):
        return str(value[0]), value[1]
    name, separator, text = str(value).partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{value!r} is not NAME=VALUE")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


# Prefect's own rule for names.
_BANNED = "/%&<>"
# Segments go to both engines, and each begins with requests from before it, so a canary with several requests in flight
# takes up to three times this: a day, which is what a task on Ray's workers may take (`gpu_workers.LIMITS`).
LONGEST_ON_RAY = timedelta(hours=8)


@dataclass(frozen=True, kw_only=True)
class _DeployOptions:
    pool: Annotated[str, Option("Work pool; created if it does not exist.")] = POOL
    kind: Annotated[str, Option("Type of the work pool.", name="--type", type=click.Choice(KINDS))] = KINDS[0]
    name: Annotated[str, Option("Name of the deployments, as in compile-model/NAME.")] = NAME
    only: Annotated[
        tuple[str, ...],
        Option(
            "Flow to register; repeat it for several.",
            type=click.Choice([name.replace("_", "-") for name in FLOWS]),
            shown="all",
        ),
    ] = ()
    slots: Annotated[
        tuple[tuple[str, object], ...],
        Option(
            "Maximum number of concurrent builds for a GPU generation, e.g. sm_89=4; repeatable.",
            type=pair,
            metavar="NAME=VALUE",
            shown="the limit that the server has, else 1",
        ),
    ] = ()
    variables: Annotated[
        tuple[tuple[str, object], ...],
        Option(
            "Variable of the pool's job template, e.g. gpu_count=1; repeatable.",
            name="--job-variable",
            type=pair,
            metavar="NAME=VALUE",
        ),
    ] = ()
    traffic: Annotated[
        str | None,
        Option("Folder or bucket prefix with recorded traffic for canaries: MODEL.jsonl or MODEL.npz of each model."),
    ] = None
    canary_duration: Annotated[
        timedelta | None,
        Option(
            "How long canaries replay traffic, e.g. 30m; shorter traffic is repeated.",
            type=duration,
            metavar="DURATION",
            shown="the traffic once",
        ),
    ] = None
    catalog: Annotated[str, Option("Specs of the nightly build: a value for `enginesmith build --all`.")] = "registered"
    channel: Annotated[str, Option("Channel that canaries compare with, promote and roll back.", metavar="CHANNEL")] = (
        STABLE
    )
    building: Building
    on: Annotated[
        str | None,
        Option(
            "GPU of the Ray nodes that prove engines and run canaries, e.g. l4 or sm_89.",
            metavar="TARGET",
            shown="the machine of the flow",
        ),
    ] = None
    gc_delete: Annotated[bool, Option("Let the nightly garbage collection delete; without this it only lists.")] = False
    fleet: Annotated[
        str,
        Option(
            "Compare nodes with the registry on a schedule; report: only report; apply: also start builds and proofs.",
            type=click.Choice(FLEET),
        ),
    ] = FLEET[0]
    fleet_catalog: Annotated[
        str | None,
        Option(
            "Catalog for --fleet: a YAML file, readable by the workers, that says which models must be served where.",
            shown="every model with a channel, on every GPU",
        ),
    ] = None
    fleet_cron: Annotated[str, Option("Schedule of --fleet: a cron expression, in UTC.", name="--fleet-schedule")] = (
        FLEET_CRON
    )
    owner: Annotated[
        str | None, Option("Owner of the deployments, such as a cluster; each deployment gets it as a tag.")
    ] = None
    keep: Annotated[
        tuple[str, ...],
        Option(
            "Delete the deployments of --owner that this call does not register, except FLOW/NAME; repeatable.",
            metavar="FLOW/NAME",
        ),
    ] = ()
    dry_run: Annotated[bool, Option("Show what would change; change nothing.")] = False

    def plan(self, registry: str) -> DeploymentPlan:
        """The plan to register. Raises InputError and UnknownNameError if Prefect or a flow run would refuse it."""
        return DeploymentPlan(
            registry=registry,
            name=_check_name("--name", self.name),
            pool=_check_name("--pool", self.pool),
            **{name: getattr(self, name) for name in ("kind", "on", "fleet", "owner", "keep")},
            traffic=None if self.traffic is None else _absolute_place("--traffic", self.traffic),
            catalog=self.catalog if self.catalog == "registered" else _absolute_place("--catalog", self.catalog),
            channel=check_channel(self.channel),
            executor=self.building.executor,
            ray_address=self.building.ray_address,
            only=tuple(flow.replace("-", "_") for flow in self.only),
            slots=_check_slots(dict(self.slots)),
            variables=dict(self.variables),
            delete=self.gc_delete,
            wait_for_nodes_s=self.building.wait_for_nodes.total_seconds(),
            canary_s=self.canary_duration.total_seconds() if self.canary_duration else None,
            fleet_catalog=str(Path(self.fleet_catalog).expanduser().absolute()) if self.fleet_catalog else None,
            fleet_cron=_check_cron(self.fleet_cron),
        )


@command()
@takes(_DeployOptions)
def deploy(options: _DeployOptions, stated_registry: str | None, as_json: bool) -> None:
    """Register Enginesmith's deployments, triggers, schedules, work pool and GPU limits with a Prefect server.

    PREFECT_API_URL names the server. You can run the command again after an upgrade or with other options: it applies
    only the differences.
    """
    if options.keep and not options.owner:
        raise click.UsageError("--keep applies only to what an owner registered; give --owner")
    if options.on is not None and options.building.executor != "ray":
        raise click.UsageError("--on chooses nodes of Ray; give --executor ray")
    if options.canary_duration is not None and not options.canary_duration:
        raise InputError("--canary-duration is 0; give how long to replay, such as 30m, or leave it out")
    if options.on is not None:
        _check_on(options.on, options.only, options.canary_duration)
    if stated_registry is None:
        raise InputError(
            "the deployments need a registry that the workers reach; give --registry or ENGINESMITH_REGISTRY"
        )
    plan = options.plan(absolute_uri(stated_registry))
    from pipeline.orchestration.deployments.deploy import deploy as deploy_plan

    changes = deploy_plan(plan, dry=options.dry_run)
    columns = ("kind", "name", "would be" if options.dry_run else "action", "detail")
    documents = [asdict(change) for change in changes]
    emit(as_json, documents, print_table, columns, [list(document.values()) for document in documents])
    if not (options.dry_run or as_json):
        say(f"start a worker with: prefect worker start --pool {plan.pool}")


def _check_name(option: str, name: str) -> str:
    """Return the name. Raises InputError if Prefect does not accept it."""
    if not name.strip() or set(name) & set(_BANNED):
        raise InputError(f"{option} {name!r}: give a name without any of {' '.join(_BANNED)}")
    return name


def _absolute_place(option: str, place: str) -> str:
    """The absolute path of a folder, or a bucket's or file:// URI as it is. Raises InputError for what is neither."""
    if not place:
        raise InputError(f"{option} is empty; give a folder, file:///folder, {EXAMPLES}, or leave it out")
    if "://" not in place:
        return str(Path(place).expanduser().absolute())
    if is_in_bucket(place):
        place_in_bucket(place)
    with place_at(place):
        return place


def _check_on(name: str, only: tuple[str, ...], duration: timedelta | None) -> None:
    """Raise InputError or UnknownNameError unless Ray's workers with the GPU `name` can run what it is given for."""
    gpu_named(name)
    if only and not {"validate-pending", "canary"} & set(only):
        raise InputError(f"--on is for validate-pending and canary, not for {', '.join(only)}; leave it out")
    if duration is not None and duration > LONGEST_ON_RAY:
        raise InputError(
            "--canary-duration: a canary on Ray's workers takes up to three times as long, and ends after a day; "
            "give 8h or less"
        )


def _check_cron(expression: str) -> str:
    """The five fields. Raises InputError for a cron expression that Prefect's server would refuse."""
    if expression == FLEET_CRON:
        return expression
    from prefect.client.schemas.schedules import CronSchedule

    try:
        CronSchedule(cron=expression)
        is_valid = len(expression.split()) == 5
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InputError(f"--fleet-schedule {expression!r}: give five fields of cron, such as {FLEET_CRON!r}")
    return expression


def _check_slots(slots: Mapping[str, object]) -> dict[str, int]:
    """Builds at once by GPU generation. Raises UnknownNameError for no generation, InputError for no number."""
    generation_names = [generation.sm for generation in GENERATIONS]
    slot_counts: dict[str, int] = {}
    for name, count in slots.items():
        if name not in generation_names:
            raise UnknownNameError(
                f"--slots {name}: no GPU generation has that name; there are {', '.join(generation_names)}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
            raise InputError(f"--slots {name}={count}: give a whole number from 1 to 10000")
        slot_counts[name] = count
    return slot_counts
