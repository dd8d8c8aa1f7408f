"""`enginesmith backends compare`: the engines of every backend for one target, and which to take."""

from pathlib import Path

import click

from enginesmith.cli.options import (
    backends_option,
    emit_json,
    jobs_option,
    json_option,
    number_option,
    path_option,
    precisions_option,
    progress_options,
    say,
    spec_argument,
    spec_registry_option,
    target_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from pipeline.cli.run_options import shown_progress


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
