"""`enginery deploy`."""

import json
from dataclasses import asdict
from datetime import timedelta

import click

from pipeline.cli.options import Duration, emit_json, executor_options, json_option, registry_option_with, say
from pipeline.cli.tables import echo, print_table
from pipeline.orchestration.deployments.plan import FLEET, FLEET_CRON, FLOWS, KINDS, NAME, POOL, DeploymentPlan


class _Pair(click.ParamType[tuple[str, object]]):
    """'name=value'; the value is JSON where it reads as JSON, else text."""

    name = "name=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        """A name and a value. Fails as click does without '='."""
        if isinstance(value, tuple):
            return str(value[0]), value[1]
        name, equals, text = str(value).partition("=")
        if not equals or not name:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        try:
            return name, json.loads(text)
        except ValueError:
            return name, text


@click.command()
@registry_option_with(None, "none: the workers must reach it by the same URI")
@click.option("--pool", default=POOL, show_default=True, help="Work pool; created if it does not exist.")
@click.option(
    "--type", "kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True, help="Type of the work pool."
)
@click.option("--name", default=NAME, show_default=True, help="Name of the deployments, as in compile-model/NAME.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([name.replace("_", "-") for name in FLOWS]),
    show_default="all",
    help="Flow to register; repeat it for several.",
)
@click.option(
    "--slots", multiple=True, type=_Pair(), help="Concurrent builds for a GPU generation, e.g. sm_89=4; repeat it."
)
@click.option(
    "--job-variable",
    "variables",
    multiple=True,
    type=_Pair(),
    help="Variable of the pool's job template, e.g. gpu_count=1; repeat it.",
)
@click.option("--traffic", help="Folder or s3:// prefix with MODEL.jsonl or MODEL.npz, for canaries.")
@click.option(
    "--canary-duration",
    type=Duration(),
    metavar="DURATION",
    show_default="the traffic once",
    help="How long canaries replay, e.g. 30m; traffic that is shorter is repeated.",
)
@click.option(
    "--catalog",
    default="registered",
    show_default=True,
    help="Where the nightly build finds its specs, as `enginery catalog` takes it.",
)
@click.option(
    "--channel",
    metavar="CHANNEL",
    default="stable",
    show_default=True,
    help="Channel that canaries compare with, promote and roll back.",
)
@executor_options
@click.option(
    "--on",
    metavar="TARGET",
    help="GPU (l4, sm_89) of Ray's nodes that prove and run canaries; without it the machine of a flow run does.",
)
@click.option(
    "--gc-delete", is_flag=True, help="Let the nightly garbage collection delete; without this it only lists."
)
@click.option(
    "--fleet",
    type=click.Choice(FLEET),
    default=FLEET[0],
    show_default=True,
    help="Reconcile the cluster's nodes on a schedule.",
)
@click.option("--fleet-catalog", help="Which models must be served where: a YAML file that the workers can read.")
@click.option(
    "--fleet-schedule",
    "fleet_cron",
    default=FLEET_CRON,
    show_default=True,
    help="When the fleet is reconciled: a cron expression, in UTC.",
)
@click.option("--owner", help="Whose the deployments are: a tag of theirs, such as a cluster's name.")
@click.option(
    "--keep",
    metavar="FLOW/NAME",
    multiple=True,
    help="Delete what this owner registered, but this and what is registered now; repeat it.",
)
@click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
@click.option("--print-yaml", is_flag=True, help="Print the deployments as a prefect.yaml; register nothing.")
@json_option
def deploy(
    registry: str | None,
    only: tuple[str, ...],
    slots: tuple[tuple[str, object], ...],
    variables: tuple[tuple[str, object], ...],
    wait_for_nodes: timedelta,
    canary_duration: timedelta | None,
    gc_delete: bool,
    dry_run: bool,
    print_yaml: bool,
    as_json: bool,
    pool: str,
    kind: str,
    name: str,
    traffic: str | None,
    catalog: str,
    channel: str,
    executor: str,
    ray_address: str | None,
    on: str | None,
    fleet: str,
    fleet_catalog: str | None,
    fleet_cron: str,
    owner: str | None,
    keep: tuple[str, ...],
) -> None:
    """Register Enginery's deployments, their triggers and schedules, its work pool and GPU limits with Prefect.

    Uses the server of PREFECT_API_URL. Safe to run again after an upgrade or with other options: only differences are
    applied.
    """
    from enginery.core.names import check_channel
    from pipeline.cli.machines import deploy_checks
    from pipeline.orchestration.deployments.plan import REGISTRY, text

    if keep and not owner:
        raise click.UsageError("--keep is about what an owner registered; give --owner")
    if on is not None and executor != "ray":
        raise click.UsageError("--on is about Ray's nodes; give --executor ray")
    if on is not None:
        deploy_checks.check_on(on, only, canary_duration)
    plan = DeploymentPlan(
        registry=deploy_checks.registry_uri(registry, REGISTRY if print_yaml else None),
        name=deploy_checks.checked_name("--name", name),
        pool=deploy_checks.checked_name("--pool", pool),
        kind=kind,
        traffic=None if traffic is None else deploy_checks.absolute_place("--traffic", traffic),
        catalog=catalog if catalog == "registered" else deploy_checks.absolute_place("--catalog", catalog),
        channel=check_channel(channel),
        executor=executor,
        ray_address=ray_address,
        on=on,
        only=tuple(flow.replace("-", "_") for flow in only),
        slots=deploy_checks.slot_counts(dict(slots)),
        variables=dict(variables),
        delete=gc_delete,
        wait_for_nodes_s=wait_for_nodes.total_seconds(),
        canary_s=deploy_checks.replay_s(canary_duration),
        fleet=fleet,
        fleet_catalog=deploy_checks.absolute_file(fleet_catalog),
        fleet_cron=deploy_checks.cron(fleet_cron),
        owner=owner,
        keep=keep,
    )
    if print_yaml:
        echo(text(plan), nl=False)
        return
    from pipeline.orchestration.deployments.deploy import deploy as deploy_plan

    changes = deploy_plan(plan, dry=dry_run)
    if as_json:
        emit_json([asdict(change) for change in changes])
    else:
        print_table(
            ("kind", "name", "would be" if dry_run else "action", "detail"),
            [list(asdict(change).values()) for change in changes],
        )
        if not dry_run:
            say(f"start a worker with: prefect worker start --pool {plan.pool}")
