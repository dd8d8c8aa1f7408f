"""`enginesmith debug golden`: make, show, compare and freeze golden sets."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import Group, emit, emit_json, spec_argument
from enginesmith.cli.tables import echo
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError
from enginesmith.core.text import pluralize
from enginesmith.registry.store.base import open_store
from pipeline.cli.run_options import opened_run

if TYPE_CHECKING:
    from pipeline.operations.golden import MadeGolden, Shown


@click.group(cls=Group)
def golden() -> None:
    """Make, show, compare and freeze golden sets: inputs, and the outputs of the original model for these inputs."""


@golden.command()
@spec_argument
def make(spec: str, stated_registry: str | None, quiet: bool, as_json: bool) -> None:
    """Make the golden set of SPEC, unless it exists, and show how it differs from the previous golden set."""
    _print_made(_make(spec, stated_registry, quiet, accepting=False), as_json)


@golden.command()
@spec_argument
def accept(spec: str, stated_registry: str | None, quiet: bool, as_json: bool) -> None:
    """Make the golden set of SPEC, and write its digest into the spec. Later builds with another golden set fail."""
    from pipeline.operations.golden import write_frozen

    new_golden = _make(spec, stated_registry, quiet, accepting=True)
    if new_golden.frozen != new_golden.digest:
        write_frozen(Path(spec), new_golden.digest)
    _print_made(replace(new_golden, frozen=new_golden.digest), as_json)


@golden.command()
@click.argument("reference", metavar="REF|DIGEST")
def show(reference: str, registry: str, as_json: bool) -> None:
    """Show the golden set of a version (REF) or a digest: cases, noise floor, and the versions proven with it."""
    from pipeline.operations.golden import describe_golden, golden_of

    store = open_store(registry)
    _print_shown(describe_golden(store, golden_of(store, reference)), as_json)


@golden.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
def diff(before: str, after: str, registry: str, as_json: bool) -> None:
    """Show how golden set B differs from golden set A. A and B are versions (REF) or digests."""
    from pipeline.compile.steps.exports import golden_change
    from pipeline.operations.golden import golden_of

    store = open_store(registry)
    change = golden_change(store, golden_of(store, before), golden_of(store, after))
    emit(as_json, change.to_json(), echo, f"{change.before[:12]} -> {change.after[:12]}: {change}")


def _make(address: str, registry: str | None, quiet: bool, accepting: bool) -> "MadeGolden":
    """Export the spec, which makes its golden set. accepting: whether a digest that the spec demands is ignored."""
    from pipeline.compile.steps.exports import export, latest_golden, told_change
    from pipeline.operations.golden import MadeGolden, unfreeze

    with opened_run(address, registry, quiet) as run:
        spec, context = run.spec, run.context
        if accepting and spec.is_copy:
            raise InputError(f"{spec.address} is a copy; accept the golden set where the spec is kept")
        frozen_digest = spec.golden.frozen if spec.golden else None
        old_digest = frozen_digest or latest_golden(spec.model, context)
        exported_graph = export(replace(run, spec=unfreeze(spec)) if accepting else run)
        is_changed = old_digest is not None and old_digest != exported_graph.golden
        change = told_change(context.store, old_digest, exported_graph.golden) if old_digest and is_changed else None
        return MadeGolden(spec.model, exported_graph.golden, old_digest, change, frozen_digest, exported_graph.notes)


def _print_made(golden_set: "MadeGolden", as_json: bool) -> None:
    if as_json:
        emit_json(encode(golden_set))
        return
    echo(f"{golden_set.digest} {'frozen' if golden_set.frozen else 'not frozen'}")
    for note in [*([f"changed: {golden_set.change}"] if golden_set.change else []), *golden_set.notes]:
        echo(note)


def _print_shown(golden_set: "Shown", as_json: bool) -> None:
    kinds = [kind for _, kind in golden_set.cases]
    if as_json:
        cases = [{"name": name, "kind": kind} for name, kind in golden_set.cases]
        emit_json({**encode(golden_set), "cases": cases})
        return
    echo(golden_set.digest)
    labels = "labels" if golden_set.labels else "no labels"
    echo(f"{pluralize(kinds.count('golden'), 'golden case')}, {pluralize(kinds.count('edge'), 'edge case')}, {labels}")
    edges = [name for name, kind in golden_set.cases if kind == "edge"]
    echo(f"edges: {'; '.join(edges) or 'none'}")
    if golden_set.sequences:
        echo(f"free running: sequences of {', '.join(map(str, golden_set.sequences))} steps")
    for output, floors in (golden_set.noise.floors if golden_set.noise else {}).items():
        floor_texts = ", ".join(f"{floor.sqnr_db:.0f} dB ({kind})" for kind, floor in floors.items())
        echo(f"noise floor of {output}: {floor_texts}")
    echo(f"versions: {', '.join(golden_set.versions) or 'none'}")
