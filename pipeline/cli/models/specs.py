"""Commands about specs: `enginesmith schema`, `register`, `watch-specs` and `catalog`."""

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    emit_json,
    jobs_option,
    json_option,
    number_option,
    progress_options,
    registry_option,
    say,
    selection_options,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.text import pluralize
from pipeline.cli.models.plan import is_stuck
from pipeline.cli.run_options import collect_run_options, executor_options, shown_progress

if TYPE_CHECKING:
    from pipeline.orchestration.run import RunOptions
    from pipeline.orchestration.watch import WatchedSpec


@click.command()
@click.option("--ensemble", is_flag=True, help="Of the spec of several graphs (docs/guides/ensembles.md).")
def schema(ensemble: bool) -> None:
    """Print the JSON Schema of a spec, for editors and pre-commit checks."""
    from pipeline.spec.ensembles.model import EnsembleSpec
    from pipeline.spec.model import ModelSpec

    described = (EnsembleSpec if ensemble else ModelSpec).model_json_schema()
    title = f"Enginesmith {'ensemble' if ensemble else 'model'} spec"
    described = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described, "title": title}
    echo(json.dumps(described, indent=2))


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@registry_option
@click.option("--no-event", is_flag=True, help="Only keep it in the registry; send no event to Prefect.")
@json_option
def register(spec: Path, registry: str, no_event: bool, as_json: bool) -> None:
    """Store SPEC, a file, and the files it names in the registry, and send the event on which Prefect builds it.

    Stored: the spec, its source (an entry point with the local modules it imports), weights, calibration and golden
    data. Not stored: installed packages, and files that the code opens by itself.
    """
    from enginesmith.registry.store.base import open_store
    from pipeline.intake.bundle import register as register_spec
    from pipeline.spec.ensembles.model import load_any

    loaded = load_any(spec)
    store = open_store(registry, create=True)
    item, existed = register_spec(store, loaded)
    facts = {"model": loaded.model, "spec": item.address, "registry": store.uri, "files": dict(item.bundle.files)}
    if not as_json:
        state = "registered already" if existed else "registered"
        echo(f"{item.address}\n{state} in {store.uri}, {pluralize(len(item.bundle.files), 'file')}")
    sent = None
    if not no_event:
        from pipeline.orchestration.events import send_registered

        sent = send_registered(store, item)
        say(f"sent to {sent.server}: {sent.event} {sent.id}")
    if as_json:
        emit_json({**facts, "existed": existed, "event": asdict(sent) if sent else None})


@click.command("watch-specs")
@click.argument("place")
@registry_option
@number_option("--interval", click.FloatRange(0.1), 30.0, "Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once, register what is new, and exit.")
@json_option
def watch_specs(place: str, registry: str, interval: float, once: bool, as_json: bool) -> None:
    """Watch PLACE (a folder, a file:// URI or a prefix of a bucket) and register each spec whose content is new.

    A spec is taken once its files are unchanged between two looks. Each event is sent once, also by a watcher that was
    restarted. With --json, one line of JSON for each spec that was registered or cannot be read.
    """
    from enginesmith.registry.store.base import open_store
    from pipeline.orchestration.watch import Watch

    def show(seen: "WatchedSpec") -> None:
        if as_json:
            echo(json.dumps(asdict(seen)))
        else:
            (echo if seen.told else say)(f"{seen.spec}: {seen.said}")

    store = open_store(registry, create=True)
    with Watch(store, place, show) as watch:
        if once:
            watch.look(settled=False)
            return
        say(f"watching {place} every {interval:g} s; Ctrl-C ends it")
        watch.run(interval, threading.Event())


@click.command()
@click.argument("specs", metavar="[PLACE]", default="registered")
@selection_options
@executor_options
@jobs_option
@progress_options
@registry_option
@json_option
@click.option("--plan", "only_plan", is_flag=True, help="Say what would be built; run nothing.")
@click.pass_context
@collect_run_options
def catalog(
    ctx: click.Context, /, specs: str, quiet: bool, as_json: bool, only_plan: bool, options: "RunOptions"
) -> None:
    """Build every spec in PLACE: a folder, a file:// URI, a prefix of a bucket, or registered (the default: the newest
    spec of each model in the registry).

    A spec that fails does not stop the others. Exit code 1 if a spec or one of its engines failed.

    With --plan, say for each spec how many units would be built and how many engines are there, as far as that is on
    record; exit code 1 if a spec cannot be planned, or a unit of it has failed, or all of them are refused.
    """
    if only_plan:
        ctx.exit(_plan_catalog(specs, options, as_json))
    from pipeline.compile.composition import InProcess
    from pipeline.orchestration.catalog import compile_all, gather_specs, words
    from pipeline.orchestration.run import start_executors

    with (
        gather_specs(specs, options.registry) as addresses,
        shown_progress(quiet) as progress,
        start_executors(options) as executors,
    ):
        rows = compile_all(addresses, options, InProcess(), progress, executors)
    if as_json:
        emit_json([row.to_json() for row in rows])
    else:
        cells = [
            [
                *(row.spec, row.model or "", row.state, row.version or ""),
                ", ".join(f"{count} {status}" for status, count in row.engines.items()),
                row.reason,
            ]
            for row in rows
        ]
        print_table(("spec", "model", "state", "version", "engines", "reason"), cells)
        say(words(rows))
    ctx.exit(0 if all(row.good for row in rows) else 1)


def _plan_catalog(specs: str, options: "RunOptions", as_json: bool) -> int:
    """Print what a build of each spec would do; the exit code."""
    from pipeline.orchestration.catalog import gather_specs
    from pipeline.orchestration.planned_catalog import plan_catalog, summarize

    with gather_specs(specs, options.registry) as addresses:
        rows = plan_catalog(addresses, options)
    if as_json:
        emit_json([row.to_json() for row in rows])
    else:
        cells = [
            [
                *(row.spec, row.model or "", ", ".join(f"{count} {action}" for action, count in row.units.items())),
                row.reason or ", ".join(row.missing),
            ]
            for row in rows
            if not row.settled
        ]
        if cells:
            print_table(("spec", "model", "units", "not on record, or why not"), cells)
        say(summarize(rows))
    return int(any(row.reason or is_stuck(row.units, sum(row.units.values())) for row in rows))
