"""`enginesmith plan`."""

from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import emit_json, say
from enginesmith.cli.tables import echo, print_table
from pipeline.cli.models.build import STYLES, check_source, spec_options
from pipeline.cli.models.catalog import is_stuck, plan_all
from pipeline.cli.run_options import collect_run_options, shown_progress

if TYPE_CHECKING:
    from pipeline.compile.ensembles.assembly import EnsembleForecast
    from pipeline.compile.forecast import Forecast
    from pipeline.orchestration.run import RunOptions


@click.command()
@spec_options
@click.option("--no-export", is_flag=True, help="Answer from what is on record; run nothing and write nothing.")
@click.pass_context
@collect_run_options
def plan(
    ctx: click.Context,
    /,
    spec: str | None,
    place: str | None,
    as_json: bool,
    quiet: bool,
    no_export: bool,
    options: "RunOptions",
) -> None:
    """Show for every unit of SPEC whether it would be built, and why.

    What is not on record yet is exported, calibrated and quantized first, so that every build key is complete. With
    --no-export a unit whose graph is not on record is 'unknown'. Exit code 1 if a unit has failed, or all are refused.
    With --all nothing is run.
    """
    from pipeline.orchestration.ensembles import foresee_spec

    check_source(spec, place)
    if spec is None:
        ctx.exit(plan_all(place or "", options, as_json))
    with shown_progress(quiet) as progress:
        found = foresee_spec(spec, options, progress, no_export, lambda text: None if quiet else say(text))
    if as_json:
        emit_json(found.to_json())
    else:
        _print_plan(found)
    if unknown := found.count("unknown"):
        verb = "is" if unknown == 1 else "are"
        say(f"{unknown} of {_count_units(found)} units {verb} unknown; without --no-export all are known")
    counts = {action: found.count(action) for action in ("failed", "refused")}
    ctx.exit(int(is_stuck(counts, _count_units(found))))


def _count_units(found: "Forecast | EnsembleForecast") -> int:
    """How many units a plan is of, those of its graphs included."""
    from pipeline.compile.forecast import Forecast

    if isinstance(found, Forecast):
        return len(found.units) + len(found.caches)
    return len(found.units) + sum(map(_count_units, found.graphs.values()))


def _print_plan(found: "Forecast | EnsembleForecast") -> None:
    from enginesmith.compile_caches.recipe import BACKEND, PRECISION
    from pipeline.compile.forecast import Forecast

    if isinstance(found, Forecast):
        rows = [
            [item.item.target.name, item.item.precision, item.item.backend.name, item.action, item.reason]
            for item in found.units
        ]
        rows += [[unit.target.name, PRECISION, BACKEND, unit.action, unit.reason] for unit in found.caches]
        _print_units(found.model, rows)
        for change in found.changes:
            echo(f"{change.what}: {change.follows}")
        return
    for graph in found.graphs.values():
        _print_plan(graph)
    whole = [[unit.target, unit.precision, "ensemble", unit.action, unit.reason] for unit in found.units]
    _print_units(found.model, whole)


def _print_units(model: str, rows: list[list[str]]) -> None:
    counts = {action: sum(row[3] == action for row in rows) for action in (*_SHOWN, "failed", "unknown")}
    told = [f"{count} {action}" for action, count in counts.items() if count or action in _SHOWN]
    header = ("target", "precision", "backend", "action", "why")
    print_table(header, rows, title=f"{model}: {', '.join(told)}", styles=STYLES)


# Actions that are counted in the title, also where there is none.
_SHOWN = ("build", "cached", "refused")
