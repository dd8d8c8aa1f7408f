"""`enginesmith rehearse`: whether served versions can move to another toolchain."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from enginesmith.cli.options import Option, command, emit, optional_references_argument, say, takes
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode_document
from enginesmith.core.text import format_metrics
from enginesmith.registry.manifest import load_pinned
from enginesmith.registry.store.base import open_store
from pipeline.cli.operations.check import share
from pipeline.cli.run_options import local_context

if TYPE_CHECKING:
    from enginesmith.core.reports.latency import MachineKind
    from pipeline.regressions.rehearsal_verdicts import Applied, Rehearsal, UnitRehearsal

_COLUMNS = ("version", "unit", "status", "SQNR", "metric", "median", "verdict")


@dataclass(frozen=True, kw_only=True)
class _RehearseOptions:
    toolchain: Annotated[
        tuple[str, ...],
        Option(
            "New version of a package, e.g. onnxruntime==1.32.0; repeatable.", metavar="NAME==VERSION", required=True
        ),
    ]
    python: Annotated[
        Path | None,
        Option(
            "Python of an environment with Enginesmith and these versions; with --executor ray: on the workers.",
            type=click.Path(path_type=Path),
            shown="an environment that pip creates in the cache",
        ),
    ] = None
    executor: Annotated[
        Literal["local", "ray"],
        Option("Where to rehearse each unit: on this machine, or on a Ray worker that has its hardware."),
    ] = "local"
    apply: Annotated[
        bool,
        Option(
            "For each version that can move: publish a version with the new engines, and move the channels to it.",
            is_flag=True,
        ),
    ] = False
    seconds: Annotated[
        float, Option("Seconds to time the two engines of each unit.", type=click.FloatRange(0, 3600, min_open=True))
    ] = 8.0
    slower: Annotated[
        float,
        Option(
            "A unit stays if its median latency is higher by more than this share, with 95 % confidence.",
            type=share,
            shown="3%",
        ),
    ] = 0.03

    def words(self) -> str:
        """These options as they are typed, without --apply."""
        typed_options = [f"--toolchain={pin}" for pin in self.toolchain] + [f"--seconds={self.seconds:g}"]
        typed_options += [f"--slower={self.slower:%}".replace(".000000", "")] if self.slower != 0.03 else []
        typed_options += ["--executor=ray"] if self.executor == "ray" else []
        return shlex.join([*typed_options, *([f"--python={self.python}"] if self.python else [])])


@command()
@optional_references_argument
@takes(_RehearseOptions)
@click.pass_context
def rehearse(
    ctx: click.Context,
    references: tuple[str, ...],
    options: _RehearseOptions,
    registry: str,
    trust: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Rebuild the served versions with another toolchain, and show which engines can move to it.

    Without REF, the command takes every version that a channel serves. It proves each engine on its version's golden
    set with both toolchains, and times both engines alternately. Measurements are stored: a second call does not repeat
    them, even if the first was killed. Without --apply, no version is published and no channel moves. Exit code 1 if an
    engine must stay on the old toolchain, if no engine can move, or if a channel refuses a version.
    """
    from builders.execution.environments import parse_pins
    from builders.execution.ray import RayExecutor
    from enginesmith.registry.trust import require
    from pipeline.regressions.rehearsal import Rehearser, Upgrade, list_served
    from pipeline.regressions.rehearsal import rehearse as rehearse_versions
    from pipeline.regressions.rehearsal_verdicts import apply as apply_rehearsal

    python = str(options.python) if options.python else None
    upgrade = Upgrade(parse_pins(options.toolchain), python, options.seconds, options.slower)
    store = open_store(registry)
    served_versions = list_served(store, upgrade, references)
    for manifest, _ in served_versions:
        for trusted_manifest in (manifest, *(load_pinned(store, graph) for graph in manifest.graphs)):
            require(store, trusted_manifest, trust)
    with local_context(store, quiet) as context, ExitStack() as exit_stack:
        remote = exit_stack.enter_context(RayExecutor()) if options.executor == "ray" else None
        rehearser = Rehearser(upgrade, context, remote, str if quiet else say)
        rehearsal = rehearse_versions(served_versions, rehearser, options.words())
        changes = apply_rehearsal(rehearsal, served_versions, context) if options.apply else []
    document = {**encode_document(rehearsal), "applied": [encode_document(change) for change in changes]}
    emit(as_json, document, show_rehearsal, rehearsal, changes)
    verdicts = {unit.verdict for unit in rehearsal.units}
    refusals = {change.before: (change.refusal, *change.channels.values()) for change in changes}
    has_refusals = any(any(refusals.get(plan.version, plan.busy_channels)) for plan in rehearsal.plan)
    ctx.exit(0 if "moves" in verdicts and "stays" not in verdicts and not has_refusals else 1)


def show_rehearsal(rehearsal: "Rehearsal", changes: "Sequence[Applied]" = ()) -> None:
    """Print the table of units, and below it the action for each version, or its result."""
    pin_text = ", ".join(f"{name} {version}" for name, version in rehearsal.pins.items())
    note = "cells: old -> new toolchain; SQNR: the engine against its graph; median: latency at the opt sizes"
    rows = [_row(unit, rehearsal.machine) for unit in rehearsal.units]
    print_table(_COLUMNS, rows, title=f"rehearsal of {pin_text}", note=note)
    change_by_version = {change.before: change for change in changes}
    for plan in rehearsal.plan:
        if change := change_by_version.get(plan.version):
            echo(f"{plan.version} -> {change.version or f'not published: {change.refusal}'}")
            for channel, refusal in change.channels.items():
                name = f"{plan.version.partition('@')[0]}:{channel}"
                watch_text = f"a rollout began; `enginesmith rollout watch {name}` runs it"
                success = watch_text if channel in change.rollouts else f"serves {change.version}"
                undo_text = f"{success}\n  enginesmith rollback {name}    # to undo it"
                echo(f"  {channel}: {f'not moved: {refusal}' if refusal else undo_text}")
            continue
        echo(f"{plan.version} ({', '.join(plan.channels) or 'no channel'}): {plan.verdict}")
        for line in (*plan.notes, *plan.commands):
            echo(f"  {line}")


def _row(unit: "UnitRehearsal", here: "MachineKind") -> list[str]:
    from validation.plotting import seconds_text

    measurements = unit.old, unit.new
    cell_pairs = (
        [measurement.status for measurement in measurements],
        ["" if measurement.sqnr_db is None else f"{measurement.sqnr_db:.1f} dB" for measurement in measurements],
        [format_metrics(measurement.metrics) for measurement in measurements],
        ["" if measurement.median_s is None else seconds_text(measurement.median_s) for measurement in measurements],
    )
    cell_texts = [" -> ".join(text or "?" for text in pair) if any(pair) else "" for pair in cell_pairs]
    reason = unit.why or (f"{unit.times.ratio:.3f} times the time" if unit.times and unit.times.ratio else "")
    place = f" (on {unit.machine})" if unit.machine not in (None, here) else ""
    return [unit.version, unit.unit, *cell_texts, f"{unit.verdict}{': ' if reason else ''}{reason}{place}"]
