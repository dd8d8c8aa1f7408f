"""`enginery attribute`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from builders.types import PRECISIONS
from pipeline.commands.options import emit_json, json_option, progress_options, registry_option, say, shown_progress
from pipeline.commands.tables import echo, print_table

if TYPE_CHECKING:
    from pipeline.attribution import Answer
    from validation.attribution.result import Attribution


@click.command()
@click.argument("reference", metavar="REF")
@click.option("--target", required=True, help="Target or group of the engines, e.g. cpu, sm_89 or ampere.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Only this precision.")
@click.option("--out", type=click.Path(path_type=Path), help="File for the whole result as JSON.")
@registry_option
@progress_options
@json_option
@click.pass_context
def attribute(
    ctx: click.Context,
    reference: str,
    target: str,
    precision: str | None,
    out: Path | None,
    registry: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Say which node drifted in the graphs and engines of REF, by its own error and by what it inherits.

    For a quantized or cast graph that fails, also what to leave in float. Exit 1 when something failed.
    """
    from builders.local import LocalExecutor
    from builders.targets import parse_targets
    from pipeline.attribution import attribute_version, to_json
    from pipeline.registry.names import parse_reference
    from pipeline.registry.store import open_store
    from pipeline.registry.trust import require
    from pipeline.registry.versions import locate
    from pipeline.workshop import Workshop

    store = open_store(registry)
    located = locate(store, parse_reference(reference))
    require(store, located)
    manifest = located.manifest
    wanted = {item.name for item in parse_targets(target)}
    executor = LocalExecutor()
    with shown_progress(quiet) as progress:
        shop = Workshop(store, executor, executor, progress)
        answers = list(attribute_version(manifest, wanted, precision, shop))
    told: dict[str, Any] = {"model": manifest.model, "version": manifest.version}
    told["attributions"] = [to_json(answer) for answer in answers]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        say(f"wrote {out}")
    if as_json:
        emit_json(told)
    else:
        for answer in answers:
            _show(answer)
    ctx.exit(1 if any(answer.found and answer.found.finding != "nothing-failed" for answer in answers) else 0)


def _show(answer: "Answer") -> None:
    from validation.attribution.words import lines

    echo(f"{answer.told.name} ({answer.told.joint})")
    if answer.found is None:
        echo(f"  {answer.told.headline}")
        return
    first, *rest = lines(answer.found)
    echo(f"  {first}")
    if answer.found.rows:
        _print_segments(answer.found)
    for line in rest:
        echo(f"  {line}")


def _print_segments(found: "Attribution") -> None:
    from validation.attribution.words import COLUMNS, SHOWN, cells

    rows, more = found.rows[:SHOWN], len(found.rows) - SHOWN
    print_table(
        COLUMNS,
        [cells(index, row) for index, row in enumerate(rows)],
        note=f"{more} more segments err less by themselves; --json has them" if more > 0 else "",
        red=[index for index, row in enumerate(rows) if row.blamed],
    )
