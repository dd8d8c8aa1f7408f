"""`enginery compare`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import (
    backends_option,
    emit_json,
    jobs_option,
    json_option,
    precisions_option,
    progress_options,
    say,
    shown_progress,
    spec_argument,
    spec_registry_option,
    target_option,
)
from pipeline.cli.tables import echo

if TYPE_CHECKING:
    from pipeline.operations.compare.run import Asked


@click.command()
@spec_argument
@target_option
@precisions_option("all of the spec")
@backends_option("every one that is installed")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 600, min_open=True),
    default=0.2,
    show_default=True,
    help="Seconds of timing for each bucket; ten times as long for two engines side by side.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the order of the interleaved runs."
)
@spec_registry_option
@jobs_option
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the result to this file, as Markdown."
)
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
    from enginery.registry.store.atomic_write import make_folder, reachable, write_whole
    from pipeline.compile.composition import InProcess
    from pipeline.operations.compare import run, words
    from pipeline.orchestration.run import RunOptions, opened

    if out is not None:
        # Now, and not when everything is built and timed.
        with reachable(f"writing {out}"):
            make_folder(out.parent)
    options = RunOptions(registry=registry, jobs=jobs)
    with shown_progress(quiet) as progress, opened(spec, options, progress, keep_state=False) as opened_run:
        asked = _asked(target, backends, precisions, seconds, seed, opened_run.spec.precision_list())
        found = run.compare(opened_run.spec, asked, opened_run.shop, InProcess())
    if as_json:
        emit_json(found)
    else:
        _show(found)
    if out is not None:
        write_whole(out, words.markdown(found).encode())
        say(f"written: {out}")
    ctx.exit(0 if found["recommendation"]["unit"] else 1)


def _asked(
    target: str, backends: str | None, precisions: str | None, seconds: float, seed: int, known: tuple[str, ...]
) -> "Asked":
    from enginery.core.errors import UnknownNameError
    from enginery.core.hardware.machine import target_named
    from enginery.core.types import PRECISIONS
    from pipeline.operations.compare.run import Asked
    from pipeline.orchestration.run import not_in_spec

    wanted = _words(precisions)
    for name in wanted:
        if name not in known:
            raise UnknownNameError(not_in_spec("precisions", name, known, PRECISIONS))
    chosen = tuple(item for item in PRECISIONS if item in wanted)
    return Asked(target_named(target), tuple(_words(backends)), chosen, seconds, seed)


def _words(text: str | None) -> list[str]:
    return (text or "").replace(",", " ").split()


def _show(found: dict[str, object]) -> None:
    from pipeline.cli.tables import print_table
    from pipeline.operations.compare import words

    echo(words.heading(found))
    print_table(*words.rows(found))
    for line in words.lines(found):
        echo(line)
