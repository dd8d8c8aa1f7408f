"""The command that lists: models, or the versions of one, in pages."""

import click

from enginesmith.cli.options import emit_json, json_option, registry_option, say
from enginesmith.cli.tables import cell, print_fields, print_table
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions import views


@click.command("list")
@click.argument("model", required=False)
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="Models or versions to list, at most."
)
@click.option("--before", metavar="VERSION", help="Only versions older than this one.")
@click.option("--after", metavar="NAME", help="Only models after this name, or versions newer than this one.")
@registry_option
@json_option
def list_models(
    model: str | None, limit: int, before: str | None, after: str | None, registry: str, as_json: bool
) -> None:
    """List the models of a registry, or the newest versions of MODEL, in pages: --limit with --after or --before."""
    if model is None:
        if before is not None:
            raise click.UsageError("--before pages through versions: name a MODEL")
        _list_models(registry, as_json, limit, after)
    else:
        _list_versions(registry, model, as_json, limit, before, after)


def _list_models(registry: str, as_json: bool, limit: int, after: str | None) -> None:
    rows = views.list_models(open_store(registry), limit=limit + 1, after=after)
    more, rows = len(rows) > limit, rows[:limit]
    if more:
        say(f"at most {limit} models are shown; for more add --after {rows[-1].model}")
    if as_json:
        emit_json([vars(row) for row in rows])
        return
    print_table(
        ("model", "versions", "newest", "channels"),
        [[row.model, str(len(row.versions)), row.versions[-1], cell(row.channels)] for row in rows],
    )


def _list_versions(registry: str, model: str, as_json: bool, limit: int, before: str | None, after: str | None) -> None:
    rows = views.list_versions(open_store(registry), model, limit=limit + 1, before=before, after=after)
    # One more than is shown was asked for, to know whether there are more: the newest with `after`, else the oldest.
    more, rows = len(rows) > limit, rows[:limit] if after is not None else rows[-limit:]
    if more and after is None:
        say(f"at most {limit} versions are shown; for older ones add --before {rows[0].version}")
    elif more:
        say(f"at most {limit} versions are shown; for newer ones add --after {rows[-1].version}")
    if as_json:
        emit_json([row.to_json() for row in rows])
        return
    for row in rows:
        if row.damage:
            say(f"{model}@{row.version} cannot be read: {row.damage}")
    print_fields(("version", "created_at", "engines", "channels"), rows)
