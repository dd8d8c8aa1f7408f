"""`enginesmith debug refit`: new weights for the engines of a version, from a spec or from another version."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    emit_json,
    json_option,
    progress_options,
    reference_argument,
    registry_option,
    selection_options,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from pipeline.cli.published import local_context, trusted_manifest
from pipeline.cli.run_options import shown_progress

if TYPE_CHECKING:
    from enginesmith.registry.manifest import Manifest
    from enginesmith.registry.store.base import Store
    from pipeline.operations.refit import PublishedRefit, Refit
    from pipeline.orchestration.run import RunOptions


@click.command()
@reference_argument
@click.option(
    "--weights-from",
    "weights",
    required=True,
    metavar="SPEC|REF",
    help="Where the new weights are: a spec, whose model is exported and quantized, or a version (REF).",
)
@selection_options
@click.option(
    "--dry-run", is_flag=True, help="Show what could be refitted, as far as manifest and plan say; do nothing."
)
@registry_option
@progress_options
@json_option
@click.pass_context
def refit(
    ctx: click.Context,
    /,
    reference: str,
    weights: str,
    dry_run: bool,
    registry: str,
    quiet: bool,
    as_json: bool,
    targets: str | None,
    precisions: str | None,
    backends: str | None,
) -> None:
    """Give the engines of REF new weights without building them, prove them, and publish a version.

    For engines built with backends.tensorrt.refittable or strip_weights, if the models differ in their weights alone.
    With a spec, engines that cannot be refitted are built as by `enginesmith build`; with a version, nothing is built.
    Exit code 1 if nothing was refitted or a unit failed.
    """
    from enginesmith.registry.ensembles import require_model
    from enginesmith.registry.store.base import open_store
    from pipeline.orchestration.run import RunOptions

    store = open_store(registry)
    base = trusted_manifest(store, reference)
    require_model(base)
    if Path(weights).suffix in (".yaml", ".yml"):
        options = RunOptions(registry, targets, precisions, backends)
        found, published = _refit_with_spec(base, Path(weights), options, quiet, dry_run)
    else:
        found, published = _refit_with_version(base, trusted_manifest(store, weights), store, quiet, dry_run)
    if as_json:
        units = [each.to_json() for each in found]
        emit_json({"from": f"{base.model}@{base.version}", "units": units, **(encode(published) if published else {})})
    else:
        _show(found, published, dry_run)
    if not dry_run:
        ctx.exit(0 if any(each.engine for each in found) and not (published and published.failed) else 1)


def _refit_with_spec(
    base: "Manifest", spec: Path, options: "RunOptions", quiet: bool, dry_run: bool
) -> tuple[list["Refit"], "PublishedRefit | None"]:
    from pipeline.compile.composition import compile_model
    from pipeline.operations.refit import PublishedRefit, foresee_refits, refit_units
    from pipeline.orchestration.run import build_lock, lock_names, open_run

    with shown_progress(quiet) as progress, open_run(spec, options, progress, keep_state=not dry_run) as run:
        batches = run.prepare()
        requests = [unit.request for batch in batches for unit in batch.plan.wanted]
        if dry_run:
            return foresee_refits(requests, base), None
        found = refit_units(requests, base, run)
        if not any(each.engine for each in found):
            return found, None
        with build_lock(run, lock_names(run, options)):
            built = compile_model(run)
    return found, PublishedRefit.of(built)


def _refit_with_version(
    base: "Manifest", other: "Manifest", store: "Store", quiet: bool, dry_run: bool
) -> tuple[list["Refit"], "PublishedRefit | None"]:
    from pipeline.compile.run_context import Work
    from pipeline.operations.refit import PublishedRefit, foresee_refits, refit_units
    from pipeline.operations.refit_version import publish_refitted, wanted_of
    from pipeline.operations.revalidate import spec_of

    wanted, without = wanted_of(base, other)
    requests = [each.request for each in wanted]
    if dry_run:
        return [*foresee_refits(requests, base), *without], None
    with local_context(store, quiet) as context:
        found = refit_units(requests, base, Work(spec_of(other), context))
        done = [(result, each) for result, each in zip(found, wanted, strict=True) if result.engine]
        if not done:
            return [*found, *without], None
        published = publish_refitted(base, other, done, "candidate", context)
    units = {result.request.unit for result, _ in done}
    failed = tuple(entry.unit for entry in published.manifest.engines if entry.unit in units and not entry.usable)
    return [*found, *without], PublishedRefit(other.model, published.version, published.channel_refusal, failed)


def _show(found: "list[Refit]", published: "PublishedRefit | None", dry_run: bool) -> None:
    done = "can be, if the models differ in their weights alone" if dry_run else "refitted"
    rows = [(each.request.unit, done if not each.reason else "no", each.reason) for each in found]
    print_table(("unit", "refitted", "why not"), rows)
    if published and published.version:
        echo(f"{published.model}@{published.version} published")
    elif not dry_run:
        echo("nothing was refitted and nothing published; `enginesmith build` compiles")
    if published and published.channel_refusal:
        echo(f"the channel did not move: {published.channel_refusal}", err=True)
