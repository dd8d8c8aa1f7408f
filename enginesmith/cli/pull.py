"""`enginesmith pull`: the engine that fits a serving node, and why; or a channel that is followed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.download_bar import download_bar
from enginesmith.cli.layouts import check_layout, layout_options, show_placed, triton_of, write_objects
from enginesmith.cli.options import (
    emit_json,
    json_option,
    optional_references_argument,
    progress_options,
    registry_option,
    say,
)
from enginesmith.cli.pull_options import (
    MACHINES,
    NODE,
    POLICY,
    REPORT,
    WATCH,
    add_options,
    client_of,
    machine_of,
    machines_of,
    one_machine,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.cli.watching import follow, refuse_without_watch

if TYPE_CHECKING:
    from enginesmith.client.client import EngineRanking, Pulled


@click.command()
@optional_references_argument
@click.option(
    "--dest", type=click.Path(path_type=Path), default=Path(), show_default="this folder", help="Folder for the engine."
)
@add_options(MACHINES, POLICY, layout_options)
@click.option(
    "--rehash", is_flag=True, help="Hash files that are here already, instead of trusting that nothing changed them."
)
@click.option(
    "--explain",
    is_flag=True,
    help="Only show which engines fit the machine, best first, and why not the others. Exit code 1 if none does.",
)
@add_options(NODE, WATCH, REPORT)
@progress_options
@registry_option
@json_option
def pull(
    references: tuple[str, ...], dest: Path, registry: str, as_json: bool, quiet: bool, explain: bool, **given: Any
) -> None:
    """Download the engine of REF that fits the target best, verified, and say why that one.

    With --follow, REF may be several channels, each of which comes into DEST/MODEL/CHANNEL.
    """
    context, layout = click.get_current_context(), given["layout"]
    check_layout(context, layout)
    client = client_of(registry, given)
    if given["watch"]:
        if explain:
            raise click.UsageError("--explain looks at one REF once: leave out --follow")
        follow(client, references, dest, given, as_json)
        return
    if len(references) != 1:
        raise click.UsageError("give one REF; several go with --follow")
    reference = references[0]
    if explain:
        _explain([client.resolve(reference, machine_of(given, target)) for target in given["targets"]], as_json)
        return
    refuse_without_watch(context)
    if layout == "kserve":
        write_objects(client, reference, dest, one_machine(given), given, as_json)
        return
    if layout == "triton":
        with download_bar(quiet) as progress:
            placed = client.place(reference, dest, triton_of(given), machine=machines_of(given), progress=progress)
        show_placed(placed, as_json)
        return
    with download_bar(quiet) as progress:
        pulled = client.pull(reference, dest, machine=one_machine(given), progress=progress)
    for line in (*pulled.warnings, *(f"note: {remark}" for remark in pulled.resolution.remarks)):
        say(line)
    if as_json:
        emit_json(_pulled_json(pulled))
    else:
        _print_pulled(pulled)


def _explain(answers: "list[EngineRanking]", as_json: bool) -> None:
    """Print what fits each machine, as one document in JSON, and exit."""
    if as_json:
        found = [answer.to_json() for answer in answers]
        emit_json(found if len(found) > 1 else found[0])
    else:
        for answer in answers:
            _show(answer)
    click.get_current_context().exit(0 if all(answer.candidates for answer in answers) else 1)


def _show(answer: "EngineRanking") -> None:
    rows = [
        [str(number), one.entry.unit, one.entry.status, "; ".join((one.fit, *one.remarks))]
        for number, one in enumerate(answer.candidates, 1)
    ]
    rows += [["-", unit, "rejected", reason] for unit, reason in answer.rejected]
    facts = ", ".join(f"{name} {value}" for name, value in answer.machine.list_facts().items())
    echo(f"{answer.what} on {answer.machine.target.name}" + (f" ({facts})" if facts else ""))
    print_table(("rank", "engine", "status", "why"), rows)


def _print_pulled(pulled: "Pulled") -> None:
    came = {"there": " (was there already)", "cache": " (from this machine's cache)", "registry": ""}[pulled.origin]
    echo(f"{pulled.path}{came}")
    echo(f"chosen: {pulled.engine.unit} of {pulled.located.manifest.model}@{pulled.located.manifest.version}")
    echo(f"why:    {pulled.resolution.why}")
    if pulled.located.signed_by:
        echo(f"signed: by {', '.join(pulled.located.signed_by)}")
    for unit, reason in pulled.resolution.rejected:
        echo(f"not:    {unit}: {reason}")


_ENGINE_FIELDS = ("target", "precision", "backend", "status", "reason", "digest", "size_bytes")


def _pulled_json(pulled: "Pulled") -> dict[str, Any]:
    engine, manifest = pulled.engine, pulled.located.manifest
    return {
        "path": str(pulled.path),
        "description": str(pulled.description),
        "model": manifest.model,
        "version": manifest.version,
        **{name: getattr(engine, name) for name in _ENGINE_FIELDS},
        "why": pulled.resolution.why,
        "rejected": [{"unit": unit, "reason": reason} for unit, reason in pulled.resolution.rejected],
        "lost": [{"unit": unit, "reason": reason} for unit, reason in pulled.resolution.lost],
        "remarks": list(pulled.resolution.remarks),
        "cached": pulled.cached,
        "origin": pulled.origin,
        "warning": pulled.warning,
        "signed_by": list(pulled.located.signed_by),
    }
