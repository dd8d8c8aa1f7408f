"""The commands that carry versions elsewhere: mirror, export."""

from dataclasses import asdict
from pathlib import Path

import click

from enginesmith.cli.options import (
    emit_json,
    json_option,
    reference_argument,
    references_argument,
    registry_option,
    say,
    trust_option,
)
from enginesmith.cli.tables import echo
from enginesmith.core.names import parse_reference
from enginesmith.core.origin import user
from enginesmith.core.text import pluralize
from enginesmith.exchange.mirror import mirror as copy
from enginesmith.exchange.oci import export_oci as write
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate


@click.command()
@references_argument
@click.argument("dest", metavar="DEST")
@click.option("--channels", "with_channels", is_flag=True, help="Also move the channels named by REF in the copy.")
@trust_option
@registry_option
@json_option
def mirror(
    references: tuple[str, ...], dest: str, with_channels: bool, trust: Path | None, registry: str, as_json: bool
) -> None:
    """Copy the version of each REF to the registry DEST (a path or URI, as for --registry), verified."""
    wanted = [parse_reference(text) for text in references]
    source, target = open_store(registry), open_store(dest, create=True)
    found = copy(source, wanted, target, with_channels=with_channels, trust=trust, by=user())
    if as_json:
        emit_json({"dest": target.uri, **asdict(found)})
        return
    for name in found.versions:
        echo(name)
    for name in found.moved:
        echo(f"channel {name}")
    echo(f"{pluralize(found.copied, 'blob')} copied ({found.size_bytes} bytes), {found.present} already there")


@click.command("export")
@reference_argument
@click.argument("dest", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--proven-only", is_flag=True, help="Leave out engines that are not proven.")
@click.option(
    "--layout",
    type=click.Choice(["plain", "triton"]),
    default="plain",
    show_default=True,
    help="What an image holds; triton: a model repository in /models, as KServe's model cars do.",
)
@trust_option
@registry_option
@json_option
def export_oci(
    reference: str, dest: Path, proven_only: bool, layout: str, trust: Path | None, registry: str, as_json: bool
) -> None:
    """Write the engines of REF to the OCI image layout DEST: one image per engine, and an index of all."""
    store = open_store(registry)
    located = locate(store, parse_reference(reference))
    found = write(store, located, dest, proven_only=proven_only, triton=layout == "triton", trust=trust)
    if as_json:
        emit_json({"path": str(found.path), "tags": list(found.tags)})
        return
    for tag in found.tags:
        echo(f"oci:{found.path}:{tag}")
    say(f"push one with: skopeo copy --all --preserve-digests oci:{found.path}:{found.tags[0]} docker://HOST/NAME:TAG")
