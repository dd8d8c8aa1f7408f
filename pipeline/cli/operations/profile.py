"""`enginery profile`."""

from typing import TYPE_CHECKING

import click

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
    from pipeline.values import Json


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
    from pipeline.operations.latency import Asked, profile_published, race_published

    asked = Asked(seconds, buckets or ("all" if all_buckets else "few"), streams, seed)
    with published_engine(registry, reference, target, precision, quiet) as (chosen, shop):
        if against is None:
            found = profile_published(chosen, asked, shop)
        else:
            other = against_precision or precision
            second = choose(shop.store, parse_reference(against), target_named(target), other)
            found = race_published(chosen, second, asked, shop)
    if as_json:
        emit_json(found)
    elif against is None:
        _show(found)
    else:
        _show_race(found)


def _show(report: "Json") -> None:
    from pipeline.cli.tables import print_table
    from validation.latency.words import COLUMNS, NODE_COLUMNS, bucket_row, lines, node_rows

    echo(f"{report['model']}@{report['version']} {report['unit']}")
    rows = [bucket_row(bucket) for bucket in report["buckets"]]
    print_table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    for line in lines(report):
        echo(line)
    if nodes := node_rows(report["anatomy"]):
        print_table(NODE_COLUMNS, [[row[column] for column in NODE_COLUMNS] for row in nodes])


def _show_race(race: "Json") -> None:
    from validation.latency.words import race_lines

    names = [f"{side['model']}@{side['version']} {side['precision']}" for side in (race["first"], race["second"])]
    echo(f"{names[0]} against {names[1]}, on {race['first']['target']}")
    for line in race_lines(race):
        echo(line)
