"""`enginesmith status`, `report`, and `debug sensitivity`."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import command, emit, emit_json, number_option, path_option, say, spec_argument
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.names import parse_reference
from enginesmith.core.text import format_bytes, format_plain
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import write_whole
from enginesmith.registry.versions.lookup import locate
from pipeline.cli.run_options import opened_run

if TYPE_CHECKING:
    from enginesmith.registry.builds.runs import RunItem
    from enginesmith.registry.store.base import Store
    from pipeline.compile.composition import Run
    from pipeline.orchestration.runs.views import RunView
    from pipeline.quantization.search.trial import SearchDocument


@command()
@click.argument("source", metavar="REF|FILE")
@path_option("--out", "File for the report.", True, default=Path("report.html"), dir_okay=False)
def report(source: str, out: Path, registry: str, as_json: bool) -> None:
    """Write the HTML report of a version (REF) as of today, or of the report.json (FILE) of a version or a canary.

    The report is one file without scripts or links to other files, in light and dark, ready to print.
    """
    from pipeline.compile.publication.pages import draw_page, published_document, read_document

    if source.endswith(".json") or "/" in source:
        document = read_document(Path(source))
    else:
        store = open_store(registry)
        document = published_document(store, locate(store, parse_reference(source)).manifest)
    write_whole(out, draw_page(document).encode())
    emit(as_json, {"page": str(out)}, echo, str(out))


@command()
@spec_argument
@click.option(
    "--activation",
    type=click.Choice(["int8", "uint8"]),
    default="int8",
    show_default=True,
    help="Type of quantized activations: int8 as for TensorRT, uint8 as for onnxruntime on a CPU.",
)
@path_option("--out", "Also write frontier.json and frontier.svg to this folder.", file_okay=False)
def sensitivity(
    spec: str, activation: str, out: Path | None, stated_registry: str | None, quiet: bool, as_json: bool
) -> None:
    """Rank the parts of SPEC's model by their error in int8, and show quality against the share of compute in int8.

    Uses smoothing, quality floor and overrides of the spec. Exports and calibrates first, unless these results are in
    the registry.
    """
    with opened_run(spec, stated_registry, quiet) as run:
        choice, summary = _choice(activation, run)
    document = encode(choice) | {"activation": activation, "summary": summary}
    if out is not None:
        from validation.reporting.quantization import frontier_svg

        write_whole(out / "frontier.json", json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")
        write_whole(out / "frontier.svg", frontier_svg(choice.recorded, choice.precision, standalone=True).encode())
        say(f"wrote {out / 'frontier.json'} and {out / 'frontier.svg'}")
    emit(as_json, document, _print_choice, choice, summary)


def _choice(activation: str, run: "Run") -> "tuple[SearchDocument, str]":
    """The search of what stays in float, recalled or made now, and its summary in a line.

    It is for the kind of int8 that the spec's backends write with these activations; else for one with int8 weights.
    """
    from pipeline.compile.plan import candidates
    from pipeline.compile.steps.exports import export
    from pipeline.compile.steps.search import choose
    from pipeline.quantization.search.trial import SearchDocument
    from pipeline.values import Searched

    search_kinds = [candidate.variant.searched for candidate in candidates(run.spec, run.selection)]
    default_kind = Searched("int8" if activation == "int8" else "uint8")
    kind = next((kind for kind in search_kinds if kind and kind.activation == activation), default_kind)
    exported_graph = export(run)
    search_result = choose([kind], exported_graph, run.observe(exported_graph), run)[kind]
    return decode(json.loads(run.context.store.read_blob(search_result.choice)), SearchDocument), search_result.summary


def _print_choice(choice: "SearchDocument", summary: str) -> None:
    from pipeline.quantization.search.steps import describe_alone
    from validation.reporting.quantization import POINT_COLUMNS, decibels_text, point_rows

    has_times = any(group.int8_ms is not None for group in choice.groups)
    columns = ("nodes", "MACs", "alone", "strength", "clip", *(["model without -> with"] if has_times else []))
    rows = []
    for group in choice.groups:
        strength_text = "" if group.strength is None else f"{group.strength:.2f}{' folded' if group.folded else ''}"
        alone = describe_alone(group.alone or ((choice.precision, group.sqnr_db),), choice.precision)
        cells = [", ".join(group.nodes), f"{group.share:.1%}", alone, strength_text]
        # The whole model's milliseconds without and with this group in int8.
        milliseconds = [format_plain(value) for value in (group.float_ms, group.int8_ms) if value is not None]
        time_text = f"{' -> '.join(milliseconds)} ms" if len(milliseconds) == 2 else ""
        rows.append([*cells, f"{group.clip:.2f}", *([time_text] if has_times else []), group.choice_text])
    alone_text = f"alone: SQNR of the outputs if only these nodes are in {choice.precision}"
    title = f"Error per multiplication, worst first ({alone_text})"
    print_table((*columns, choice.precision), rows, title=title)
    for point in choice.frontier:
        measured_text = "" if point.sqnr_db is None else f", measured {decibels_text(point.sqnr_db)}"
        format_text = f"in {choice.precision}{point.mix_text}"
        echo(f"{point.share:7.1%} {format_text}: predicted {decibels_text(point.predicted_db)}{measured_text}")
    if choice.table:
        title = f"Graphs that were run, the fastest first (latency: {choice.latency})"
        pairs = zip(point_rows(choice.recorded), choice.table, strict=True)
        point_cells = [[cells[0] + point.mix_text, *cells[1:]] for cells, point in pairs]
        print_table(POINT_COLUMNS, point_cells, title=title)
    echo(f"chosen: {summary}")


# Seconds between two refreshes of `--watch`.
WATCH_S = 2.0


@command()
@click.argument("name", metavar="[RUN|MODEL]", required=False)
@number_option("--limit", click.IntRange(1, 2000), 20, "Maximum number of builds to list, newest first.")
@click.option("--all", "steps", is_flag=True, help="Also show the other steps of a build: export, calibration, proofs.")
@click.option("--log", metavar="UNIT", help="Print the compiler's output for this unit; UNIT may also be a step.")
@click.option("--watch", is_flag=True, help="Refresh every 2 s until the build ends; Ctrl-C only stops watching.")
def status(
    name: str | None, limit: int, steps: bool, log: str | None, watch: bool, registry: str, as_json: bool
) -> None:
    """List the newest builds. With RUN, show this build; with MODEL, show the newest build of the model.

    A build writes its state to the registry while it runs. Runs of `enginesmith validate` and canaries are not listed:
    `enginesmith show` and the Prefect server show their results.
    """
    store = open_store(registry)
    if log is not None:
        _show_log(store, name, log)
        return
    try:
        while True:
            if watch and sys.stdout.isatty():
                click.clear()
            if not (_show(store, name, limit, steps, as_json) and watch):
                return
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        if not watch:
            raise
        say("stopped watching; the run goes on")


def _show(store: "Store", name: str | None, limit: int, steps: bool, as_json: bool) -> bool:
    """Print the runs, or one of them. Returns whether something still runs."""
    from enginesmith.registry.builds.runs import find_run, read_runs, run_ids
    from pipeline.orchestration.runs.views import view_runs

    if name is not None:
        (run_view,) = view_runs(store, [find_run(store, name)])
        emit(as_json, run_view.to_json(), _print_run, run_view, steps)
        return run_view.state == "running"
    run_views = view_runs(store, read_runs(store, run_ids(store)[:limit]))
    if as_json:
        emit_json({"runs": [run_view.summary() for run_view in run_views]})
    elif run_views:
        rows = []
        for run_view in run_views:
            run = run_view.run
            version_text = f"{run.model}@{run.version}" if run.version else ""
            ending = "; ".join(text for text in (version_text, run_view.lost or run.reason) if text)
            rows.append(
                [run.id, run_view.state, run.started_at[:19], f"{run_view.took_s:.0f} s", run_view.counts, ending]
            )
        print_table(("run", "state", "started (UTC)", "took", "units", "outcome"), rows)
    else:
        say(f"{store.uri} has no builds yet; run `enginesmith build`")
    return any(run_view.state == "running" for run_view in run_views)


def _print_run(run_view: "RunView", steps: bool) -> None:
    run = run_view.run
    starter_note = f", {run.by}" if run.by else ""
    echo(f"{run.id}: {run_view.state}, {run_view.took_s:.0f} s; {run.user}@{run.host}, process {run.pid}{starter_note}")
    echo(f"spec: {run.spec}")
    if run.version:
        echo(f"version: {run.model}@{run.version}")
    if reason := run_view.lost or run.reason:
        echo(f"why: {reason}")
    # Steps that are not units are listed without --all only in these states.
    states = ("waiting", "running", "failed")
    rows = [_row(run_view, item) for item in run.items if item.is_unit or steps or run_view.item_state(item) in states]
    if rows:
        print_table(("unit", "state", "phase", "where", "took", "peak", "log", "what"), rows)
    if step_times := run_view.spent():
        rows = [[step.step, str(step.processes), f"{step.seconds:.1f} s", f"{step.cpu_s:.1f} s"] for step in step_times]
        print_table(("where the time went", "processes", "took", "cpu"), rows)
    if run.left_out:
        echo(f"and {run.left_out} more, which are not recorded here")
    if any(item.log for item in run.items):
        echo(f"to print a log: enginesmith status {run.id} --log UNIT")


def _row(run_view: "RunView", item: "RunItem") -> list[str]:
    elapsed_s = run_view.elapsed_s(item)
    elapsed = "" if elapsed_s is None else f"{elapsed_s:.1f} s"
    peak = f"{item.peak_mib:.0f} MiB" if item.peak_mib else ""
    size = format_bytes(item.log_bytes) if item.log else ""
    return [item.name, run_view.item_state(item), item.phase, item.where, elapsed, peak, size, run_view.describe(item)]


def _show_log(store: "Store", name: str | None, unit: str) -> None:
    """Print the whole log of a job that ended, or the end of what it printed so far."""
    from enginesmith.registry.builds.runs import find_run, read_live

    if name is None:
        raise click.UsageError("--log needs a RUN or a MODEL; `enginesmith status` lists runs")
    run = find_run(store, name)
    item = _item_named([*run.items], unit, run.id)
    if item.log and not store.has(item.log):
        raise InputError(f"the log of {item.name} was deleted with `enginesmith registry gc`, or is lost: {item.log}")
    live_text = "" if item.log else read_live(store, run.id).get(item.name, "")
    text = store.read_blob(item.log).decode(errors="replace") if item.log else live_text
    # A compiler draws a progress bar over itself: each of its states becomes a line.
    echo(text.replace("\r\n", "\n").replace("\r", "\n"), nl=False)
    if live_text:
        say(f"{item.name} is running: this is the end of its output so far")
    elif not item.log:
        say(f"{item.name}: no output" + (" yet" if item.state in ("planned", "waiting", "running") else ""))


def _item_named(items: "list[RunItem]", unit_name: str, run: str) -> "RunItem":
    """The unit or step of this name, or the only one that has all these words. Raises UnknownNameError."""
    name_words = unit_name.split()
    matches = [item for item in items if item.name == unit_name] or [
        item for item in items if set(name_words) <= set(item.name.split())
    ]
    units = [item for item in matches if item.is_unit] or matches
    if len(units) == 1:
        return units[0]
    name_list = ", ".join(repr(item.name) for item in (units or items)) or "none"
    raise UnknownNameError(
        f"{'several units are' if units else 'no unit is'} {unit_name!r} in {run}; there are {name_list}"
    )
