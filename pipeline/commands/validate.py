"""`enginery validate`."""

from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit_json, json_option, progress_options, registry_option, shown_progress
from pipeline.commands.tables import print_table

if TYPE_CHECKING:
    from pipeline.registry.manifest import Manifest
    from pipeline.revalidate import Attested


@click.command()
@click.argument("reference")
@registry_option
@click.option("--target", help="Only engines for this target or group, e.g. sm_89 or ampere.")
@progress_options
@json_option
@click.pass_context
def validate(ctx: click.Context, reference: str, registry: str, target: str | None, quiet: bool, as_json: bool) -> None:
    """Run the engines of REFERENCE that this machine can run, and attach the proof to the registry.

    On a node with a GPU this is what turns an unproven engine into a proven one.
    """
    from builders.errors import UnknownNameError
    from builders.local import LocalExecutor
    from builders.targets import parse_targets
    from pipeline.registry.names import parse_reference
    from pipeline.registry.store import open_store
    from pipeline.registry.trust import require
    from pipeline.registry.versions import locate
    from pipeline.revalidate import revalidate
    from pipeline.workshop import Workshop

    wanted = {item.name for item in parse_targets(target)} if target else None
    store = open_store(registry)
    located = locate(store, parse_reference(reference))
    require(store, located)
    manifest = located.manifest
    executor = LocalExecutor()
    with shown_progress(quiet) as progress:
        results = list(revalidate(manifest, Workshop(store, executor, executor, progress), wanted))
    if not results:
        raise UnknownNameError(
            f"{manifest.model}@{manifest.version} has no engine{f' for {target}' if target else ''}; "
            f"`enginery show {manifest.model}@{manifest.version}` lists what it has"
        )
    if as_json:
        emit_json({"model": manifest.model, "version": manifest.version, "engines": [_row(item) for item in results]})
    else:
        _show(manifest, results)
    ctx.exit(1 if any(item.verdict == "failed" for item in results) else 0)


def _row(item: "Attested") -> dict[str, str | None]:
    entry = item.entry
    return {
        "target": entry.target,
        "precision": entry.precision,
        "backend": entry.backend,
        "digest": entry.digest,
        "status": item.verdict,
        "reason": item.reason,
        "report": item.report,
        "latency": item.latency,
    }


def _show(manifest: "Manifest", results: "list[Attested]") -> None:
    print_table(
        ("unit", "status", "why"),
        [[item.entry.unit, item.verdict, item.reason] for item in results],
        title=f"{manifest.model}@{manifest.version}",
    )
