"""`enginesmith profile --series`: a model's recorded latencies over time, with their change points."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.cli.options import emit_json, say
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode_document

if TYPE_CHECKING:
    from pipeline.regressions.trend import Trend

COLUMNS = ("engine", "bucket", "machine", "points", "since", "newest", "relative", "changes")


def show_series(model: str, buckets: Sequence[str], out: Path | None, registry: str, as_json: bool) -> None:
    """Print the recorded series of a model, and where their level changed. buckets: only these; none means all.

    A change is shown with the version, toolchain or driver that came with it. Raises UnknownNameError where there is no
    such series, InputError for `out` of another format than .svg and .html.
    """
    from enginesmith.core.errors import InputError, UnknownNameError
    from enginesmith.core.names import check_model
    from enginesmith.registry.latency_series import list_series, models_with_series
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.store.files import write_whole
    from pipeline.regressions.trend import find_trend

    if out is not None and out.suffix not in (".svg", ".html"):
        raise InputError(f"--out {out}: give a file that ends in .svg or .html")
    store = open_store(registry)
    found = [find_trend(series) for series in list_series(store, check_model(model))]
    wanted = [" ".join(bucket.replace(",", " ").split()) for bucket in buckets]
    chosen = [item for item in found if not wanted or item.series.bucket in wanted]
    if not chosen:
        known = ", ".join(dict.fromkeys(item.series.bucket for item in found)) or ", ".join(models_with_series(store))
        what = f"{model} has no series" + (f" at {', '.join(buckets)}" if found else "")
        raise UnknownNameError(f"{what}; known: {known or 'none'}; `enginesmith profile {model} --record` adds a point")
    if as_json:
        emit_json([encode_document(item) for item in chosen])
    else:
        _print_trends(chosen)
    if out is not None:
        from pipeline.regressions.pictures import draw_page, draw_trend

        text = draw_page(chosen) if out.suffix == ".html" else draw_trend(chosen[0], standalone=True)
        write_whole(out, text.encode())
        first = chosen[0].series
        left = f" ({first.unit} at {first.bucket}, the first of {len(chosen)}; .html has all)"
        say(f"written: {out}" + (left if out.suffix == ".svg" and len(chosen) > 1 else ""))


def _print_trends(found: "list[Trend]") -> None:
    from pipeline.regressions.trend import describe_change
    from validation.plots.texts import seconds_text

    rows = []
    for item in found:
        series, last = item.series, item.series.points[-1]
        relative = "" if last.relative is None else f"{last.relative:.4f}"
        points = f"{len(series.points)} ({item.quiet} quiet)"
        place = f"{series.machine.cpu}, {series.machine.cores} cores"
        place = ", ".join([place, *series.machine.gpus])
        newest = f"{seconds_text(last.median_s)} (@{last.version})"
        row = [series.unit, series.bucket, place, points, series.points[0].at[:10], newest, relative]
        rows.append([*row, "" if item.changes is None else str(len(item.changes))])
    print_table(COLUMNS, rows, note="relative: to the engine of the first version, timed in turns with it")
    if any(item.changes is None for item in found):
        say("where their level changed was not looked for: pip install '.[trend]' in a clone")
    for item in found:
        for change in item.changes or ():
            echo(f"{item.series.unit} at {item.series.bucket}: {describe_change(change)}")
