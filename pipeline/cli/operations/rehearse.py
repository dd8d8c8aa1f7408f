"""`enginesmith rehearse`: whether served versions can move to another toolchain."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from enginesmith.cli.options import PRESENT_FILE, Option, command, emit_json, optional_references_argument, say, takes
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode_document
from enginesmith.core.errors import InputError
from enginesmith.core.text import format_metrics
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.cache import local_cache
from pipeline.cli.run_options import local_context

if TYPE_CHECKING:
    from builders.execution.jobs import Executor
    from pipeline.regressions.rehearsal_verdicts import Applied, Rehearsal, UnitRehearsal

_COLUMNS = ("version", "unit", "status", "SQNR", "metric", "median", "verdict")


@dataclass(frozen=True, kw_only=True)
class _RehearseOptions:
    toolchain: Annotated[
        tuple[str, ...],
        Option(
            "New version of a package, e.g. onnxruntime==1.32.0; repeat it.", metavar="NAME==VERSION", required=True
        ),
    ]
    python: Annotated[
        Path | None,
        Option(
            "Python interpreter of an environment with Enginesmith and these versions.",
            type=PRESENT_FILE,
            shown="an environment that pip creates in the cache",
        ),
    ] = None
    executor: Annotated[
        Literal["local", "ray"],
        Option("Where to build and prove new engines; ray: on Ray workers that have the new versions."),
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

    def words(self) -> str:
        """These options as they are typed, without --apply."""
        typed_options = [f"--toolchain={pin}" for pin in self.toolchain] + [f"--seconds={self.seconds:g}"]
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
    from enginesmith.registry.trust import require
    from pipeline.regressions.pairs import CheckOptions
    from pipeline.regressions.rehearsal import Environments, list_served
    from pipeline.regressions.rehearsal import rehearse as rehearse_versions
    from pipeline.regressions.rehearsal_verdicts import Applied
    from pipeline.regressions.rehearsal_verdicts import apply as apply_rehearsal

    pins, store = parse_pins(options.toolchain), open_store(registry)
    served_versions = list_served(store, references)
    for manifest, _ in served_versions:
        require(store, manifest, trust)
    with local_context(store, quiet) as context, ExitStack() as exit_stack:
        name, executor = _new_toolchain(options, pins, exit_stack, quiet)
        new_context = replace(context, local=executor, executor=executor)
        uses_ray, check_options = options.executor == "ray", CheckOptions(seconds=options.seconds)
        environments = Environments(pins, name, context, new_context, options.words(), uses_ray, check_options)
        rehearsal = rehearse_versions(served_versions, environments)
        changes: list[Applied] = apply_rehearsal(rehearsal, served_versions, context) if options.apply else []
    if as_json:
        emit_json({**encode_document(rehearsal), "applied": [encode_document(change) for change in changes]})
    else:
        show_rehearsal(rehearsal, changes)
    verdicts = {unit.verdict for unit in rehearsal.units}
    has_refusals = any(reason for change in changes for reason in change.channels.values())
    ctx.exit(0 if "moves" in verdicts and "stays" not in verdicts and not has_refusals else 1)


def _new_toolchain(
    options: _RehearseOptions, pins: Mapping[str, str], stack: ExitStack, quiet: bool
) -> tuple[str, "Executor"]:
    """Where the new versions are, in words, and what runs jobs there; `stack` closes it. Raises InputError where no
    environment can be made."""
    from builders.execution.environments import make_environment
    from builders.execution.local import LocalExecutor
    from builders.execution.process import spawn
    from builders.execution.ray import RayExecutor

    if options.executor == "ray":
        return "the Ray worker", stack.enter_context(RayExecutor())
    python = options.python
    if python is None:
        if (cache := local_cache()) is None:
            raise InputError("ENGINESMITH_CACHE_BYTES is 0: there is no cache for an environment; give --python PATH")
        if not quiet:
            say(f"environment with {', '.join(options.toolchain)} ...")
        python = make_environment(pins, cache.folder / "environments")
    return str(python), LocalExecutor(start=partial(spawn, python=python.absolute()))


def show_rehearsal(rehearsal: "Rehearsal", changes: "Sequence[Applied]" = ()) -> None:
    """Print the table of units, and below it what to do about each version, or what was done."""
    pin_text = ", ".join(f"{name} {version}" for name, version in rehearsal.pins.items())
    note = "cells: old -> new toolchain; SQNR: the engine against its graph; median: latency at the opt sizes"
    print_table(_COLUMNS, [_row(unit) for unit in rehearsal.units], title=f"rehearsal of {pin_text}", note=note)
    change_by_version = {change.before: change for change in changes}
    for plan in rehearsal.plan:
        if change := change_by_version.get(plan.version):
            echo(f"{plan.version} -> {change.version}")
            for channel, refusal in change.channels.items():
                echo(f"  {channel}: {f'not moved: {refusal}' if refusal else f'serves {change.version}'}")
            echo("".join(f"  {line}    # to undo it\n" for line in plan.back).rstrip("\n"))
            continue
        echo(f"{plan.version} ({', '.join(plan.channels) or 'no channel'}): {plan.verdict}")
        for line in (*plan.commands, *(f"{line}    # to undo it" for line in plan.back)):
            echo(f"  {line}")


def _row(unit: "UnitRehearsal") -> list[str]:
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
    return [unit.version, unit.unit, *cell_texts, f"{unit.verdict}: {reason}"]
