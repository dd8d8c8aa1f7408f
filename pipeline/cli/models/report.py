"""`enginesmith report`: the HTML page of a version or a canary."""

from pathlib import Path

import click

from enginesmith.cli.options import emit_json, json_option, registry_option, say
from enginesmith.cli.tables import echo


@click.command()
@click.argument("source", metavar="REF|FILE")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, help="File for the page."
)
@click.option("--prefect", "to_prefect", is_flag=True, help="Also store it as artifacts on the Prefect server.")
@registry_option
@json_option
def report(source: str, out: Path, to_prefect: bool, registry: str, as_json: bool) -> None:
    """Write the HTML page of a version (REF) as of today, or of a report.json (FILE) of a version or a canary.

    The page is one file without scripts or links to other files, in light and dark, ready to print.
    """
    from enginesmith.core.names import parse_reference
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.store.files import write_whole
    from enginesmith.registry.versions.lookup import locate
    from pipeline.compile.publication.pages import draw_page, published_document, read_document

    if source.endswith(".json") or "/" in source:
        document = read_document(Path(source))
    else:
        store = open_store(registry)
        document = published_document(store, locate(store, parse_reference(source)).manifest)
    write_whole(out, draw_page(document).encode())
    keys: list[str] = []
    if to_prefect:
        from pipeline.orchestration.flows.api import show_report

        keys = list(show_report(document, out.absolute().as_uri()))
        for key in keys:
            say(f"artifact: {key}")
    if as_json:
        emit_json({"page": str(out), "artifacts": keys})
    else:
        echo(str(out))
