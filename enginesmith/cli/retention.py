"""The commands of retention: gc, pin."""

from dataclasses import asdict
from datetime import timedelta

import click

from enginesmith.cli.options import (
    Duration,
    emit_json,
    json_option,
    reference_argument,
    registry_option,
    say,
    why_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.names import parse_reference
from enginesmith.core.origin import user
from enginesmith.core.text import pluralize
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.gc import Collected, collect
from enginesmith.registry.pins import pin as pin_version
from enginesmith.registry.pins import unpin as unpin_version
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate


@click.command()
@click.option("--delete", is_flag=True, help="Mark and delete. Without this nothing changes.")
@click.option("--grace", type=Duration(), default="7d", show_default=True, help="Time from marking to deleting.")
@click.option(
    "--keep-versions",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Newest versions of each model to keep.",
)
@click.option(
    "--keep-moves",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Newest moves of each channel to keep, for rollback.",
)
@registry_option
@json_option
def gc(delete: bool, grace: timedelta, keep_versions: int, keep_moves: int, registry: str, as_json: bool) -> None:
    """Show what nothing needs any more. With --delete, mark it, and delete what was marked at least --grace ago."""
    rules = Rules(keep_versions, keep_moves)
    found = collect(open_store(registry), rules, grace, delete=delete, say=lambda name: say(f"deleting {name}"))
    if not as_json:
        _print(found)
        return
    items = [{**asdict(item), "due": item.due.isoformat() if item.due else None} for item in found.items]
    emit_json(
        {
            "acted": found.acted,
            "items": items,
            "kept": {name: list(why) for name, why in found.kept.items()},
            "leases": list(found.leases),
            "deleted_bytes": found.size_bytes("deleted"),
            "waiting_bytes": found.size_bytes("new", "waiting", "due", "held"),
        }
    )


@click.command()
@reference_argument
@click.option("--remove", is_flag=True, help="Remove the pin of NAME@VERSION, whose files may be gone.")
@why_option
@registry_option
@json_option
def pin(reference: str, remove: bool, why: str, registry: str, as_json: bool) -> None:
    """Keep the version REF, whatever its age, until the pin is removed."""
    if remove:
        if why:
            raise click.UsageError("--why is kept with a pin: leave it out with --remove")
        _unpin(reference, registry, as_json)
        return
    store = open_store(registry)
    manifest = locate(store, parse_reference(reference)).manifest
    new = pin_version(store, manifest, by=user(), why=why)
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "pinned": True, "changed": new})
    else:
        echo(f"{manifest.model}@{manifest.version} is pinned" + ("" if new else " already"))


def _unpin(reference: str, registry: str, as_json: bool) -> None:
    where = parse_reference(reference)
    if where.version is None:
        raise UnknownNameError(f"{reference!r} names no version; give {where.model}@VERSION")
    unpin_version(open_store(registry), where.model, where.version)
    if as_json:
        emit_json({"model": where.model, "version": where.version, "pinned": False})
    else:
        echo(f"{where} is not pinned any more")


def _print(found: Collected) -> None:
    rows = []
    for item in found.items:
        due = item.due.isoformat(timespec="minutes") if item.due else ""
        rows.append([item.kind, item.name, str(item.size_bytes or ""), item.state, due, item.why])
    if rows:
        print_table(("kind", "name", "bytes", "state", "due", "why"), rows)
    for lease in found.leases:
        echo(f"writing now: {lease}")
    gone, left = found.size_bytes("deleted"), found.size_bytes("new", "waiting", "due", "held")
    echo(
        f"{pluralize(len(found.kept), 'version')} kept; {gone} bytes deleted, {left} bytes are garbage and still there"
    )
    if rows and not found.acted:
        say("nothing was changed; add --delete to mark what is new and to delete what is due")
