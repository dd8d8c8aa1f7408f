"""`enginery sensitivity`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import (
    emit_json,
    json_option,
    progress_options,
    say,
    shown_progress,
    spec_argument,
    spec_registry_option,
)
from pipeline.cli.tables import echo, print_table

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec
    from pipeline.values import Searched


@click.command()
@spec_argument
@click.option(
    "--activation",
    type=click.Choice(["int8", "uint8"]),
    default="int8",
    show_default=True,
    help="Type of quantized activations: int8 as for TensorRT, uint8 as for onnxruntime on a CPU.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write frontier.json and frontier.svg to this folder.",
)
@spec_registry_option
@progress_options
@json_option
def sensitivity(spec: str, activation: str, out: Path | None, registry: str | None, quiet: bool, as_json: bool) -> None:
    """Rank the parts of SPEC's model by their error in int8, and show quality against the share of compute in int8.

    Uses the spec's smoothing, floor and overrides. Exports and calibrates first, unless that is on record.
    """
    from pipeline.orchestration.run import RunOptions, opened

    with (
        shown_progress(quiet) as progress,
        opened(spec, RunOptions(registry=registry), progress, keep_state=False) as run,
    ):
        choice = _choice(activation, run.spec, run.shop)
    if out is not None:
        _write(out, choice)
    if as_json:
        emit_json(choice)
    else:
        _show(choice)


def _choice(activation: str, spec: "ModelSpec", shop: Any) -> dict[str, Any]:
    """The choice on record, or made now."""
    from pipeline.compile import steps
    from pipeline.compile.composition import InProcess, calibrate

    kind = _kind(activation, spec)
    exported = steps.export(spec, shop)
    chosen = steps.choose(kind, spec, exported, calibrate(spec, exported, shop, InProcess()), shop)
    found: dict[str, Any] = json.loads(shop.store.read_blob(chosen.choice))
    return found | {"activation": activation, "summary": chosen.summary}


def _kind(activation: str, spec: "ModelSpec") -> "Searched":
    """The kind of int8 that the spec's backends write with these activations; else one with whole weights."""
    from pipeline.compile.plan import Selection, candidates
    from pipeline.values import Searched

    found = [item.flavour.searched for item in candidates(spec, Selection())]
    whole = Searched("int8" if activation == "int8" else "uint8")
    return next((kind for kind in found if kind and kind.activation == activation), whole)


def _write(folder: Path, choice: dict[str, Any]) -> None:
    from pipeline.quantization.search.picture import frontier_svg

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "frontier.json").write_text(json.dumps(choice, indent=2, allow_nan=False) + "\n", "utf-8")
    (folder / "frontier.svg").write_text(frontier_svg(choice), "utf-8")
    say(f"wrote {folder / 'frontier.json'} and {folder / 'frontier.svg'}")


def _show(choice: dict[str, Any]) -> None:
    from validation.reporting.pictures import decibels_text

    _print_groups(choice)
    for point in choice["frontier"]:
        run = "" if point["sqnr_db"] is None else f", run: {decibels_text(point['sqnr_db'])}"
        echo(f"{point['share']:7.1%} in int8: predicted {decibels_text(point['predicted_db'])}{run}")
    echo(f"chosen: {choice['summary']}")


def _print_groups(choice: dict[str, Any]) -> None:
    from validation.reporting.pictures import decibels_text

    measured = any(row["int8_ms"] is not None for row in choice["groups"])
    heads = ("nodes", "MACs", "alone", "strength", "clip", *(["model without -> with"] if measured else []), "int8")
    rows = []
    for row in choice["groups"]:
        alone = decibels_text(row["sqnr_db"])
        strength = "" if row["strength"] is None else f"{row['strength']:.2f}{' folded' if row['folded'] else ''}"
        state = "yes" if row["kept"] else "left in float"
        times = [_times(row)] if measured else []
        rows.append(
            [", ".join(row["nodes"]), f"{row['share']:.1%}", alone, strength, f"{row['clip']:.2f}", *times, state]
        )
    title = "Damage per multiplication, worst first (alone: SQNR of the outputs with only this in int8)"
    print_table(heads, rows, title=title)


def _times(row: dict[str, Any]) -> str:
    """The whole model's milliseconds without and with this group in int8."""
    return "" if row["int8_ms"] is None else f"{row['float_ms']:.3g} -> {row['int8_ms']:.3g} ms"
