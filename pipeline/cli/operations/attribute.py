"""`enginesmith debug attribute`: which nodes drifted in the graphs and engines of a version."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    emit_json,
    json_option,
    path_option,
    precision_option,
    progress_options,
    reference_argument,
    registry_option,
    say,
    targets_option,
)
from enginesmith.cli.tables import echo, print_table
from pipeline.cli.published import local_context, target_names, trusted_manifest

if TYPE_CHECKING:
    from pipeline.operations.attribution import AttributionAnswer


@click.command()
@reference_argument
@targets_option(None)
@precision_option("all")
@path_option("--out", "Also write the whole result to this file, as JSON.")
@registry_option
@progress_options
@json_option
@click.pass_context
def attribute(
    ctx: click.Context,
    reference: str,
    targets: str,
    precision: str | None,
    out: Path | None,
    registry: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find the nodes that drifted in the graphs and engines of REF: the error each adds, and the error it inherits.

    For a quantized or cast graph that fails, also says which nodes to leave in float. Exit code 1 if anything failed,
    and for an attribution that could not be made.
    """
    from enginesmith.registry.store.base import open_store
    from pipeline.operations.attribution import attribute_version

    store = open_store(registry)
    manifest = trusted_manifest(store, reference)
    wanted = target_names(manifest, targets)
    with local_context(store, quiet) as context:
        answers = list(attribute_version(manifest, wanted, precision, context))
    found = [answer.to_json() for answer in answers]
    told = {"model": manifest.model, "version": manifest.version, "attributions": found}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        say(f"wrote {out}")
    if as_json:
        emit_json(told)
    else:
        for answer in answers:
            _show(answer)
    bad = [each for each in answers if each.failed or (each.found and each.found.finding != "nothing-failed")]
    ctx.exit(1 if bad else 0)


def _show(answer: "AttributionAnswer") -> None:
    from validation.attribution.formatting import COLUMNS, SHOWN, describe_attribution, format_row

    echo(f"{answer.attributed.name} ({answer.attributed.joint})")
    found = answer.found
    if found is None:
        echo(f"  {'the attribution failed: ' if answer.failed else ''}{answer.attributed.headline}")
        return
    first, *rest = describe_attribution(found)
    echo(f"  {first}")
    if found.rows:
        rows, more = found.rows[:SHOWN], len(found.rows) - SHOWN
        print_table(
            COLUMNS,
            [format_row(index, row) for index, row in enumerate(rows)],
            note=f"{more} more segments err less by themselves; --json has them" if more > 0 else "",
            red=[index for index, row in enumerate(rows) if row.blamed],
        )
    for line in rest:
        echo(f"  {line}")
