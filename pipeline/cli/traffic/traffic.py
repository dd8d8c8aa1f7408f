"""`enginesmith traffic show`: what recorded traffic holds."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import emit_json, json_option, path_option, registry_option, require_svg, say
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec
    from pipeline.traffic.summary import TrafficSummary


@click.command()
@click.argument("place", metavar="PLACE", type=click.Path(path_type=Path))
@click.option("--spec", metavar="SPEC", help="Spec of the model that was asked, which names its dims.")
@click.option("--model", "version", metavar="REF", help="Or a version of it. Default: the model that PLACE names.")
@registry_option
@path_option("--out", "Also draw a picture (.svg) into this file.", dir_okay=False)
@json_option
def traffic(place: Path, spec: str | None, version: str | None, registry: str, out: Path | None, as_json: bool) -> None:
    """Show the sizes of recorded requests: a histogram of each dynamic dim, of pairs, and by hour; rates and bursts.

    PLACE: a file that `enginesmith traffic record` or enginesmith.Recorder wrote (.jsonl, .npz), or a folder of them.
    The histograms of --json are what `enginesmith debug fuzz --histogram` takes.
    """
    from pipeline.traffic.place import read_place
    from pipeline.traffic.summary import summarize

    if out is not None:
        require_svg(out)
    model = _model_of(place, spec, version, registry)
    found = read_place(place, model.tensors(), model.model)
    dims = model.named_dims()
    summary = summarize(found, dims)
    edges = {dim.name: [high for _, _, high in dim.buckets()] for dim in dims}
    for file in found.cut:
        say(f"{file}: its last line is half written and was left out")
    if out is not None:
        from enginesmith.registry.store.files import write_whole
        from pipeline.traffic.pictures import draw_traffic

        write_whole(out, draw_traffic(summary, edges).encode())
        say(f"wrote {out}")
    if as_json:
        histograms = {dim: dict(counts.counts) for dim, counts in summary.dims.items()}
        emit_json({"model": model.model, "histograms": histograms, **encode(summary)})
    else:
        _print_summary(summary, edges)


def _model_of(place: Path, spec: str | None, reference: str | None, registry: str) -> "ModelSpec":
    """The spec that tells the inputs. Raises InputError where both or neither of spec and version are known."""
    from enginesmith.core.errors import InputError
    from enginesmith.registry.store.base import open_store
    from pipeline.cli.published import trusted_manifest
    from pipeline.intake.places import spec_at
    from pipeline.operations.revalidate import spec_of
    from pipeline.traffic.place import model_of_place

    if spec and reference:
        raise InputError("give --spec or --model; both say the same")
    if spec:
        with spec_at(spec, registry) as found:
            return found.load()
    reference = reference or model_of_place(place)
    if not reference:
        raise InputError(f"{place} does not say which model was asked; give --spec SPEC or --model REF")
    return spec_of(trusted_manifest(open_store(registry), reference))


def _print_summary(summary: "TrafficSummary", edges: dict[str, list[int]]) -> None:
    from pipeline.traffic.tables import (
        DIM_COLUMNS,
        describe_traffic,
        dim_rows,
        histogram_rows,
        hour_table,
        pair_table,
    )

    for line in describe_traffic(summary):
        echo(line)
    print_table(DIM_COLUMNS, dim_rows(summary))
    for dim, counts in summary.dims.items():
        if len(counts.counts) > 1:
            echo()
            print_table((dim, "requests", "share", ""), histogram_rows(counts, edges[dim]))
    for pair in summary.pairs:
        if len({a for a, _, _ in pair.counts}) > 1 and len({b for _, b, _ in pair.counts}) > 1:
            echo()
            print_table(*pair_table(pair))
    if len(summary.hours) > 1:
        echo()
        print_table(*hour_table(summary))
