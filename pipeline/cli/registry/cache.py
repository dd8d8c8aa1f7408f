"""`enginesmith cache`: a registry's pull-through cache behind HTTP, one for the nodes of a cluster or a zone."""

from datetime import timedelta
from pathlib import Path

import click

from enginesmith.cli.options import Duration, ListenAddress, Size, log_format_option, registry_option, say
from enginesmith.cli.tables import echo
from enginesmith.core.address import HttpAddress


@click.command()
@click.option(
    "--listen",
    type=ListenAddress(),
    metavar="HOST:PORT",
    default="127.0.0.1:8080",
    show_default=True,
    help="Address to serve on; 0.0.0.0:8080 in a pod. Port 0 is any free one.",
)
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the blobs."
)
@click.option(
    "--bytes",
    "limit_bytes",
    type=Size(),
    default="100GiB",
    show_default=True,
    help="Bound of the blobs that are kept; the least recently used go first.",
)
@click.option(
    "--fresh",
    type=Duration(),
    default="5s",
    show_default=True,
    help="How long a document is served before the registry is asked whether it changed.",
)
@click.option(
    "--offline",
    type=Duration(),
    default="1h",
    show_default=True,
    help="How long known documents are served while the registry is out of reach.",
)
@click.option(
    "--grace",
    type=Duration(),
    default="30s",
    show_default=True,
    help="How long running downloads may take once the cache is to end.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with a bearer token that clients must send.",
)
@click.option("--serve", "also", metavar="PREFIX", multiple=True, help="Serve keys under this prefix, too; repeat it.")
@log_format_option
@registry_option
def cache(
    listen: HttpAddress,
    folder: Path,
    limit_bytes: int,
    fresh: timedelta,
    offline: timedelta,
    grace: timedelta,
    token_file: Path | None,
    also: tuple[str, ...],
    registry: str,
) -> None:
    """Serve a registry to many nodes over HTTP, read-only: each blob comes from the registry once.

    Nodes pull with --registry http://HOST:PORT,REGISTRY, and read from REGISTRY where the cache does not answer. What
    it keeps can be deleted at any time. SIGTERM lets running downloads come to their end.
    """
    from pipeline.cache_server.running import CacheSettings, serve

    settings = CacheSettings(
        registry=registry,
        folder=folder.absolute(),
        host=listen.host,
        port=listen.port,
        limit_bytes=limit_bytes,
        fresh_s=fresh.total_seconds(),
        offline_s=offline.total_seconds(),
        grace_s=grace.total_seconds(),
        token_file=token_file,
        also=also,
    )
    serve(settings, say, lambda url: echo(f"{url} serves {registry}"))
    say("stopped")
