"""`enginesmith check` and `backends compare`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from enginesmith.cli.options import (
    FILE,
    InstalledBackends,
    Jobs,
    Option,
    Precisions,
    Selection,
    Target,
    command,
    emit,
    emit_json,
    say,
    spec_argument,
    takes,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode, encode_document
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.machine import target_named
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import make_folder, reachable, write_whole
from pipeline.cli.run_options import Buckets, Building, chosen_buckets, opened_run, run_options, shown_progress

if TYPE_CHECKING:
    from pipeline.regressions.findings import RegressionCheck
    from pipeline.regressions.pairs import CheckOptions


def share(value: object) -> float:
    """'3%' or '0.03'. Raises click's usage error for another text, and for less than 0."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not 0 <= number < (100 if text.endswith("%") else 1):  # 3 would be 300 %, where 3 % is meant
        raise click.BadParameter(f"{text!r} is not a share; give one such as 3% or 0.03")
    return number


def _read_losses(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    """{metric: loss} of 'accuracy=0.01', and {'': loss} of '0.01'. Raises click's usage error for another text."""
    loss_limits = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        try:
            loss_limits[name if separator else ""] = float(value)
        except ValueError:
            raise click.BadParameter(f"{text!r}: give a number such as 0.01, or NAME=NUMBER") from None
        if not loss_limits[name if separator else ""] >= 0:
            raise click.BadParameter(f"{text!r}: give 0 or more")
    return loss_limits


# How a report is written, by how its file ends.
_FORMATS = {".md": "markdown", ".xml": "junit"}


def _check_reports(_context: click.Context, _option: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The files. Raises click's usage error for one whose ending names no format, and for two of one format."""
    for path in paths:
        if path.suffix not in _FORMATS:
            raise click.BadParameter(f"{path}: give a file that ends in {', '.join(_FORMATS)}")
        if sum(other_path.suffix == path.suffix for other_path in paths) > 1:
            raise click.BadParameter(f"{path}: give one file that ends in {path.suffix}")
    return paths


@dataclass(frozen=True, kw_only=True)
class _CheckOptions:
    against: Annotated[
        str | None,
        Option(
            "Version to compare with; none: compare with no version, and run only the checks of the spec.",
            metavar="REF",
            shown="the model's channel stable, else candidate, else its newest version",
        ),
    ] = None
    selection: Selection
    slower: Annotated[
        float,
        Option(
            "Report a regression if the median latency is higher by more than this share, with 95 % confidence.",
            type=share,
            shown="3%",
        ),
    ] = 0.03
    worse: Annotated[
        Mapping[str, float],
        Option(
            "Report a regression if a task metric (or only METRIC) is worse than the served engine's by more than "
            "LOSS; repeatable.",
            metavar="[METRIC=]LOSS",
            multiple=True,
            type=str,
            callback=_read_losses,
            shown="0.005; 0.5 for metrics in dB; 1 % for perplexity",
        ),
    ] = field(default_factory=dict)
    drift: Annotated[
        Literal["auto", "fail", "note"],
        Option(
            "How to report outputs that differ from the served engine's; fail: as a regression; note: as a note; "
            "auto: fail if no task metric has a limit, else note."
        ),
    ] = "auto"
    seconds: Annotated[
        float, Option("Seconds of timing for each bucket.", type=click.FloatRange(0, 3600, min_open=True))
    ] = 2.0
    buckets: Buckets = ()
    reports: Annotated[
        tuple[Path, ...],
        Option(
            "Also write the result to this file: .md or .xml (JUnit); repeatable.",
            name="--report",
            type=FILE,
            callback=_check_reports,
        ),
    ] = ()
    scratch: Annotated[
        str | None,
        Option(
            "Registry for the engines of this check; --registry is then only read.",
            metavar="URI",
            shown="the same as --registry",
        ),
    ] = None
    building: Building
    jobs: Jobs = None


@command()
@spec_argument
@takes(_CheckOptions)
@click.pass_context
def check(
    ctx: click.Context, /, spec: str, options: _CheckOptions, stated_registry: str | None, quiet: bool, as_json: bool
) -> None:
    """Build SPEC, and compare its quality and latency with the served version: the check of a pull request.

    No version is published and no channel moves; the build after the merge reuses the engines. In GitHub Actions,
    regressions become annotations and are listed in the step's summary. Exit code 1 if there is a regression.
    """
    from pipeline.regressions.pairs import CheckOptions, ended_by

    report_paths = {_FORMATS[path.suffix]: path for path in options.reports}
    buckets = chosen_buckets(options.buckets)
    terms = CheckOptions(options.slower, options.worse, options.drift, options.seconds, buckets)
    for path in report_paths.values():
        with reachable(f"writing {path}"):
            make_folder(path.parent)
    try:
        regression_check = _check(spec, options, terms, stated_registry, quiet)
    except EnginesmithError as error:
        write_reports(ended_by(error, spec, terms), report_paths)
        raise
    write_reports(regression_check, report_paths)
    emit(as_json, encode_document(regression_check), show_check, regression_check)
    ctx.exit(0 if regression_check.passed else 1)


def _check(
    spec: str, options: _CheckOptions, terms: "CheckOptions", stated_registry: str | None, quiet: bool
) -> "RegressionCheck":
    from pipeline.intake.registration import registry_of
    from pipeline.orchestration.run import build_lock, lock_names, open_run
    from pipeline.regressions.check import check as check_spec
    from pipeline.regressions.findings import NONE, find_served, machine_of
    from pipeline.regressions.pairs import check_losses
    from validation.latency.measurement.loop import parse_sizes

    uri = registry_of(spec, stated_registry)
    build_options = run_options(options.scratch or uri, options.selection, options.jobs, options.building)
    with shown_progress(quiet) as progress, open_run(spec, build_options, progress, keep_state=False) as run:
        machine, dims = machine_of(target_named("auto")), run.spec.named_dims()
        for text in () if terms.buckets in ("all", "few") else terms.buckets:
            parse_sizes(text, dims)
        check_losses(terms.worse, run.spec.golden.metrics if run.spec.golden else ())
        baseline = (
            None if options.against == NONE else find_served(open_store(uri), run.spec.model, options.against, machine)
        )
        with build_lock(run, lock_names(run, build_options)):
            return check_spec(run, baseline, machine, terms)


def write_reports(regression_check: "RegressionCheck", files: Mapping[str, Path]) -> None:
    """Write the files that were asked for and, in GitHub Actions, annotations and the step's summary.

    Raises UnavailableError where a file cannot be written.
    """
    from pipeline.regressions.reports import to_commands, to_junit, to_markdown

    for name, path in files.items():
        write_whole(path, to_junit(regression_check) if name == "junit" else to_markdown(regression_check).encode())
        say(f"written: {path}")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in to_commands(regression_check):
            echo(line, err=True)
        if summary_path := os.environ.get("GITHUB_STEP_SUMMARY"):
            with reachable(f"writing {summary_path}"), Path(summary_path).open("a", encoding="utf-8") as file:
                file.write(to_markdown(regression_check))


def show_check(regression_check: "RegressionCheck") -> None:
    """Print the table of measurements, the findings, and the verdict."""
    from pipeline.regressions.reports import COLUMNS, MARKS, list_rows

    if rows := list_rows(regression_check):
        print_table(COLUMNS, rows)
    for finding in regression_check.findings:
        echo(f"{MARKS[finding.level]} ({finding.rule}): {finding.text}")
    echo(regression_check.verdict)


@dataclass(frozen=True)
class _CompareOptions:
    target: Target = "auto"
    precisions: Precisions = None
    backends: InstalledBackends = None
    seconds: Annotated[
        float,
        Option(
            "Seconds to time each engine in each bucket; a comparison of two engines takes ten times as long.",
            type=click.FloatRange(0, 600, min_open=True),
        ),
    ] = 0.2


@command()
@spec_argument
@takes(_CompareOptions)
@click.pass_context
def compare(
    ctx: click.Context, /, spec: str, options: _CompareOptions, stated_registry: str | None, quiet: bool, as_json: bool
) -> None:
    """Build SPEC with every suitable backend for one target, and compare quality and latency.

    Recommends a backend, with the reason. Publishes nothing; later builds reuse the engines.
    Exit code 1 if no backend can be recommended.
    """
    from pipeline.operations.compare import CompareOptions, describe_comparison, format_rows
    from pipeline.operations.compare import compare as compare_engines
    from pipeline.orchestration.run import select_precisions, split_names

    with opened_run(spec, stated_registry, quiet) as run:
        compare_precisions = select_precisions(run.spec, options.precisions) if split_names(options.precisions) else ()
        backends = tuple(split_names(options.backends))
        compare_options = CompareOptions(target_named(options.target), backends, compare_precisions, options.seconds)
        comparison = compare_engines(run, compare_options)
    if as_json:
        emit_json(encode(comparison))
    else:
        conditions = f"{comparison.target} at {comparison.bucket}, {comparison.machine}"
        echo(f"{comparison.model} on {conditions}, {comparison.created_at}")
        print_table(*format_rows(comparison))
        echo("\n".join(describe_comparison(comparison)))
    ctx.exit(0 if comparison.recommendation.unit else 1)
