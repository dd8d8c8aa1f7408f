"""`enginesmith debug sensitivity`: the parts of a model by their error in int8."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    emit_json,
    json_option,
    path_option,
    progress_options,
    say,
    spec_argument,
    spec_registry_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import decode, encode
from enginesmith.core.text import format_plain
from pipeline.cli.run_options import shown_progress

if TYPE_CHECKING:
    from pipeline.compile.composition import Run
    from pipeline.quantization.search.choice import SearchDocument


@click.command()
@spec_argument
@click.option(
    "--activation",
    type=click.Choice(["int8", "uint8"]),
    default="int8",
    show_default=True,
    help="Type of quantized activations: int8 as for TensorRT, uint8 as for onnxruntime on a CPU.",
)
@path_option("--out", "Also write frontier.json and frontier.svg to this folder.", file_okay=False)
@spec_registry_option
@progress_options
@json_option
def sensitivity(spec: str, activation: str, out: Path | None, registry: str | None, quiet: bool, as_json: bool) -> None:
    """Rank the parts of SPEC's model by their error in int8, and show quality against the share of compute in int8.

    Uses the spec's smoothing, floor and overrides. Exports and calibrates first, unless that is on record.
    """
    from pipeline.orchestration.run import RunOptions, open_run

    options = RunOptions(registry=registry)
    with shown_progress(quiet) as progress, open_run(spec, options, progress, keep_state=False) as run:
        choice, summary = _choice(activation, run)
    document = encode(choice) | {"activation": activation, "summary": summary}
    if out is not None:
        from validation.reporting.quantization import frontier_svg

        out.mkdir(parents=True, exist_ok=True)
        (out / "frontier.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", "utf-8")
        (out / "frontier.svg").write_text(frontier_svg(choice.recorded, standalone=True), "utf-8")
        say(f"wrote {out / 'frontier.json'} and {out / 'frontier.svg'}")
    if as_json:
        emit_json(document)
    else:
        _print_choice(choice, summary)


def _choice(activation: str, run: "Run") -> "tuple[SearchDocument, str]":
    """The search of what stays in float, recalled or made now, and its summary in a line.

    It is for the kind of int8 that the spec's backends write with these activations; else for one with int8 weights.
    """
    from pipeline.compile.plan import candidates
    from pipeline.compile.steps.exports import export
    from pipeline.compile.steps.search import choose
    from pipeline.quantization.search.choice import SearchDocument
    from pipeline.values import Searched

    found = [item.variant.searched for item in candidates(run.spec, run.selection)]
    whole = Searched("int8" if activation == "int8" else "uint8")
    kind = next((kind for kind in found if kind and kind.activation == activation), whole)
    exported = export(run)
    chosen = choose([kind], exported, run.observe(exported), run)[kind]
    return decode(json.loads(run.context.store.read_blob(chosen.choice)), SearchDocument), chosen.summary


def _print_choice(choice: "SearchDocument", summary: str) -> None:
    from validation.reporting.quantization import decibels_text

    measured = any(group.int8_ms is not None for group in choice.groups)
    heads = ("nodes", "MACs", "alone", "strength", "clip", *(["model without -> with"] if measured else []), "int8")
    rows = []
    for group in choice.groups:
        strength = "" if group.strength is None else f"{group.strength:.2f}{' folded' if group.folded else ''}"
        facts = [", ".join(group.nodes), f"{group.share:.1%}", decibels_text(group.sqnr_db), strength]
        # The whole model's milliseconds without and with this group in int8.
        ms = [format_plain(value) for value in (group.float_ms, group.int8_ms) if value is not None]
        times = f"{' -> '.join(ms)} ms" if len(ms) == 2 else ""
        kept = "yes" if group.kept else "left in float"
        rows.append([*facts, f"{group.clip:.2f}", *([times] if measured else []), kept])
    title = "Damage per multiplication, worst first (alone: SQNR of the outputs with only this in int8)"
    print_table(heads, rows, title=title)
    for point in choice.frontier:
        run = "" if point.sqnr_db is None else f", run: {decibels_text(point.sqnr_db)}"
        echo(f"{point.share:7.1%} in int8: predicted {decibels_text(point.predicted_db)}{run}")
    echo(f"chosen: {summary}")
