"""`enginesmith pull --follow`: follows channels until it is told to end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.layouts import triton_of
from enginesmith.cli.options import emit_json, say
from enginesmith.cli.pull_options import machines_of, one_machine

if TYPE_CHECKING:
    from enginesmith.client.client import Client, Swap


def follow(client: "Client", references: tuple[str, ...], dest: Path, given: dict[str, Any], as_json: bool) -> None:
    """Follow the channels until SIGTERM or Ctrl-C; the engines that are served stay."""
    from enginesmith.client.client import Plain
    from enginesmith.client.watching.hooks import Command, Post
    from enginesmith.client.watching.looking import INTERVAL_S

    if given["layout"] == "kserve":
        raise click.UsageError("--layout kserve writes objects once; a cluster follows no channel by them")
    one, in_triton = len(references) == 1, given["layout"] == "triton"
    if in_triton and not one:
        raise click.UsageError("--layout triton follows one channel for each folder; watch each into its own")
    line, url, timeout_s = given["hook"], given["hook_url"], given["hook_timeout"]
    if line and url:
        raise click.UsageError("give --hook or --hook-url, not both")
    if not references:
        raise click.UsageError("give a channel to follow, as in digits:stable")
    options: dict[str, Any] = {
        "machine": machines_of(given) if in_triton else one_machine(given),
        "hook": Command(line, timeout_s) if line else Post(url, timeout_s) if url else None,
        **{name: given[name] for name in ("once", "keep")},
        "say": say,
        **_reporting(given),
    }
    try:
        if one:
            interval_s = given["interval"] or INTERVAL_S
            layout = triton_of(given) if in_triton else Plain()
            swap = client.watch(references[0], dest, layout=layout, interval_s=interval_s, **options)
            swaps: tuple[Swap, ...] = () if swap is None else (swap,)
        else:
            swaps = client.watch_group(references, dest, interval_s=given["interval"], **options)
    except KeyboardInterrupt:
        say("stopped")
        return
    if as_json and (swaps or not one):
        found = [{**swap.facts(), "swapped": swap.swapped, "origin": swap.origin} for swap in swaps]
        emit_json(found[0] if one else found)


def _reporting(given: dict[str, Any]) -> dict[str, Any]:
    """How a watcher reports to rollouts."""
    from enginesmith.client.client import HealthCommand, HealthUrl, ReportUrl

    line, health, url = given["health_command"], given["health_url"], given["report_url"]
    if (line and health) or (url and given["no_report"]):
        raise click.UsageError("give --health-command or --health-url, and --report-url or --no-report, not both")
    if (line or health) and given["no_report"]:
        raise click.UsageError("what --health-command and --health-url find is reported; leave out --no-report")
    report = ReportUrl(url) if url else not given["no_report"]
    return {"health": HealthCommand(line) if line else HealthUrl(health) if health else None, "report": report}


def refuse_without_watch(context: click.Context) -> None:
    """Raise click's usage error for an option that goes with --follow."""
    for name in (
        "once",
        "hook",
        "hook_url",
        "interval",
        "keep",
        "hook_timeout",
        "health_command",
        "health_url",
        "report_url",
        "no_report",
    ):
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --follow")
