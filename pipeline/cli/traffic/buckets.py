"""`enginesmith traffic buckets`: the buckets that cost recorded traffic least."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    ShortTime,
    combine,
    emit_json,
    engine_options,
    json_option,
    number_option,
    path_option,
    progress_options,
    require_svg,
    say,
    spec_argument,
    spec_registry_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.text import format_plain
from pipeline.cli.run_options import shown_progress

if TYPE_CHECKING:
    from pipeline.canary.engines import ChosenEngine
    from pipeline.compile.run_context import RunContext
    from pipeline.spec.model import ModelSpec
    from pipeline.traffic.buckets import BucketAdvice
    from pipeline.traffic.place import SplitTrace

_traffic_options = combine(
    click.option(
        "--traffic",
        type=click.Path(path_type=Path),
        required=True,
        help="Recorded traffic: a file that `enginesmith traffic record` wrote, or a folder of them.",
    ),
    click.option(
        "--dim", "dims", multiple=True, show_default="all but the batch", help="Dim to choose for; repeat it."
    ),
    number_option("--most", click.IntRange(1, 64), None, "Most profiles.", shown="as many as pay"),
    number_option(
        "--batch", click.IntRange(1), None, "Most samples that a batcher puts together.", shown="the dim's max"
    ),
    click.option("--wait", type=ShortTime(), default="0ms", show_default=True, help="Longest wait for others (2ms)."),
    number_option(
        "--rate", click.FloatRange(0, min_open=True), None, "Requests a second to plan for.", shown="the traffic's"
    ),
    number_option(
        "--profile-price",
        click.FloatRange(0),
        None,
        "Engine seconds that a profile costs in a day.",
        shown="its build, once, and its share of the memory",
    ),
    click.option("--shrink", is_flag=True, help="Let the greatest bucket end at the greatest size of the traffic."),
)
_timing_options = combine(
    click.option("--engine", metavar="REF", help="Time the engine of this version.", show_default="the fp32 graph"),
    click.option("--latencies", metavar="REF", help="Take the latency report of this version; time nothing."),
    engine_options,
    number_option("--seconds", click.FloatRange(0, 3600, min_open=True), 0.3, "Seconds of timing for each size."),
)


@click.command()
@spec_argument
@_traffic_options
@_timing_options
@path_option("--out", "Also draw a picture (.svg) into this file.", dir_okay=False)
@click.option("--write", is_flag=True, help="Write the buckets into SPEC; all else in the file stays as it is.")
@spec_registry_option
@progress_options
@json_option
def buckets(
    spec: str,
    traffic: Path,
    dims: tuple[str, ...],
    most: int | None,
    batch: int | None,
    wait: float,
    rate: float | None,
    profile_price: float | None,
    shrink: bool,
    engine: str | None,
    latencies: str | None,
    target: str,
    precision: str | None,
    seconds: float,
    out: Path | None,
    write: bool,
    registry: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Choose the buckets of SPEC's dims that cost the recorded traffic least, and say what they save.

    The cost of a request is the engine time of its padded batch, from times measured at candidate sizes, and its share
    of the profiles' price. The buckets are the best for one dim; for several, the product of each dim's best.
    """
    from enginesmith.core.errors import InputError
    from pipeline.compile.run_context import Work
    from pipeline.traffic.buckets import advise_buckets
    from pipeline.traffic.place import read_place, split_beyond
    from pipeline.traffic.plan import BucketOptions
    from pipeline.traffic.spec_edit import write_buckets
    from pipeline.traffic.tables import edges_json

    if engine and latencies:
        raise InputError("give --engine, to time it, or --latencies, to take what is on record")
    if out is not None:
        require_svg(out)
    options = BucketOptions(dims, most, batch, wait, rate, profile_price, shrink, seconds)
    with _opened(spec, registry, quiet) as (model, context):
        if write and model.is_copy:
            raise InputError(f"{model.address} is a copy; give --write the spec's own file")
        found = read_place(traffic, model.tensors(), model.model)
        split = split_beyond(found.trace, model.named_dims())
        chosen = _engine(engine or latencies, target, precision, context)
        if chosen and chosen.manifest.model != model.model:
            raise InputError(
                f"{engine or latencies} is an engine of {chosen.manifest.model}, and SPEC is {model.model}"
            )
        advice = advise_buckets(Work(model, context), found, split, options, chosen, recorded=latencies is not None)
    if out is not None:
        _draw(advice, split, out)
    if write:
        write_buckets(model.path, advice.choice.edges)
        say(f"wrote the buckets into {model.path}")
    if as_json:
        beyond = {"beyond": encode(split.beyond), "fallback_share": split.fallback_share}
        emit_json({**encode(advice), "buckets": edges_json(advice.choice.edges), **beyond})
    else:
        _print_advice(advice, split)


@contextmanager
def _opened(address: str, registry: str | None, quiet: bool) -> "Iterator[tuple[ModelSpec, RunContext]]":
    from pipeline.orchestration.run import RunOptions, open_run

    options = RunOptions(registry=registry)
    with shown_progress(quiet) as progress, open_run(address, options, progress, keep_state=False) as run:
        yield run.spec, run.context


def _engine(reference: str | None, target: str, precision: str | None, context: "RunContext") -> "ChosenEngine | None":
    from enginesmith.core.hardware.machine import target_named
    from enginesmith.core.names import parse_reference
    from pipeline.canary.engines import choose

    if reference is None:
        return None
    return choose(context.store, parse_reference(reference), target_named(target), precision)


def _draw(advice: "BucketAdvice", split: "SplitTrace", out: Path) -> None:
    from enginesmith.registry.store.files import write_whole
    from pipeline.traffic.pictures import draw_choice
    from pipeline.traffic.summary import count_sizes

    chosen = tuple(advice.choice.edges)
    sizes = {dim: count_sizes(split.within.sizes[dim]) for dim in chosen}
    write_whole(out, draw_choice(sizes, advice.choice.plans, chosen).encode())
    say(f"wrote {out}")


def _print_advice(advice: "BucketAdvice", split: "SplitTrace") -> None:
    from pipeline.traffic.tables import PLAN_COLUMNS, describe_choice, plan_rows

    for line in describe_choice(advice.choice, split):
        echo(line)
    print_table(PLAN_COLUMNS, plan_rows(advice.choice.plans))
    echo(f"times of {advice.engine} at {advice.choice.timed} sizes; intervals are of 95 %")
    echo(f"price of a profile: {format_plain(advice.price.seconds_a_day)} engine seconds a day ({advice.price.words})")
    for remark in advice.remarks:
        echo(remark)
