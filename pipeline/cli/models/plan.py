"""`enginery plan`."""

from typing import TYPE_CHECKING

import click

from pipeline.cli.models.build import STYLES, spec_options
from pipeline.cli.options import emit_json, say, shown_progress
from pipeline.cli.tables import echo, print_table

if TYPE_CHECKING:
    from pipeline.compile.forecast import Forecast
    from pipeline.orchestration.run import RunOptions


@click.command()
@spec_options
@click.option("--no-export", is_flag=True, help="Answer from what is on record; run nothing and write nothing.")
def plan(
    spec: str,
    as_json: bool,
    quiet: bool,
    no_export: bool,
    registry: str | None,
    targets: str | None,
    precisions: str | None,
    backends: str | None,
    jobs: int | None,
) -> None:
    """Show for every unit of SPEC whether it would be built, and why.

    What is not on record yet is exported, calibrated and quantized first, so that every build key is complete. With
    --no-export a unit whose graph is not on record is 'unknown'.
    """
    from pipeline.orchestration.run import RunOptions

    found = _forecast(spec, RunOptions(registry, targets, precisions, backends, jobs=jobs), quiet, no_export)
    if as_json:
        emit_json(found.to_json())
    else:
        _print_plan(found)
    unknown = found.count("unknown")
    if unknown:
        verb = "is" if unknown == 1 else "are"
        say(f"{unknown} of {len(found.units)} units {verb} unknown; without --no-export all are known")


def _forecast(spec: str, options: "RunOptions", quiet: bool, no_export: bool) -> "Forecast":
    from pipeline.compile.composition import InProcess, prepare
    from pipeline.compile.forecast import OnRecord, foresee, on_record, open_records
    from pipeline.compile.plan import find_unserved
    from pipeline.intake.places import spec_at
    from pipeline.orchestration.run import open_run, select, store_of

    with spec_at(spec, options.registry) as found:
        model = found.load()
        selection = select(model, options)
        left_out = find_unserved(model, selection)
        if no_export and left_out:
            say(f"left out, since no backend of the spec builds for it: {', '.join(left_out)}")
        context = open_records(store_of(model, options))
        known = on_record(model, selection, context)
        if known.missing and not no_export and not quiet:
            say(
                f"not on record: {', '.join(known.missing)}; that is done first, and what follows from it, so that "
                "every build key is complete (--no-export answers from what is on record)"
            )
        if not no_export:
            with shown_progress(quiet) as progress, open_run(found, options, progress, keep_state=False) as run:
                ready = prepare(run.spec, run.selection, run.context, InProcess())
            known = OnRecord(ready.exported, ready.graphs)
        return foresee(model, selection, known, context)


def _print_plan(found: "Forecast") -> None:
    actions = ["build", "cached", "refused", *(["unknown"] if found.count("unknown") else [])]
    print_table(
        ("target", "precision", "backend", "action", "why"),
        [
            [unit.item.target.name, unit.item.precision, unit.item.backend.name, unit.action, unit.reason]
            for unit in found.units
        ],
        title=f"{found.model}: " + ", ".join(f"{found.count(action)} {action}" for action in actions),
        styles=STYLES,
    )
    for change in found.changes:
        echo(f"{change.what}: {change.follows}")
