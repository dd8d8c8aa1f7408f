"""`enginesmith check` and `backends compare`."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    backends_option,
    combine,
    emit_json,
    jobs_option,
    json_option,
    number_option,
    path_option,
    precisions_option,
    progress_options,
    say,
    selection_options,
    spec_argument,
    spec_registry_option,
    target_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode, encode_document
from enginesmith.core.errors import EnginesmithError
from pipeline.cli.run_options import collect_run_options, executor_options, shown_progress

if TYPE_CHECKING:
    from pipeline.orchestration.run import RunOptions
    from pipeline.regressions.findings import RegressionCheck
    from pipeline.regressions.pairs import CheckOptions


# `enginesmith check`: the command of a pull request that changes a model or its spec.


class Share(click.ParamType[float]):
    """A share: '3%' or '0.03'."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share. Raises click's usage error for another text, and for less than 0."""
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found < (100 if text.endswith("%") else 1):  # 3 would be 300 %, where 3 % is meant
            self.fail(f"{text!r} is no share; give one such as 3% or 0.03", param, ctx)
        return found


def _read_losses(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    """{metric: loss} of 'accuracy=0.01', and {'': loss} of '0.01'. Raises click's usage error for another text."""
    found = {}
    for text in given:
        name, equals, value = text.rpartition("=")
        try:
            found[name if equals else ""] = float(value)
        except ValueError:
            raise click.BadParameter(f"{text!r}: give a number such as 0.01, or NAME=NUMBER") from None
        if not found[name if equals else ""] >= 0:
            raise click.BadParameter(f"{text!r}: give 0 or more")
    return found


measurement_options = combine(
    click.option(
        "--slower",
        type=Share(),
        default="3%",
        show_default=True,
        help="Regression: the median is shown, with 95 % confidence, to take longer by more than this.",
    ),
    click.option(
        "--worse",
        "worse",
        metavar="[METRIC=]LOSS",
        multiple=True,
        callback=_read_losses,
        show_default="0.005; 0.5 of a metric in dB; 1 % of a perplexity",
        help="Regression: a task metric is worse than that of the served engine by more than this; repeat it.",
    ),
    click.option(
        "--drift",
        type=click.Choice(["auto", "fail", "note"]),
        default="auto",
        show_default=True,
        help="What other answers than the served ones are; auto: a regression where no task metric has a limit.",
    ),
    number_option("--seconds", click.FloatRange(0, 3600, min_open=True), 2.0, "Seconds of timing for each bucket."),
    click.option(
        "--bucket",
        "buckets",
        multiple=True,
        show_default="smallest, opt and largest",
        help="Sizes to time at, as in batch=8,length=64; repeat it.",
    ),
    click.option("--all-buckets", is_flag=True, help="Time at both ends of every bucket."),
    number_option("--seed", click.IntRange(0), 0, "Seed of the order of runs."),
)

report_options = combine(
    path_option("--markdown", "Also write the result to this file, as Markdown.", dir_okay=False),
    path_option("--junit", "The same as JUnit XML.", dir_okay=False),
    path_option("--sarif", "The same as SARIF 2.1.0, for code scanning.", dir_okay=False),
    path_option("--code-quality", "The same as GitLab's code quality JSON.", dir_okay=False),
)


@click.command()
@spec_argument
@click.option(
    "--against",
    metavar="REF",
    show_default="the model's channel stable, else candidate, else its newest version",
    help="Version that is served; none: nothing is, and the spec's own checks decide.",
)
@selection_options
@measurement_options
@report_options
@spec_registry_option
@click.option(
    "--scratch",
    metavar="URI",
    show_default="the registry itself",
    help="Registry that takes what is built here; --registry is then only read.",
)
@executor_options
@jobs_option
@progress_options
@json_option
@click.pass_context
@collect_run_options
def check(
    ctx: click.Context,
    /,
    spec: str,
    against: str | None,
    scratch: str | None,
    slower: float,
    worse: Mapping[str, float],
    drift: str,
    seconds: float,
    buckets: tuple[str, ...],
    all_buckets: bool,
    seed: int,
    markdown: Path | None,
    junit: Path | None,
    sarif: Path | None,
    code_quality: Path | None,
    quiet: bool,
    as_json: bool,
    options: "RunOptions",
) -> None:
    """Build SPEC and compare quality and latency with what a channel serves: one command for a pull request.

    No version is published and no channel moves; the build after the merge finds the engines. In GitHub Actions
    findings become annotations and the step's summary. Exit code 1 when a regression is shown.
    """
    from pipeline.regressions.pairs import CheckOptions

    files = {"markdown": markdown, "junit": junit, "sarif": sarif, "code_quality": code_quality}
    chosen = {name: path for name, path in files.items() if path is not None}
    _make_folders(chosen)
    terms = CheckOptions(slower, worse, drift, seconds, buckets or ("all" if all_buckets else "few"), seed)  # type: ignore[arg-type]
    try:
        found = _check(spec, against, scratch, terms, buckets, quiet, options)
    except EnginesmithError as error:
        from pipeline.regressions.pairs import ended_by

        write_reports(ended_by(error, spec, terms), chosen)
        raise
    write_reports(found, chosen)
    if as_json:
        emit_json(encode_document(found))
    else:
        show_check(found)
    ctx.exit(0 if found.passed else 1)


def _make_folders(files: Mapping[str, Path]) -> None:
    """Before everything is built and timed, which takes long."""
    from enginesmith.registry.store.files import make_folder, reachable

    for path in files.values():
        with reachable(f"writing {path}"):
            make_folder(path.parent)


def _check(
    spec: str,
    against: str | None,
    scratch: str | None,
    terms: "CheckOptions",
    buckets: tuple[str, ...],
    quiet: bool,
    options: "RunOptions",
) -> "RegressionCheck":
    from dataclasses import replace

    from enginesmith.core.hardware.machine import target_named
    from enginesmith.registry.store.base import open_store
    from pipeline.intake.places import registry_of
    from pipeline.orchestration.run import build_lock, lock_names, open_run
    from pipeline.regressions.check import check as check_spec
    from pipeline.regressions.check import with_lines
    from pipeline.regressions.findings import NONE, find_served, machine_of
    from pipeline.regressions.pairs import check_losses, find_lines
    from validation.latency.measurement.loop import parse_sizes

    shared = registry_of(spec, options.registry)
    own = replace(options, registry=scratch or shared)
    with shown_progress(quiet) as progress, open_run(spec, own, progress, keep_state=False) as run:
        here, dims = machine_of(target_named("auto")), run.spec.named_dims()
        for text in buckets:
            parse_sizes(text, dims)
        check_losses(terms.worse, run.spec.golden.metrics if run.spec.golden else ())
        served = None if against == NONE else find_served(open_store(shared), run.spec.model, against, here)
        with build_lock(run, lock_names(run, own)):
            found = check_spec(run, served, here, terms)
        return with_lines(found, find_lines(run.spec, found.findings))


def write_reports(found: "RegressionCheck", files: Mapping[str, Path]) -> None:
    """Write the files that were asked for and, in GitHub Actions, annotations and the step's summary.

    Raises UnavailableError where a file cannot be written.
    """
    from enginesmith.registry.store.files import write_whole
    from pipeline.regressions.reports import to_code_quality, to_commands, to_junit, to_markdown, to_sarif

    makers: dict[str, Callable[[RegressionCheck], str | bytes]] = {
        "markdown": to_markdown,
        "junit": to_junit,
        "sarif": to_sarif,
        "code_quality": to_code_quality,
    }
    for name, path in files.items():
        text = makers[name](found)
        write_whole(path, text if isinstance(text, bytes) else text.encode())
        say(f"written: {path}")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in to_commands(found):
            echo(line, err=True)
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            with _reachable(summary), Path(summary).open("a", encoding="utf-8") as file:
                file.write(to_markdown(found))


@contextmanager
def _reachable(place: str) -> Iterator[None]:
    from enginesmith.registry.store.files import reachable

    with reachable(f"writing {place}"):
        yield


def show_check(found: "RegressionCheck") -> None:
    """Print the table of what was measured, the findings, and the verdict last."""
    from pipeline.regressions.reports import COLUMNS, MARKS, list_rows

    if rows := list_rows(found):
        print_table(COLUMNS, rows)
    for item in found.findings:
        echo(f"{MARKS[item.level]} ({item.rule}): {item.text}")
    echo(found.verdict)


# `enginesmith backends compare`: the engines of every backend for one target, and which to take.


@click.command()
@spec_argument
@target_option
@precisions_option("all of the spec")
@backends_option("every one that is installed")
@number_option(
    "--seconds",
    click.FloatRange(0, 600, min_open=True),
    0.2,
    "Seconds of timing for each bucket; ten times as long for two engines side by side.",
)
@number_option("--seed", click.IntRange(0), 0, "Seed of the order of the interleaved runs.")
@spec_registry_option
@jobs_option
@path_option("--out", "Also write the result to this file, as Markdown.", dir_okay=False)
@progress_options
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    spec: str,
    target: str,
    backends: str | None,
    precisions: str | None,
    seconds: float,
    seed: int,
    registry: str | None,
    jobs: int | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build SPEC with every backend that can, for one target, and compare quality and latency.

    Recommends one, with the reason and what would change it. Publishes nothing; later builds reuse the engines.
    Exit code 1 when there is nothing to recommend.
    """
    from enginesmith.core.hardware.machine import target_named
    from enginesmith.registry.store.files import make_folder, reachable, write_whole
    from pipeline.operations.compare.report import describe_comparison, format_heading, format_markdown, format_rows
    from pipeline.operations.compare.run import CompareOptions
    from pipeline.operations.compare.run import compare as compare_engines
    from pipeline.orchestration.run import RunOptions, open_run, select_precisions, split_names

    if out is not None:
        # Before everything is built and timed, which takes long.
        with reachable(f"writing {out}"):
            make_folder(out.parent)
    options = RunOptions(registry=registry, jobs=jobs)
    with shown_progress(quiet) as progress, open_run(spec, options, progress, keep_state=False) as run:
        chosen = select_precisions(run.spec, precisions) if split_names(precisions) else ()
        wanted = CompareOptions(target_named(target), tuple(split_names(backends)), chosen, seconds, seed)
        found = compare_engines(run, wanted)
    if as_json:
        emit_json(encode(found))
    else:
        echo(format_heading(found))
        print_table(*format_rows(found))
        for line in describe_comparison(found):
            echo(line)
    if out is not None:
        write_whole(out, format_markdown(found).encode())
        say(f"written: {out}")
    ctx.exit(0 if found.recommendation.unit else 1)
