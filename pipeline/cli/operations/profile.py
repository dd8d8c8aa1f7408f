"""`enginery profile`."""

from typing import TYPE_CHECKING

import click

from enginery.core.codec import encode
from enginery.core.types import PRECISIONS
from pipeline.cli.options import (
    emit_json,
    engine_options,
    json_option,
    progress_options,
    reference_argument,
    registry_option,
)
from pipeline.cli.published_engine import published_engine
from pipeline.cli.tables import echo

if TYPE_CHECKING:
    from enginery.core.reports.latency import LatencyReport, PairedBenchmark
    from pipeline.canary.engines import ChosenEngine


@click.command()
@reference_argument
@registry_option
@engine_options
@click.option(
    "--bucket",
    "buckets",
    multiple=True,
    show_default="smallest, opt and largest",
    help="Sizes, as in batch=8,length=64; repeat it.",
)
@click.option("--all-buckets", is_flag=True, help="Time both ends of every bucket.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=1.0,
    show_default=True,
    help="Seconds of timing for each bucket; with --against, for all of them.",
)
@click.option(
    "--streams",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Also time this many concurrent sessions.",
)
@click.option("--against", metavar="REF2", help="Instead compare with an engine of this REF: which is faster.")
@click.option(
    "--against-precision", type=click.Choice(PRECISIONS), show_default="that of --precision", help="Precision of REF2."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the order with --against.")
@progress_options
@json_option
def profile(
    reference: str,
    registry: str,
    target: str,
    precision: str | None,
    buckets: tuple[str, ...],
    all_buckets: bool,
    seconds: float,
    streams: int,
    against: str | None,
    against_precision: str | None,
    seed: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Time the engine of REF on this machine: latency by bucket with confidence intervals, memory, nodes, bottleneck.

    With --against, the two engines run alternately in small blocks in random order, so that other load on the machine
    affects both alike.
    """
    from enginery.core.hardware.machine import target_named
    from enginery.core.names import parse_reference
    from pipeline.canary.engines import choose
    from pipeline.operations.latency import ProfileOptions, benchmark_pair, profile_published

    options = ProfileOptions(seconds, buckets or ("all" if all_buckets else "few"), streams, seed)
    with published_engine(registry, reference, target, precision, quiet) as (chosen, context):
        if against is None:
            _show(chosen, profile_published(chosen, options, context), as_json)
            return
        other = against_precision or precision
        second = choose(context.store, parse_reference(against), target_named(target), other)
        _show_pair(chosen, second, benchmark_pair(chosen, second, options, context), as_json)


def _show(chosen: "ChosenEngine", report: "LatencyReport", as_json: bool) -> None:
    from pipeline.cli.tables import print_table
    from validation.latency.formatting import COLUMNS, NODE_COLUMNS, describe_report, format_bucket, format_nodes

    if as_json:
        emit_json({**encode(chosen.identity), **encode(report)})
        return
    echo(f"{chosen.manifest.model}@{chosen.manifest.version} {report.unit}")
    rows = [format_bucket(bucket) for bucket in report.buckets]
    print_table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    for line in describe_report(report):
        echo(line)
    if nodes := format_nodes(report.anatomy):
        print_table(NODE_COLUMNS, [[row[column] for column in NODE_COLUMNS] for row in nodes])


def _show_pair(first: "ChosenEngine", second: "ChosenEngine", paired: "PairedBenchmark", as_json: bool) -> None:
    from validation.latency.formatting import describe_pair

    if as_json:
        emit_json({"first": encode(first.identity), "second": encode(second.identity), **encode(paired)})
        return
    names = [f"{side.manifest.model}@{side.manifest.version} {side.entry.precision}" for side in (first, second)]
    echo(f"{names[0]} against {names[1]}, on {first.entry.target}")
    for line in describe_pair(paired):
        echo(line)
