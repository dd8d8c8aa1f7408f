"""`enginesmith traffic`: show, buckets, capacity."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginesmith.cli.options import (
    Percent,
    ShortTime,
    combine,
    emit_json,
    engine_options,
    json_option,
    number_option,
    path_option,
    precision_option,
    progress_options,
    progress_speaker,
    reference_argument,
    registry_option,
    require_svg,
    say,
    spec_argument,
    spec_registry_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.text import format_plain
from pipeline.cli.run_options import shown_progress, trusted_manifest

if TYPE_CHECKING:
    from pipeline.canary.engines import ChosenEngine
    from pipeline.capacity.forecast import CapacityForecast, EngineCapacity
    from pipeline.compile.run_context import RunContext
    from pipeline.spec.model import ModelSpec
    from pipeline.traffic.buckets import BucketAdvice
    from pipeline.traffic.place import SplitTrace
    from pipeline.traffic.summary import TrafficSummary


# `enginesmith traffic buckets`: the buckets that cost recorded traffic least.


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
    from pipeline.traffic.buckets import advise_buckets, write_buckets
    from pipeline.traffic.place import BucketOptions, read_place, split_beyond
    from pipeline.traffic.summary import edges_json

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
    from pipeline.traffic.summary import count_sizes, draw_choice

    chosen = tuple(advice.choice.edges)
    sizes = {dim: count_sizes(split.within.sizes[dim]) for dim in chosen}
    write_whole(out, draw_choice(sizes, advice.choice.plans, chosen).encode())
    say(f"wrote {out}")


def _print_advice(advice: "BucketAdvice", split: "SplitTrace") -> None:
    from pipeline.traffic.summary import PLAN_COLUMNS, describe_choice, plan_rows

    for line in describe_choice(advice.choice, split):
        echo(line)
    print_table(PLAN_COLUMNS, plan_rows(advice.choice.plans))
    echo(f"times of {advice.engine} at {advice.choice.timed} sizes; intervals are of 95 %")
    echo(f"price of a profile: {format_plain(advice.price.seconds_a_day)} engine seconds a day ({advice.price.words})")
    for remark in advice.remarks:
        echo(remark)


# `enginesmith traffic capacity`: machines and cost for a rate of requests, as tables, JSON or a picture.


_COLUMNS = ("engine", "on", "a second", "batch", "wait", "busy", "machines", "a million")


@click.command()
@reference_argument
@registry_option
@number_option(
    "--rate", click.FloatRange(0, 1e9, min_open=True), None, "Requests a second of the whole fleet.", shown=False
)
@click.option("--p99", type=ShortTime(above=True), required=True, help="Limit of latency, kept by 99 in 100 (50ms).")
@path_option("--prices", "Prices of machines (YAML).", shown="no costs", exists=False)
@path_option("--fleet", "Inventory as `enginesmith fleet` reads it; its counts replace those of the prices.")
@path_option("--traffic", "Recorded requests: their arrivals, scaled in time, and sizes.", shown="Poisson arrivals")
@click.option("--at", metavar="NAME=SIZE,...", show_default="opt sizes", help="Sizes of dims, as in length=64.")
@number_option("--batch", click.IntRange(1), None, "Samples of a batch, at most.", shown="the best of those timed")
@click.option("--wait", type=ShortTime(), show_default="the best of five", help="Longest wait for others (2ms).")
@click.option("--headroom", type=Percent(), default="0%", show_default=True, help="Share of each machine kept free.")
@number_option("--spare", click.IntRange(0, 100), 1, "Machines that may be lost.")
@click.option(
    "--batch-overhead", type=ShortTime(), show_default="not counted", help="What your server adds to each batch."
)
@click.option("--request-overhead", type=ShortTime(), show_default="not counted", help="The same, for each request.")
@precision_option("all")
@path_option("--out", "File for the picture: cost against the limit (SVG).", dir_okay=False)
@progress_options
@json_option
@click.pass_context
def capacity(
    ctx: click.Context,
    /,
    reference: str,
    registry: str,
    rate: float | None,
    p99: float,
    prices: Path | None,
    fleet: Path | None,
    traffic: Path | None,
    at: str | None,
    batch: int | None,
    wait: float | None,
    headroom: float,
    spare: int,
    batch_overhead: float | None,
    request_overhead: float | None,
    precision: str | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Show how many machines of each kind serve REF at a rate within a limit of p99, what that costs, and the cheapest
    mix.

    By the latencies on record of each engine on each kind of machine, through a simulated batcher. What was not timed
    is not guessed. Exit code 1 if no engine keeps the limit, or the machines that there are do not carry the rate.
    """
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.store.files import write_whole
    from pipeline.capacity.forecast import CapacityTerms, ServerOverhead, ServingTerms, prepare
    from validation.capacity.greatest_rate import LatencyLimit, cost_svg
    from validation.capacity.machines import CapacityDemand

    if rate is None:
        raise click.UsageError("give --rate, requests a second")
    if out and not prices:
        raise click.UsageError("the picture is of costs: give --prices")
    if out:
        require_svg(out)
    stated = batch_overhead is not None or request_overhead is not None
    server = ServerOverhead(batch_overhead or 0.0, request_overhead or 0.0) if stated else None
    terms = CapacityTerms(
        CapacityDemand(rate, headroom, spare), LatencyLimit(p99),
        ServingTerms(batch, wait, server), prices, fleet, traffic, at, precision,
    )  # fmt: skip
    store = open_store(registry)
    prepared = prepare(store, trusted_manifest(store, reference), terms, progress_speaker(quiet))
    found = prepared.forecast()
    if out:
        write_whole(out, cost_svg(prepared.cost_curves(found), p99, found.currency).encode())
        say(f"picture: {out}")
    if as_json:
        emit_json(encode(found))
    else:
        print_forecast(found)
    ctx.exit(0 if any(row.greatest for row in found.engines) and not found.why_no_mix else 1)


def print_forecast(found: "CapacityForecast") -> None:
    """Print the engines that were timed, those that were not, and the cheapest mix."""
    demand = found.demand
    free = f", {100 * demand.headroom:g} % of each machine free" if demand.headroom else ""
    lost = f", {demand.spare} machine{'s' if demand.spare > 1 else ''} lost" if demand.spare else ""
    echo(
        f"{found.reference}: {demand.rate:g} requests a second, p99 within {1e3 * found.limit.seconds:g} ms{free}{lost}"
    )
    echo(found.arrivals)
    carrying = [row for row in found.engines if row.greatest]
    if carrying:
        print_table(_COLUMNS, [_row(row, found.currency) for row in carrying])
    if any(row.busy for row in carrying):
        say("remark: engines marked * were timed on a busy machine; their rates hold for such a machine")
    if any(row.server is None for row in carrying):
        say(
            "remark: what a server adds to a run is not counted; measure yours, and give --batch-overhead and"
            " --request-overhead"
        )
    if others := [row for row in found.engines if not row.greatest]:
        print_table(("engine", "on", "why not"), [[row.unit, row.machine, row.reason] for row in others])
    if found.mix and found.mix_per_million and found.mix_units is not None:
        cost = _cost(found.mix_per_million.value, found.mix_per_million.low, found.mix_per_million.high, found.currency)
        parts = ", ".join(f"{count} {name} ({found.mix_units[name]})" for name, count in found.mix.machines.items())
        echo(f"cheapest mix: {parts}: {found.mix.per_hour:.4g} {found.currency} an hour, {cost} a million")
    elif found.why_no_mix:
        echo(f"no mix: {found.why_no_mix}")


def _row(row: "EngineCapacity", currency: str) -> Sequence[str]:
    found, machines, cost = row.greatest, row.machines, row.per_million
    if found is None or machines is None:
        return ()
    rate, policy = found.rate, found.policy
    high = "?" if machines.high is None else machines.high
    return (
        row.unit + (" *" if row.busy else ""),
        row.machine,
        f"{rate.value:.4g} ({rate.low:.4g} to {rate.high:.4g})",
        f"{found.batch:.1f} of {policy.most}",
        f"{format_plain(1e3 * policy.wait_s)} ms",
        f"{100 * found.utilization:.0f} %",
        f"{machines.value} ({machines.low} to {high})",
        _cost(cost.value, cost.low, cost.high, currency) if cost else "no price",
    )


def _cost(value: float, low: float, high: float | None, currency: str) -> str:
    most = "?" if high is None else format_plain(high)
    return f"{format_plain(value)} ({format_plain(low)} to {most}) {currency}".rstrip()


# `enginesmith traffic show`: what recorded traffic holds.


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
        from pipeline.traffic.summary import draw_traffic

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
    from pipeline.cli.run_options import trusted_manifest
    from pipeline.intake.places import spec_at
    from pipeline.operations.validate import spec_of
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
    from pipeline.traffic.summary import DIM_COLUMNS, describe_traffic, dim_rows, histogram_rows, hour_table, pair_table

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
