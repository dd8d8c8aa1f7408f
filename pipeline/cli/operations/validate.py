"""`enginesmith validate`: proofs of published engines, made here, or on a machine that cannot reach the registry."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import click

from enginesmith.cli.options import (
    PRESENT_FILE,
    Option,
    command,
    emit,
    emit_json,
    optional_reference_argument,
    takes,
    targets_option,
)
from enginesmith.cli.tables import echo, print_engines, print_table
from enginesmith.core.errors import UnknownNameError
from enginesmith.core.text import pluralize
from enginesmith.registry.store.base import open_store
from pipeline.cli.run_options import local_context, target_names, trusted_manifest

if TYPE_CHECKING:
    from enginesmith.registry.manifest import EngineEntry, Manifest, Status
    from enginesmith.registry.store.base import Store
    from pipeline.operations.validate import Validated


@dataclass(frozen=True)
class _ValidateOptions:
    targets: Annotated[str | None, targets_option("all")] = None
    carry: Annotated[
        Path | None,
        Option(
            "Write REF's engines and golden cases to this folder, for a GPU machine that cannot reach the registry.",
            type=click.Path(path_type=Path, file_okay=False),
        ),
    ] = None
    imported: Annotated[
        Path | None,
        Option(
            "Judge the results file that `python -m validation.gpu --carry` wrote on the GPU machine, and store the "
            "proof.",
            name="--import",
            type=PRESENT_FILE,
        ),
    ] = None

    def check(self, reference: str | None) -> None:
        """Raise click's usage error for options that do not go together."""
        if self.imported and (reference or self.carry or self.targets):
            raise click.UsageError(
                "--import takes neither a reference, --carry nor --target: the file names its engines"
            )
        if not self.imported and not reference:
            raise click.UsageError("name a model or a version of it, or give --import FILE")


@command()
@optional_reference_argument
@takes(_ValidateOptions)
@click.pass_context
def validate(
    ctx: click.Context,
    reference: str | None,
    options: _ValidateOptions,
    registry: str,
    trust: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the engines of REF that this machine can run, and store the proof in the registry.

    If the checks pass, unproven engines become proven. If a GPU node cannot reach the registry, write the engines to a
    folder with --carry, run them on the node, and read the results with --import (docs/reference/gpu-check.md). Exit
    code 1 if a check failed, or if a result was refused.
    """
    options.check(reference)
    targets, carry_folder = options.targets, options.carry
    store = open_store(registry)
    if options.imported:
        verdicts = _import(store, options.imported, as_json)
        ctx.exit(_exit_code(verdicts))
    manifest = trusted_manifest(store, str(reference), trust)
    target_set = target_names(manifest, targets) if targets else None
    if carry_folder:
        verdicts = _carry(store, manifest, carry_folder, target_set, as_json)
    else:
        verdicts = _run(store, manifest, target_set, targets, quiet, as_json)
    ctx.exit(_exit_code(verdicts))


def _exit_code(verdicts: list[str]) -> int:
    return 1 if {"failed", "refused"} & set(verdicts) else 0


def _run(
    store: "Store", manifest: "Manifest", target_set: set[str] | None, targets: str | None, quiet: bool, as_json: bool
) -> list[str]:
    """Run the engines for `target_set`, print their verdicts and return them. targets: as they were given."""
    from pipeline.operations.validate import validate as validate_here

    with local_context(store, quiet) as context:
        results = list(validate_here(manifest, context, target_set))
    if not results:
        raise UnknownNameError(
            f"{manifest.reference} has no engine{f' for {targets}' if targets else ''}; "
            f"`enginesmith show {manifest.reference}` lists what it has"
        )
    _print_verdicts(manifest, results, as_json)
    return [result.verdict for result in results]


def _print_verdicts(manifest: "Manifest", results: "list[Validated]", as_json: bool) -> None:
    entries = {entry.unit: entry for entry in manifest.engines}
    engines, documents = list["EngineEntry"](), []
    for result in results:
        figures = {"reason": result.reason, "checks": dict(result.checks), "sqnr_db": result.sqnr_db}
        entry = replace(entries[str(result.unit)], status=cast("Status", result.verdict), **figures)  # type: ignore[arg-type]
        engines.append(entry)
        names = ("target", "precision", "backend", "digest", "status")
        reports = {"report": result.report, "latency": result.latency}
        documents.append({**{name: getattr(entry, name) for name in names}, **figures, **reports})
    document = {"model": manifest.model, "version": manifest.version, "engines": documents}
    emit(as_json, document, print_engines, [(entry, {}) for entry in engines], manifest.reference)


def _carry(store: "Store", manifest: "Manifest", folder: Path, target_set: set[str] | None, as_json: bool) -> list[str]:
    from pipeline.operations.offline.bundle import write_offline_bundle

    bundle = write_offline_bundle(store, manifest, folder, target_set)
    digests = [entry.digest for entry in bundle.engines] + [entry.digest for entry in bundle.ensembles]
    if as_json:
        emit_json({"model": bundle.model, "version": bundle.version, "engines": digests})
    else:
        graph_text = f" with those of {', '.join(bundle.graphs)}" if bundle.graphs else ""
        echo(
            f"{folder}: {pluralize(len(digests), 'engine')} of "
            f"{bundle.model}@{bundle.version}{graph_text} and its golden cases"
        )
    return []


def _import(store: "Store", path: Path, as_json: bool) -> list[str]:
    from pipeline.operations.offline.bundle import import_file

    outcomes = import_file(store, path)
    rows = [[f"{outcome.reference} {outcome.unit}", outcome.verdict, outcome.reason] for outcome in outcomes]
    documents = [{name: value for name, value in vars(outcome).items() if name != "latency"} for outcome in outcomes]
    emit(as_json, documents, print_table, ("unit", "status", "why"), rows, title=str(path))
    return [outcome.verdict for outcome in outcomes]
