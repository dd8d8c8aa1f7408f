"""`enginesmith traffic capacity`: machines and cost for a rate of requests, as tables, JSON or a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    Percent,
    ShortTime,
    emit_json,
    json_option,
    number_option,
    path_option,
    precision_option,
    progress_options,
    progress_speaker,
    reference_argument,
    registry_option,
    require_svg,
    say,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.text import format_plain
from pipeline.cli.published import trusted_manifest

if TYPE_CHECKING:
    from pipeline.capacity.forecast import CapacityForecast, EngineCapacity

_COLUMNS = ("engine", "on", "a second", "batch", "wait", "busy", "machines", "a million")


@click.command()
@reference_argument
@registry_option
@number_option(
    "--rate", click.FloatRange(0, 1e9, min_open=True), None, "Requests a second of the whole fleet.", shown=False
)
@click.option("--p99", type=ShortTime(above=True), required=True, help="Limit of latency, kept by 99 in 100 (50ms).")
@path_option("--prices", "Prices of machines (YAML).", shown="no costs", exists=False)
@path_option("--fleet", "Inventory as `enginesmith fleet` reads it; its counts replace those of the prices.")
@path_option("--traffic", "Recorded requests: their arrivals, scaled in time, and sizes.", shown="Poisson arrivals")
@click.option("--at", metavar="NAME=SIZE,...", show_default="opt sizes", help="Sizes of dims, as in length=64.")
@number_option("--batch", click.IntRange(1), None, "Samples of a batch, at most.", shown="the best of those timed")
@click.option("--wait", type=ShortTime(), show_default="the best of five", help="Longest wait for others (2ms).")
@click.option("--headroom", type=Percent(), default="0%", show_default=True, help="Share of each machine kept free.")
@number_option("--spare", click.IntRange(0, 100), 1, "Machines that may be lost.")
@click.option(
    "--batch-overhead", type=ShortTime(), show_default="not counted", help="What your server adds to each batch."
)
@click.option("--request-overhead", type=ShortTime(), show_default="not counted", help="The same, for each request.")
@precision_option("all")
@path_option("--out", "File for the picture: cost against the limit (SVG).", dir_okay=False)
@progress_options
@json_option
@click.pass_context
def capacity(
    ctx: click.Context,
    /,
    reference: str,
    registry: str,
    rate: float | None,
    p99: float,
    prices: Path | None,
    fleet: Path | None,
    traffic: Path | None,
    at: str | None,
    batch: int | None,
    wait: float | None,
    headroom: float,
    spare: int,
    batch_overhead: float | None,
    request_overhead: float | None,
    precision: str | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Show how many machines of each kind serve REF at a rate within a limit of p99, what that costs, and the cheapest
    mix.

    By the latencies on record of each engine on each kind of machine, through a simulated batcher. What was not timed
    is not guessed. Exit code 1 if no engine keeps the limit, or the machines that there are do not carry the rate.
    """
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.store.files import write_whole
    from pipeline.capacity.forecast import ServerOverhead, ServingTerms
    from pipeline.capacity.run import CapacityTerms, prepare
    from validation.capacity.greatest_rate import LatencyLimit
    from validation.capacity.machines import CapacityDemand
    from validation.capacity.picture import cost_svg

    if rate is None:
        raise click.UsageError("give --rate, requests a second")
    if out and not prices:
        raise click.UsageError("the picture is of costs: give --prices")
    if out:
        require_svg(out)
    stated = batch_overhead is not None or request_overhead is not None
    server = ServerOverhead(batch_overhead or 0.0, request_overhead or 0.0) if stated else None
    terms = CapacityTerms(
        CapacityDemand(rate, headroom, spare), LatencyLimit(p99),
        ServingTerms(batch, wait, server), prices, fleet, traffic, at, precision,
    )  # fmt: skip
    store = open_store(registry)
    prepared = prepare(store, trusted_manifest(store, reference), terms, progress_speaker(quiet))
    found = prepared.forecast()
    if out:
        write_whole(out, cost_svg(prepared.cost_curves(found), p99, found.currency).encode())
        say(f"picture: {out}")
    if as_json:
        emit_json(encode(found))
    else:
        print_forecast(found)
    ctx.exit(0 if any(row.greatest for row in found.engines) and not found.why_no_mix else 1)


def print_forecast(found: "CapacityForecast") -> None:
    """Print the engines that were timed, those that were not, and the cheapest mix."""
    demand = found.demand
    free = f", {100 * demand.headroom:g} % of each machine free" if demand.headroom else ""
    lost = f", {demand.spare} machine{'s' if demand.spare > 1 else ''} lost" if demand.spare else ""
    echo(
        f"{found.reference}: {demand.rate:g} requests a second, p99 within {1e3 * found.limit.seconds:g} ms{free}{lost}"
    )
    echo(found.arrivals)
    carrying = [row for row in found.engines if row.greatest]
    if carrying:
        print_table(_COLUMNS, [_row(row, found.currency) for row in carrying])
    if any(row.busy for row in carrying):
        say("remark: engines marked * were timed on a busy machine; their rates hold for such a machine")
    if any(row.server is None for row in carrying):
        say(
            "remark: what a server adds to a run is not counted; measure yours, and give --batch-overhead and"
            " --request-overhead"
        )
    if others := [row for row in found.engines if not row.greatest]:
        print_table(("engine", "on", "why not"), [[row.unit, row.machine, row.reason] for row in others])
    if found.mix and found.mix_per_million and found.mix_units is not None:
        cost = _cost(found.mix_per_million.value, found.mix_per_million.low, found.mix_per_million.high, found.currency)
        parts = ", ".join(f"{count} {name} ({found.mix_units[name]})" for name, count in found.mix.machines.items())
        echo(f"cheapest mix: {parts}: {found.mix.per_hour:.4g} {found.currency} an hour, {cost} a million")
    elif found.why_no_mix:
        echo(f"no mix: {found.why_no_mix}")


def _row(row: "EngineCapacity", currency: str) -> Sequence[str]:
    found, machines, cost = row.greatest, row.machines, row.per_million
    if found is None or machines is None:
        return ()
    rate, policy = found.rate, found.policy
    high = "?" if machines.high is None else machines.high
    return (
        row.unit + (" *" if row.busy else ""),
        row.machine,
        f"{rate.value:.4g} ({rate.low:.4g} to {rate.high:.4g})",
        f"{found.batch:.1f} of {policy.most}",
        f"{format_plain(1e3 * policy.wait_s)} ms",
        f"{100 * found.utilization:.0f} %",
        f"{machines.value} ({machines.low} to {high})",
        _cost(cost.value, cost.low, cost.high, currency) if cost else "no price",
    )


def _cost(value: float, low: float, high: float | None, currency: str) -> str:
    most = "?" if high is None else format_plain(high)
    return f"{format_plain(value)} ({format_plain(low)} to {most}) {currency}".rstrip()
