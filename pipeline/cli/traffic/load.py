"""`enginesmith load`: requests to a server as users make them, in an open loop."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    ShortTime,
    emit_json,
    engine_options,
    json_option,
    number_option,
    path_option,
    progress_options,
    progress_speaker,
    reference_argument,
    registry_option,
    say,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.digest import canonical_json
from enginesmith.core.text import format_bytes

if TYPE_CHECKING:
    from enginesmith.core.reports.load import LoadReport


@click.command()
@reference_argument
@registry_option
@engine_options
@number_option("--rate", click.FloatRange(0, 1e6, min_open=True), None, "Requests a second.", shown=False)
@number_option("--seconds", click.FloatRange(0, 86_400, min_open=True), 30.0, "How long requests are sent.")
@number_option("--burst", click.FloatRange(1, 1000), 1.0, "So many times the rate in bursts; 1: none.")
@number_option("--burst-seconds", click.FloatRange(0, min_open=True), 2.0, "How long a burst is.")
@number_option("--burst-every", click.FloatRange(0, min_open=True), 10.0, "Seconds from one burst to the next.")
@path_option("--traffic", "Recorded requests, sent in their order and at their times, scaled to --rate.")
@click.option("--at", metavar="NAME=SIZE,...", show_default="opt sizes", help="Sizes of dims, as in length=64.")
@number_option("--batch", click.IntRange(1), None, "Samples of a batch, at most.", shown="the model's most")
@click.option("--wait", type=ShortTime(), default="2ms", show_default=True, help="Longest wait of the batcher.")
@number_option("--seed", click.IntRange(0), 0, "Seed of the arrivals.")
@click.option("--record", is_flag=True, help="Attach the result to the version, for `enginesmith report`.")
@progress_options
@json_option
@click.pass_context
def load(
    ctx: click.Context,
    /,
    reference: str,
    registry: str,
    target: str,
    precision: str | None,
    rate: float | None,
    seconds: float,
    burst: float,
    burst_seconds: float,
    burst_every: float,
    traffic: Path | None,
    at: str | None,
    batch: int | None,
    wait: float,
    seed: int,
    record: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Send requests to an engine of REF as users make them, at times fixed before, and show the latencies from then.

    The engine runs behind a router and a batcher in a process of its own on this machine. Stops by itself; Ctrl-C shows
    what there is. Exit code 1 if no request was answered.
    """
    from enginesmith.core.hardware.machine import target_named
    from enginesmith.core.names import parse_reference
    from enginesmith.registry.evidence.loads import attach_load
    from enginesmith.registry.store.base import open_store
    from pipeline.canary.engines import choose
    from pipeline.capacity.load_requests import LoadOptions, load_published
    from validation.load.arrivals import BurstTerms

    if rate is None:
        raise click.UsageError("give --rate, requests a second")
    store = open_store(registry)
    chosen = choose(store, parse_reference(reference), target_named(target), precision)
    bursts = BurstTerms(burst, burst_seconds, burst_every)
    options = LoadOptions(rate, seconds, bursts, batch, wait, at, traffic, seed)
    with tempfile.TemporaryDirectory(prefix="enginesmith-load-") as folder:
        report = load_published(store, chosen, options, Path(folder), progress_speaker(quiet))
    if as_json:
        emit_json({**encode(chosen.identity), **encode(report), "remarks": list(report.remarks)})
    else:
        print_load(report)
    if record and not report.interrupted:
        attach_load(store, chosen.manifest, store.put_bytes(canonical_json(encode(report))))
        say(f"attached to {chosen.manifest.model}@{chosen.manifest.version}; `enginesmith report` shows it")
    elif record:
        say("not attached, as it was interrupted")
    ctx.exit(130 if report.interrupted else 0 if report.answered else 1)


def print_load(report: "LoadReport") -> None:
    """Print a load report."""
    from validation.load.view import COLUMNS, describe_load, format_phase

    print_table(COLUMNS, [[format_phase(phase)[column] for column in COLUMNS] for phase in report.phases])
    for line in describe_load(report):
        echo(line)
    for remark in report.remarks:
        echo(f"remark: {remark}")
    if len(report.memory.by_minute) > 1:
        echo("memory by minute: " + ", ".join(format_bytes(size) for size in report.memory.by_minute))
