"""`enginesmith registry metrics`: a registry's numbers for Prometheus."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from enginesmith.cli.options import check_finite, registry_option, say
from enginesmith.cli.tables import echo
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import write_whole

if TYPE_CHECKING:
    from pipeline.orchestration.metrics.live import LiveMetrics

Command = TypeVar("Command", bound=Callable[..., object])


def metrics_options(command: Command) -> Command:
    """`--metrics-port` and `--metrics-address`, for commands that take long."""
    address = click.option(
        "--metrics-address",
        default="127.0.0.1",
        show_default=True,
        help="Address to serve metrics on; 0.0.0.0 in a pod.",
    )
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        show_default="off",
        help="Port to serve Prometheus metrics on; 0 is any free port.",
    )
    return port(address(command))


@contextmanager
def served_metrics(port: int | None, address: str) -> Iterator["LiveMetrics | None"]:
    """Count the events of a run, and serve the counts while the block runs; None without a port."""
    if port is None:
        yield None
        return
    from pipeline.orchestration.metrics.live import LiveMetrics, serve_metrics

    live = LiveMetrics()
    with serve_metrics(live.registry, port, address) as server:
        say(f"metrics: {server.url}/metrics")
        yield live


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="Port; 0 is any free port."
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to serve on; 0.0.0.0 in a pod.")
@click.option(
    "--every",
    default=60.0,
    type=click.FloatRange(1),
    callback=check_finite,
    show_default=True,
    help="Seconds between two reads of the registry.",
)
@click.option("--once", is_flag=True, help="Print the metrics on stdout and exit.")
@click.option(
    "--textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the metrics to this file (for node_exporter) and exit.",
)
@registry_option
def metrics(port: int, address: str, every: float, once: bool, textfile: Path | None, registry: str) -> None:
    """Serve a registry's numbers to Prometheus: builds, runs, cache, unproven engines, drift.

    Read from the registry's documents, so one exporter covers every run, wherever it took place.
    """
    from pipeline.orchestration.metrics.exporter import Exporter
    from pipeline.orchestration.metrics.live import serve_metrics

    exporter = Exporter(open_store(registry), say)
    if once or textfile is not None:
        from prometheus_client import generate_latest

        whole = exporter.refresh_all()
        text = generate_latest(exporter.registry())
        if textfile is None:
            echo(text.decode(), nl=False)
        else:
            write_whole(textfile, text)
        raise SystemExit(0 if whole else 3)
    exporter.refresh()
    try:
        with serve_metrics(exporter.registry(), port, address) as server:
            say(f"metrics of {registry}: {server.url}/metrics; Ctrl-C ends it")
            exporter.run(every, server.ended)
            server.wait()
    except KeyboardInterrupt:
        say("stopped")
