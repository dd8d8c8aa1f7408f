"""`enginery site` and `enginery serve`: the registry as a website, in a folder or on a port."""

from pathlib import Path
from typing import Any

import click

from pipeline.cli.options import combine, emit_json, json_option, path_option, registry_option, say
from pipeline.cli.tables import echo

site_options = combine(
    path_option("--inventory", "Groups of nodes, as of `enginery fleet`.", shown="every GPU product known"),
    click.option(
        "--catalog",
        type=click.Path(path_type=Path),
        envvar="ENGINERY_CATALOG",
        show_envvar=True,
        show_default="every model on every machine",
        help="Which models must be served where (YAML).",
    ),
    click.option(
        "--trust",
        type=click.Path(path_type=Path),
        envvar="ENGINERY_TRUST_POLICY",
        show_envvar=True,
        help="Trust policy to check signatures by.",
    ),
    click.option("--title", default="Registry", show_default=True, help="Title of the first page."),
    registry_option,
)


@click.command()
@click.argument("dest", type=click.Path(path_type=Path))
@site_options
@json_option
def site(dest: Path, registry: str, as_json: bool, **sources: Any) -> None:
    """Write the registry as a website into the folder DEST: static files, for a bucket, a server or a browser.

    Only what changed since the last time is read and written.
    """
    from enginery.registry.store.base import open_store
    from pipeline.site.folder import SiteFolder
    from pipeline.site.generate import SiteSources, write_site

    done = write_site(open_store(registry), SiteFolder(dest), SiteSources(**sources), say)
    if as_json:
        emit_json(vars(done))
    else:
        say(f"{done.written} files written, {done.deleted} deleted")
        echo(str(dest / "index.html"))
