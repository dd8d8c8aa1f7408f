"""Options and output of `pull` for layouts other than the plain one: Triton's repositories, KServe's objects."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.options import ShortTime, emit_json, number_option, say
from enginesmith.cli.tables import echo
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import absolute_uri
from enginesmith.registry.store.files import make_folder, write_whole

if TYPE_CHECKING:
    from enginesmith.client.client import Client
    from enginesmith.client.layouts.base import Placed
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.core.hardware.machine import Machine
    from enginesmith.registry.manifest import EngineEntry

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
    click.option("--car", metavar="IMAGE", help="kserve: an image of `registry export --layout triton`, by digest."),
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
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.client.layouts.triton_config import DynamicBatching

    joined = given["most"] is not None or given["wait"] is not None
    return Triton(DynamicBatching(given["most"], given["wait"] or 0.0) if joined else None, given["warmup"])


def write_objects(
    client: "Client", reference: str, dest: Path, machine: "Machine", given: dict[str, Any], as_json: bool
) -> None:
    """Write DEST/MODEL.yaml: the objects of a cluster that serves the version. Nothing is downloaded."""
    import yaml

    from enginesmith.client.layouts.base import rank_each
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.client.locate import VersionLocator
    from enginesmith.exchange.kserve import Deployment

    asked = VersionLocator(client.store, checked=True).locate(parse_reference(reference))
    located, (found,) = rank_each(client.store, asked, [machine], client.policy, Triton())
    engine, manifest = found.resolution().chosen, located.manifest
    if "auto" in given["targets"]:
        raise click.UsageError(
            "--layout kserve: name the --target of the cluster's nodes; this machine is none of them"
        )
    deployment = Deployment(
        manifest,
        engine,
        machine,
        options=tuple(_uri_options(given, engine, machine)),
        image=given["image"] or "",
        car=given["car"] or "",
        registry=absolute_uri(str(client.registry)),
    )
    path = dest / f"{manifest.model}.yaml"
    make_folder(dest)
    write_whole(path, yaml.safe_dump_all(deployment.to_objects(), sort_keys=False).encode())
    if as_json:
        emit_json({"path": str(path), "model": manifest.model, "version": manifest.version, "unit": engine.unit})
        return
    echo(str(path))
    if deployment.registry.startswith("file://") and deployment.image:
        say(f"note: {deployment.registry} is a local folder; mount it in the container")
    echo(f"serves: {engine.unit} of {manifest.model}@{manifest.version}, {engine.status}")


def _uri_options(given: dict[str, Any], engine: "EngineEntry", machine: "Machine") -> Iterator[tuple[str, str]]:
    """What the cluster's pull is told: the target, the precision that was chosen, and what is stated of the nodes."""
    yield "target", given["targets"][0]
    yield "precision", engine.precision
    for name in ("driver", "cuda", "fallback"):
        if given[name]:
            yield name, given[name]
    if given["memory_gib"]:
        yield "memory", f"{given['memory_gib']:g}"
    if given["proven_only"]:
        yield "proven-only", ""
    for name, version in machine.runtimes.items():
        yield "runtime", f"{name}={version}"


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
    accepted = {entry.unit for item in placed.pulled for entry in item.resolution.ranked}
    rejected = [row for item in placed.pulled for row in item.resolution.rejected if row[0] not in accepted]
    # Of several reasons the one of the machine that the engine was built for is the last.
    for unit, reason in dict(sorted(rejected, key=lambda row: not row[1].startswith("built for "))).items():
        echo(f"not:    {unit}: {reason}")
