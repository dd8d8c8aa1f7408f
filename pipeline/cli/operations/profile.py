"""The commands about single engines: `profile` with its series, `debug fuzz`, `debug reproduce`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from enginesmith.cli.options import (
    SVG,
    EngineChoice,
    Option,
    command,
    emit,
    emit_json,
    number_option,
    reference_argument,
    say,
    takes,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode, encode_document
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import check_model, parse_reference
from enginesmith.core.types import PRECISIONS
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import write_whole
from pipeline.cli.run_options import Buckets, chosen_buckets, published_engine

if TYPE_CHECKING:
    from enginesmith.core.reports.latency import LatencyReport, PairedBenchmark
    from pipeline.canary.engines import ChosenEngine
    from pipeline.compile.run_context import RunContext
    from pipeline.regressions.trend import Trend

COLUMNS = ("engine", "bucket", "machine", "points", "since", "newest", "relative", "changes")


def show_series(model: str, buckets: Sequence[str], out: Path | None, registry: str, as_json: bool) -> None:
    """Print the recorded series of a model, and where their level changed. buckets: only these; none means all.

    A change is shown with the version, toolchain or driver that came with it. Raises UnknownNameError where there is no
    such series.
    """
    from enginesmith.registry.latency_series import list_series, models_with_series
    from pipeline.regressions.trend import find_trend

    store = open_store(registry)
    trends = [find_trend(series) for series in list_series(store, check_model(model))]
    bucket_names = [" ".join(bucket.replace(",", " ").split()) for bucket in buckets]
    bucket_trends = [trend for trend in trends if not bucket_names or trend.series.bucket in bucket_names]
    if not bucket_trends:
        bucket_list = ", ".join(dict.fromkeys(trend.series.bucket for trend in trends)) or ", ".join(
            models_with_series(store)
        )
        problem = f"{model} has no series" + (f" at {', '.join(buckets)}" if trends else "")
        raise UnknownNameError(
            f"{problem}; known: {bucket_list or 'none'}; `enginesmith profile {model} --record` adds a point"
        )
    emit(as_json, [encode_document(trend) for trend in bucket_trends], _print_trends, bucket_trends)
    if out is not None:
        from pipeline.regressions.trend import draw_trend

        write_whole(out, draw_trend(bucket_trends[0]).encode())
        series = bucket_trends[0].series
        others = f"; it is the first of {len(bucket_trends)}, --bucket chooses" if len(bucket_trends) > 1 else ""
        say(f"written: {out} ({series.unit} at {series.bucket}{others})")


def _print_trends(trends: "list[Trend]") -> None:
    from pipeline.regressions.trend import describe_change
    from validation.plotting import seconds_text

    rows = []
    for trend in trends:
        series, last_point = trend.series, trend.series.points[-1]
        ratio = "" if last_point.relative is None else f"{last_point.relative:.4f}"
        count = f"{len(series.points)} ({trend.quiet} quiet)"
        machine = f"{series.machine.cpu}, {series.machine.cores} cores"
        machine = ", ".join([machine, *series.machine.gpus])
        median = f"{seconds_text(last_point.median_s)} (@{last_point.version})"
        row = [series.unit, series.bucket, machine, count, series.points[0].at[:10], median, ratio]
        rows.append([*row, "" if trend.changes is None else str(len(trend.changes))])
    print_table(COLUMNS, rows, note="relative: median divided by that of the first version's engine, timed alternately")
    if any(trend.changes is None for trend in trends):
        say("changes of the level were not searched: for that, pip install '.[trend]' in a clone")
    for trend in trends:
        for change in trend.changes or ():
            echo(f"{trend.series.unit} at {trend.series.bucket}: {describe_change(change)}")


@dataclass(frozen=True, kw_only=True)
class _ProfileOptions:
    choice: EngineChoice
    buckets: Buckets = ()
    seconds: Annotated[
        float,
        Option(
            "Seconds to time each bucket; with --against, seconds for all buckets together.",
            type=click.FloatRange(0, 3600, min_open=True),
        ),
    ] = 1.0
    streams: Annotated[int, Option("Also time this many concurrent sessions.", type=click.IntRange(1, 256))] = 1
    against: Annotated[
        str | None, Option("Only compare with the engine of version REF2: which engine is faster.", metavar="REF2")
    ] = None
    against_precision: Annotated[
        str | None, Option("Precision of REF2.", type=click.Choice(PRECISIONS), shown="as --precision")
    ] = None
    record: Annotated[
        bool,
        Option(
            "Store the times in the registry, for `enginesmith traffic capacity` and --series; takes five times as "
            "long."
        ),
    ] = False
    series: Annotated[
        bool, Option("Run nothing: show the times of REF's model that --record stored, and where they changed.")
    ] = False
    out: Annotated[
        Path | None, Option("With --series: draw the times of the first series into this file (.svg).", type=SVG)
    ] = None

    def check(self) -> None:
        """Raise click's usage error for options that do not go together."""
        if self.out is not None and not self.series:
            raise click.UsageError("--out draws a series; give --series too")
        if self.series and (self.record or self.against is not None):
            raise click.UsageError("--series runs nothing: leave out --record and --against")
        if self.record and self.against is not None:
            raise click.UsageError("--record keeps the latencies of one engine: leave out --against")


@command()
@reference_argument
@takes(_ProfileOptions)
def profile(reference: str, options: _ProfileOptions, registry: str, quiet: bool, as_json: bool) -> None:
    """Time the engine of REF on this machine: latency by bucket with confidence intervals, memory, nodes, bottleneck.

    With --against, the two engines run alternately in small blocks in random order. Other load on the machine then
    affects both engines alike.
    """
    from pipeline.canary.engines import choose
    from pipeline.operations.check_reproducible import ProfileOptions, benchmark_pair, profile_published

    options.check()
    buckets = chosen_buckets(options.buckets)
    if options.series:
        bucket_names = buckets if isinstance(buckets, tuple) else ()
        show_series(parse_reference(reference).model, bucket_names, options.out, registry, as_json)
        return
    terms = ProfileOptions(options.seconds, buckets, options.streams)
    with published_engine(registry, reference, options.choice, quiet) as (engine_choice, context):
        if options.against is None:
            report = profile_published(engine_choice, terms, context)
            if options.record:
                _record(engine_choice, report, context)
            _print_profile(engine_choice, report, as_json)
            return
        target, precision = options.choice.target, options.against_precision or options.choice.precision
        baseline = choose(context.store, parse_reference(options.against), target_named(target), precision)
        _print_pair(engine_choice, baseline, benchmark_pair(engine_choice, baseline, terms, context), as_json)


def _record(chosen_engine: "ChosenEngine", report: "LatencyReport", context: "RunContext") -> None:
    """Add the report to the series of latencies, and say so on stderr."""
    from pipeline.regressions.trend import record_report

    for series in record_report(chosen_engine, report, context):
        relative = series.points[-1].relative
        ratio_text = "" if relative is None else f", {relative:.4f} times {series.model}@{series.reference}"
        say(f"recorded: {series.unit} at {series.bucket}, point {len(series.points)}{ratio_text}")


def _print_profile(chosen_engine: "ChosenEngine", report: "LatencyReport", as_json: bool) -> None:
    from validation.latency.formatting import COLUMNS, NODE_COLUMNS, describe_report, format_bucket, format_nodes

    if as_json:
        emit_json({**encode(chosen_engine.identity), **encode(report)})
        return
    echo(f"{chosen_engine.manifest.reference} {report.unit}")
    rows = [format_bucket(bucket) for bucket in report.buckets]
    print_table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    for line in describe_report(report):
        echo(line)
    if nodes := format_nodes(report.anatomy):
        print_table(NODE_COLUMNS, [[row[column] for column in NODE_COLUMNS] for row in nodes])


def _print_pair(engine: "ChosenEngine", baseline: "ChosenEngine", benchmark: "PairedBenchmark", as_json: bool) -> None:
    from validation.latency.formatting import describe_pair

    if as_json:
        emit_json({"first": encode(engine.identity), "second": encode(baseline.identity), **encode(benchmark)})
        return
    names = [f"{choice.manifest.reference} {choice.entry.precision}" for choice in (engine, baseline)]
    echo(f"{names[0]} against {names[1]}, on {engine.entry.target}")
    for line in describe_pair(benchmark):
        echo(line)


@command()
@reference_argument
@takes(EngineChoice, "choice")
@number_option("--seed", click.IntRange(0), 0, "Seed of the random cases.")
@number_option("--cases", click.IntRange(0, 100_000), 50, "Number of random cases.")
@click.option("--only", metavar="CASE", help="Try only this case, named as in the report: 'batch=5 values=ones'.")
@click.pass_context
def fuzz(
    ctx: click.Context,
    /,
    reference: str,
    choice: EngineChoice,
    seed: int,
    cases: int,
    only: str | None,
    registry: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare an engine of REF with its graph, at the edges of every bucket, at random sizes, and on extreme values.

    The command reduces a failing case to the smallest case that fails, and prints the command that repeats it. Exit
    code 1 if a case failed.
    """
    from pipeline.operations.golden import fuzz_published

    with published_engine(registry, reference, choice, quiet) as (engine_choice, context):
        report = fuzz_published(engine_choice, context, seed=seed, cases=cases, only=only)
    if as_json:
        emit_json({**encode(engine_choice.identity), **encode_document(report)})
    else:
        verdict_counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts.items())
        manifest, unit = engine_choice.manifest, engine_choice.entry.unit
        echo(f"{manifest.reference} {unit}, seed {report.seed}: {verdict_counts}")
        for case in report.cases:
            if case.outcome == "failed":
                echo(f"  failed {case.case}: {case.reason}")
        for smallest_case in report.smallest:
            echo(f"smallest failing case: {smallest_case.case}: {smallest_case.reason}")
            echo(f"  {smallest_case.reproduce}")
        if any(case.outcome == "not judged" for case in report.cases):
            say(
                "note: a case is not judged where float32, or the graph itself, has no answer; --json gives the reasons"
            )
    ctx.exit(0 if report.passed else 1)


@command()
@reference_argument
@takes(EngineChoice, "choice")
@number_option("--times", click.IntRange(2, 100), 3, "Number of rebuilds.")
@click.pass_context
def check_reproducible(
    ctx: click.Context, /, reference: str, choice: EngineChoice, times: int, registry: str, quiet: bool, as_json: bool
) -> None:
    """Rebuild an engine of REF several times, and compare bytes and outputs.

    Publishes nothing. Exit code 1 if outputs differ by more than the drift limits; different bytes are no failure.
    """
    from pipeline.operations.check_reproducible import check_reproducible as build_again

    with published_engine(registry, reference, choice, quiet) as (engine_choice, context):
        report = build_again(engine_choice, times, context)
    manifest, entry = engine_choice.manifest, engine_choice.entry
    is_rebuilt = entry.digest in report.engines
    if as_json:
        publication = {"digest": entry.digest, "rebuilt": is_rebuilt}
        emit_json({**encode(engine_choice.identity), **report.to_json(), "published": publication})
    else:
        bytes_text = "byte-equal" if report.byte_equal else f"{len(report.engines)} different files"
        publication_note = "as published" if is_rebuilt else "none is equal to the published file"
        unit = f"{manifest.reference} {entry.unit}"
        echo(f"{unit}, {report.times} builds: {bytes_text}, {publication_note}")
        for output, spread in report.outputs.items():
            spread_note = "" if spread.max_abs is None else f", up to {spread.max_abs:.4g} apart"
            spread_text = "bit-equal" if spread.bit_equal else f"{spread.distinct} different results{spread_note}"
            echo(f"  {output}: {spread_text}{'' if report.passed else ', beyond the drift limits'}")
    ctx.exit(0 if report.passed else 1)
