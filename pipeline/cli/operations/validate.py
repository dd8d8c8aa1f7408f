"""`enginesmith validate`: proofs of published engines, made here, or on a machine that cannot reach the registry."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    emit_json,
    json_option,
    optional_reference_argument,
    path_option,
    progress_options,
    registry_option,
    targets_option,
    trust_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.text import pluralize
from pipeline.cli.run_options import local_context, target_names, vouched_manifest

if TYPE_CHECKING:
    from enginesmith.registry.manifest import Manifest
    from enginesmith.registry.store.base import Store
    from pipeline.operations.revalidate import Attested

_COLUMNS = ("unit", "status", "why")


@click.command()
@optional_reference_argument
@registry_option
@targets_option("all")
@path_option(
    "--carry",
    "Write REF's engines and golden cases to this folder, for a GPU machine that cannot reach the registry.",
    file_okay=False,
)
@click.option(
    "--import",
    "imported",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Judge the results file that `python -m validation.gpu --carry` made of such a folder, and attach it.",
)
@path_option(
    "--cache",
    "Prove REF's compile caches of torch instead, with the model's files in this folder, that of its spec.",
    file_okay=False,
)
@trust_option
@click.option("--allow-unsigned", is_flag=True, help="With --cache: run its code without a signature.")
@progress_options
@json_option
@click.pass_context
def validate(
    ctx: click.Context,
    reference: str | None,
    registry: str,
    targets: str | None,
    carry: Path | None,
    imported: Path | None,
    cache: Path | None,
    trust: Path | None,
    allow_unsigned: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the engines of REF that this machine can run, and attach the proof to the registry.

    On a node with a GPU this turns an unproven engine into a proven one. For a node that cannot reach the registry,
    --carry takes the engines there and --import brings the results back (docs/reference/gpu-check.md). --cache measures
    the warm start of compile caches again, whose code needs a signature that --trust asks for, or --allow-unsigned
    (docs/guides/client.md#compile-caches). Exit code 1 if a check failed, or a cache or a result was refused.
    """
    from enginesmith.registry.store.base import open_store

    if imported and (reference or carry or targets):
        raise click.UsageError("--import takes neither a reference, --carry nor --target: the file says what it is of")
    if not imported and not reference:
        raise click.UsageError("name a model or a version of it, or give --import FILE")
    if cache and (imported or carry):
        raise click.UsageError("--cache takes neither --carry nor --import: a cache is proven where it is used")
    if allow_unsigned and not cache:
        raise click.UsageError("--allow-unsigned is for --cache: engines are no code")
    store = open_store(registry)
    if imported:
        verdicts = _import(store, imported, as_json)
        ctx.exit(_exit_code(verdicts))
    manifest, signed = vouched_manifest(store, str(reference), trust)
    wanted = target_names(manifest, targets) if targets else None
    if carry:
        verdicts = _carry(store, manifest, carry, wanted, as_json)
    elif cache:
        _require_signed(manifest, signed, allow_unsigned)
        verdicts = _start(store, manifest, cache, wanted, quiet, as_json)
    else:
        verdicts = _run(store, manifest, wanted, targets, quiet, as_json)
    ctx.exit(_exit_code(verdicts))


def _exit_code(verdicts: list[str]) -> int:
    return 1 if {"failed", "refused"} & set(verdicts) else 0


def _require_signed(manifest: "Manifest", signed: bool, allow_unsigned: bool) -> None:
    """Raise UntrustedError for a version whose caches nobody answers for."""
    from enginesmith.core.errors import UntrustedError

    if not signed and not allow_unsigned:
        raise UntrustedError(
            f"{manifest.model}@{manifest.version}: its compile caches are code (pickles and shared libraries), and no "
            "signature was asked for; give a --trust policy that requires one, or --allow-unsigned if whoever can "
            "write to the registry may run code here"
        )


def _start(
    store: "Store", manifest: "Manifest", folder: Path, wanted: set[str] | None, quiet: bool, as_json: bool
) -> list[str]:
    """Start the compile caches for the targets `wanted`, print their verdicts and return them."""
    from pipeline.operations.revalidate_caches import revalidate_caches

    with local_context(store, quiet) as context:
        results = list(revalidate_caches(manifest, context, folder, wanted))
    _print_verdicts(manifest, results, "caches", as_json)
    return [item.verdict for item in results]


def _run(
    store: "Store", manifest: "Manifest", wanted: set[str] | None, targets: str | None, quiet: bool, as_json: bool
) -> list[str]:
    """Run the engines for the targets `wanted`, print their verdicts and return them. targets: as they were given."""
    from enginesmith.core.errors import UnknownNameError
    from pipeline.operations.revalidate import revalidate

    with local_context(store, quiet) as context:
        results = list(revalidate(manifest, context, wanted))
    if not results:
        raise UnknownNameError(
            f"{manifest.model}@{manifest.version} has no engine{f' for {targets}' if targets else ''}; "
            f"`enginesmith show {manifest.model}@{manifest.version}` lists what it has"
        )
    _print_verdicts(manifest, results, "engines", as_json)
    return [item.verdict for item in results]


def _print_verdicts(manifest: "Manifest", results: "list[Attested]", what: str, as_json: bool) -> None:
    """what: 'engines' or 'caches'."""
    if as_json:
        items = [
            {
                **{name: getattr(item.entry, name) for name in ("target", "precision", "backend", "digest")},
                "status": item.verdict,
                "reason": item.reason,
                "report": item.report,
                "latency": item.latency,
            }
            for item in results
        ]
        emit_json({"model": manifest.model, "version": manifest.version, what: items})
    else:
        rows = [[item.entry.unit, item.verdict, item.reason] for item in results]
        print_table(_COLUMNS, rows, title=f"{manifest.model}@{manifest.version}")


def _carry(store: "Store", manifest: "Manifest", folder: Path, wanted: set[str] | None, as_json: bool) -> list[str]:
    from pipeline.operations.offline.bundle import write_offline_bundle

    made = write_offline_bundle(store, manifest, folder, wanted)
    engines = [item.digest for item in made.engines] + [item.digest for item in made.ensembles]
    if as_json:
        emit_json({"model": made.model, "version": made.version, "engines": engines})
    else:
        graphs = f" with those of {', '.join(made.graphs)}" if made.graphs else ""
        echo(
            f"{folder}: {pluralize(len(engines), 'engine')} of {made.model}@{made.version}{graphs} and its golden cases"
        )
    return []


def _import(store: "Store", path: Path, as_json: bool) -> list[str]:
    from pipeline.operations.offline.bundle import import_file

    found = import_file(store, path)
    if as_json:
        emit_json([vars(item) for item in found])
    else:
        rows = [[f"{item.reference} {item.unit}", item.verdict, item.reason] for item in found]
        print_table(_COLUMNS, rows, title=str(path))
    return [item.verdict for item in found]
