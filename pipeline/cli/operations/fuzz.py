"""`enginery fuzz`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import (
    emit_json,
    engine_options,
    json_option,
    progress_options,
    reference_argument,
    registry_option,
    say,
)
from pipeline.cli.published_engine import published_engine
from pipeline.cli.tables import echo

if TYPE_CHECKING:
    from pipeline.values import Json


@click.command()
@reference_argument
@registry_option
@engine_options
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random cases.")
@click.option("--cases", type=click.IntRange(0, 100_000), default=50, show_default=True, help="Number of random cases.")
@click.option(
    "--histogram",
    type=click.Path(path_type=Path),
    show_default="all sizes alike",
    help="File with the sizes that traffic has: JSON {dim: {size: count}}.",
)
@click.option("--only", metavar="CASE", help="Try only this case, named as in the report: 'batch=5 values=ones'.")
@progress_options
@json_option
@click.pass_context
def fuzz(
    ctx: click.Context,
    /,
    reference: str,
    registry: str,
    target: str,
    precision: str | None,
    seed: int,
    cases: int,
    histogram: Path | None,
    only: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare an engine of REF with its graph, at every bucket's edges, at random sizes and on extreme values.

    A failing case is reduced to the smallest that fails and printed with the command that repeats it. Exit code 1 if
    one failed.
    """
    from pipeline.operations.fuzz import Asked, fuzz_published

    asked = Asked(seed, cases, _read(histogram) if histogram else None, only)
    with published_engine(registry, reference, target, precision, quiet) as (chosen, shop):
        report = fuzz_published(chosen, asked, shop)
    if as_json:
        emit_json(report)
    else:
        _show(report)
    ctx.exit(0 if report["passed"] else 1)


def _read(path: Path) -> Any:
    from enginery.core.errors import InputError

    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"histogram {path}: {error}; give JSON {{dim: {{size: count}}}}") from error


def _show(report: "Json") -> None:
    counts = ", ".join(f"{count} {word}" for word, count in report["counts"].items())
    unit = f"{report['target']} {report['precision']} {report['backend']}"
    echo(f"{report['model']}@{report['version']} {unit}, seed {report['seed']}: {counts}")
    for case in report["cases"]:
        if case["outcome"] == "failed":
            echo(f"  failed {case['case']}: {case['reason']}")
    for case in report["smallest"]:
        echo(f"smallest failing case: {case['case']}: {case['reason']}")
        echo(f"  {case['reproduce']}")
    if any(case["outcome"] == "not judged" for case in report["cases"]):
        say("note: a case is not judged where float32, or the graph itself, has no answer; --json gives the reasons")
