"""`enginery rebuild`."""

from typing import TYPE_CHECKING

import click

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
    from pipeline.operations.rebuild import RebuiltEngine


@click.command()
@reference_argument
@registry_option
@engine_options
@click.option(
    "--times", type=click.IntRange(2, 100), default=3, show_default=True, help="Number of independent builds."
)
@progress_options
@json_option
@click.pass_context
def rebuild(
    ctx: click.Context,
    /,
    reference: str,
    registry: str,
    target: str,
    precision: str | None,
    times: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build an engine of REF again, several times, and compare the bytes and the outputs.

    Publishes nothing. Exit code 1 if outputs differ by more than the drift limits; different bytes are no failure.
    """
    from pipeline.operations.rebuild import rebuild as build_again

    with published_engine(registry, reference, target, precision, quiet) as (chosen, context):
        found = build_again(chosen, times, context)
    if as_json:
        emit_json(found.to_json())
    else:
        _print_rebuilt(found)
    ctx.exit(0 if found.report.passed else 1)


def _print_rebuilt(found: "RebuiltEngine") -> None:
    report, manifest = found.report, found.chosen.manifest
    bytes_equal = "byte-equal" if report.byte_equal else f"{len(report.engines)} different files"
    published = "as published" if found.rebuilt else "none is the published one"
    unit = f"{manifest.model}@{manifest.version} {found.chosen.entry.unit}"
    echo(f"{unit}, {report.times} builds: {bytes_equal}, {published}")
    for output, spread in report.outputs.items():
        apart = "" if spread.max_abs is None else f", up to {spread.max_abs:.4g} apart"
        same = "bit-equal" if spread.bit_equal else f"{spread.distinct} different answers{apart}"
        echo(f"  {output}: {same}{'' if report.passed else ', beyond the limits of drift'}")
