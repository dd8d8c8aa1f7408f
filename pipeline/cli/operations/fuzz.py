"""`enginery fuzz`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginery.core.codec import encode, encode_document
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
    from pipeline.canary.engines import ChosenEngine
    from validation.fuzz.run import FuzzReport


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
    from pipeline.operations.fuzz import FuzzOptions, fuzz_published

    options = FuzzOptions(seed, cases, _read(histogram) if histogram else None, only)
    with published_engine(registry, reference, target, precision, quiet) as (chosen, context):
        report = fuzz_published(chosen, options, context)
    if as_json:
        emit_json({**encode(chosen.identity), **encode_document(report)})
    else:
        _show(chosen, report)
    ctx.exit(0 if report.passed else 1)


def _read(path: Path) -> "dict[str, dict[int, float]]":
    from enginery.core.errors import InputError
    from validation.fuzz.cases import parse_histogram

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"histogram {path}: {error}; give JSON {{dim: {{size: count}}}}") from error
    return parse_histogram(data)


def _show(chosen: "ChosenEngine", report: "FuzzReport") -> None:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items())
    echo(f"{chosen.manifest.model}@{chosen.manifest.version} {chosen.entry.unit}, seed {report.seed}: {counts}")
    for case in report.cases:
        if case.outcome == "failed":
            echo(f"  failed {case.case}: {case.reason}")
    for smallest in report.smallest:
        echo(f"smallest failing case: {smallest.case}: {smallest.reason}")
        echo(f"  {smallest.reproduce}")
    if any(case.outcome == "not judged" for case in report.cases):
        say("note: a case is not judged where float32, or the graph itself, has no answer; --json gives the reasons")
