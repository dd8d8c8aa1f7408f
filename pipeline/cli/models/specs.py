"""Commands about specs: `debug schema`, `prefect register` and `prefect watch`."""

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    emit_json,
    json_option,
    number_option,
    registry_option,
    say,
)
from enginesmith.cli.tables import echo
from enginesmith.core.text import pluralize

if TYPE_CHECKING:
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


@click.command("watch")
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
