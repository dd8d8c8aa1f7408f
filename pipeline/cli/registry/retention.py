"""The commands that say what stays and what goes: gc, pin, unpin."""

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from enginery.core.origin import user
from enginery.core.text import pluralize
from pipeline.cli.options import (
    Duration,
    emit_json,
    json_option,
    reference_argument,
    registry_option,
    say,
    why_option,
)
from pipeline.cli.tables import echo, print_table

if TYPE_CHECKING:
    from datetime import datetime

    from enginery.registry.gc import Collected


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
    from enginery.registry.garbage import Rules
    from enginery.registry.gc import collect
    from enginery.registry.store.base import open_store

    rules = Rules(keep_versions, keep_moves)
    found = collect(open_store(registry), rules, grace, delete=delete, say=lambda name: say(f"deleting {name}"))
    if as_json:
        emit_json(_json(found))
    else:
        _print(found)


@click.command()
@reference_argument
@why_option
@registry_option
@json_option
def pin(reference: str, why: str, registry: str, as_json: bool) -> None:
    """Keep the version REF, whatever its age, until `enginery unpin`."""
    from enginery.core.names import parse_reference
    from enginery.registry.garbage import pin as pin_version
    from enginery.registry.store.base import open_store
    from enginery.registry.versions.lookup import locate

    store = open_store(registry)
    manifest = locate(store, parse_reference(reference)).manifest
    new = pin_version(store, manifest, by=user(), why=why)
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "pinned": True, "changed": new})
    else:
        echo(f"{manifest.model}@{manifest.version} is pinned" + ("" if new else " already"))


@click.command()
@click.argument("reference", metavar="NAME@VERSION")
@registry_option
@json_option
def unpin(reference: str, registry: str, as_json: bool) -> None:
    """Remove the pin of the version NAME@VERSION."""
    from enginery.core.errors import UnknownNameError
    from enginery.core.names import parse_reference
    from enginery.registry.garbage import unpin as unpin_version
    from enginery.registry.store.base import open_store

    where = parse_reference(reference)
    if where.version is None:
        raise UnknownNameError(f"{reference!r} names no version; give {where.model}@VERSION")
    unpin_version(open_store(registry), where.model, where.version)
    if as_json:
        emit_json({"model": where.model, "version": where.version, "pinned": False})
    else:
        echo(f"{where} is not pinned any more")


def _json(found: "Collected") -> dict[str, object]:
    items = [{**asdict(item), "due": item.due.isoformat() if item.due else None} for item in found.items]
    return {
        "acted": found.acted,
        "items": items,
        "kept": {name: list(why) for name, why in found.kept.items()},
        "leases": list(found.leases),
        "deleted_bytes": found.size_bytes("deleted"),
        "waiting_bytes": found.size_bytes("new", "waiting", "due", "held"),
    }


def _print(found: "Collected") -> None:
    rows = [
        [item.kind, item.name, str(item.size_bytes or ""), item.state, _day(item.due), item.why] for item in found.items
    ]
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


def _day(due: "datetime | None") -> str:
    return due.isoformat(timespec="minutes") if due else ""
