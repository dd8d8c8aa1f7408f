"""`enginesmith site write` and `enginesmith site serve`: the registry as a website, in a folder or on a port."""

import re
from pathlib import Path

import click

from enginesmith.cli.options import command, emit_json, listen_option, number_option, path_option, say
from enginesmith.cli.tables import echo
from enginesmith.core.errors import HttpAddress
from enginesmith.registry.store.base import open_store


@command()
@click.argument("dest", type=click.Path(path_type=Path))
def site(dest: Path, registry: str, trust: Path | None, as_json: bool) -> None:
    """Write the registry as a website into the folder DEST: static files, for a bucket, a server or a browser.

    Reads and writes only changes since the last run.
    """
    from pipeline.site.folder import SiteFolder
    from pipeline.site.generate import write_site

    site_result = write_site(open_store(registry), SiteFolder(dest), trust, say)
    if as_json:
        emit_json(vars(site_result))
    else:
        say(f"{site_result.written} files written, {site_result.deleted} deleted")
        echo(str(dest / "index.html"))


@command()
@listen_option("127.0.0.1:8080")
@number_option("--every", click.FloatRange(1), 30.0, "Seconds between polls of the registry.")
@click.option("--prefix", default="", metavar="/PATH", help="Path of the site below an ingress.")
@path_option("--dest", "Folder for the files of the site.", default_text="a temporary folder", file_okay=False)
def serve(listen: HttpAddress, every: float, prefix: str, dest: Path | None, registry: str, trust: Path | None) -> None:
    """Serve the registry as a website: the files of `enginesmith site write`, updated when the registry changes.

    The site is read-only: it answers only GET and HEAD. It has no login: listen on loopback, or behind an ingress.
    """
    from tempfile import TemporaryDirectory

    from enginesmith.listening import HttpServer
    from pipeline.site.folder import SiteFolder
    from pipeline.site.generate import write_site
    from pipeline.site.server import Refresher, SiteFiles

    if prefix and not re.fullmatch(r"(/[A-Za-z0-9_-]+)+/?", prefix):
        raise click.UsageError(f"--prefix {prefix!r} is not a path; give one such as /registry")
    store = open_store(registry)
    with TemporaryDirectory(prefix="enginesmith-site-", ignore_cleanup_errors=True) as temporary_folder:
        folder = SiteFolder(dest or Path(temporary_folder))
        refresher = Refresher(lambda: write_site(store, folder, trust, say), say)
        files = SiteFiles(folder.root, prefix, only_loopback=listen.is_loopback)
        try:
            with HttpServer(files, listen) as server:
                say(f"{registry}: {server.url}{prefix.rstrip('/')}/; Ctrl-C ends it")
                refresher.run(every, server.ended)
                server.wait()
        except KeyboardInterrupt:
            say("stopped")
