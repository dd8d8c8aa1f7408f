"""Options and output of `pull` for layouts other than the plain one: Triton's repositories, KServe's objects."""

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import emit_json, number_option, say
from pipeline.cli.tables import echo
from pipeline.cli.traffic.quantities import ShortTime

if TYPE_CHECKING:
    from enginery.client.client import Triton
    from enginery.client.layouts.base import Placed

# Options that mean something for Triton's layout alone.
_FOR_TRITON = ("all_generations", "most", "wait", "warmup")
_FOR_KSERVE = ("image", "car")

layout_options = (
    click.option(
        "--layout",
        type=click.Choice(["plain", "triton", "kserve"]),
        default="plain",
        show_default=True,
        help="How the engine lies in DEST; triton: a model repository, kserve: objects of a cluster that pulls it.",
    ),
    click.option("--all-generations", is_flag=True, help="triton: engines of every compute capability it has."),
    number_option("--most", click.IntRange(1), None, "triton: join requests, at most so many samples.", shown=False),
    click.option("--wait", type=ShortTime(), help="triton: join requests; one waits so long for others (2ms)."),
    click.option("--warmup/--no-warmup", default=True, show_default=True, help="triton: run golden inputs first."),
    click.option("--image", help="kserve: the client's image, by digest, which pulls in the cluster."),
    click.option("--car", metavar="IMAGE", help="kserve: an image of `export-oci --layout triton`, by digest."),
)


def check_layout(context: click.Context, layout: str) -> None:
    """Raise click's usage error for an option of another layout."""
    for names, owner in ((_FOR_TRITON, "triton"), (_FOR_KSERVE, "kserve")):
        for name in names:
            given = context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
            if given and layout != owner:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --layout {owner}")


def triton_of(given: dict[str, Any]) -> "Triton":
    """The layout that the options ask for."""
    from enginery.client.client import DynamicBatching, Triton

    joined = given["most"] is not None or given["wait"] is not None
    return Triton(DynamicBatching(given["most"], given["wait"] or 0.0) if joined else None, given["warmup"])


def show_placed(placed: "Placed", as_json: bool) -> None:
    """Print what a repository serves now."""
    for item in placed.pulled:
        for line in (*item.warnings, *(f"note: {remark}" for remark in item.resolution.remarks)):
            say(line)
    first = placed.pulled[0]
    manifest = first.located.manifest
    if as_json:
        files = [{"path": str(item.path), "unit": item.engine.unit, "origin": item.origin} for item in placed.pulled]
        emit_json(
            {
                "model": manifest.model,
                "version": manifest.version,
                "folder": str(placed.folder),
                "config": str(placed.current / "config.pbtxt"),
                "swapped": placed.swapped,
                "engines": files,
            }
        )
        return
    echo(f"{placed.folder}{'' if placed.swapped else ' (was served already)'}")
    for item in placed.pulled:
        echo(f"chosen: {item.path.name}: {item.engine.unit} of {manifest.model}@{manifest.version}")
        echo(f"why:    {item.resolution.why}")
    for unit, reason in first.resolution.rejected:
        echo(f"not:    {unit}: {reason}")
