"""`enginesmith traffic`: show, buckets, capacity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from enginesmith.cli.options import (
    COUNT,
    POSITIVE,
    SVG,
    EngineChoice,
    Option,
    ShortTime,
    command,
    emit,
    emit_json,
    percent,
    precision_option,
    reference_argument,
    say,
    spec_argument,
    takes,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import parse_reference
from enginesmith.core.text import format_plain
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import write_whole
from pipeline.cli.run_options import opened_run, trusted_manifest

if TYPE_CHECKING:
    from pipeline.capacity.forecast import CapacityForecast, EngineCapacity
    from pipeline.spec.model import ModelSpec
    from pipeline.traffic.buckets import BucketAdvice
    from pipeline.traffic.place import SplitTrace
    from pipeline.traffic.summary import TrafficSummary


@dataclass(frozen=True, kw_only=True)
class _BucketsOptions:
    traffic: Annotated[
        Path, Option("Recorded traffic: a file that `enginesmith traffic record` wrote, or a folder of them.")
    ]
    dims: Annotated[
        tuple[str, ...],
        Option(
            "Dim (named axis of an input) to choose buckets for; repeatable.",
            name="--dim",
            shown="all dynamic dims but the batch",
        ),
    ] = ()
    most: Annotated[
        int | None,
        Option(
            "Maximum number of optimization profiles.", type=click.IntRange(1, 64), shown="as many as lower the cost"
        ),
    ] = None
    batch: Annotated[
        int | None, Option("Maximum number of samples per batch.", type=COUNT, shown="the max of the batch dim")
    ] = None
    wait: Annotated[
        float,
        Option(
            "Longest time that a request waits for others to join its batch, e.g. 2ms.", type=ShortTime(), shown="0ms"
        ),
    ] = 0.0
    rate: Annotated[
        float | None, Option("Requests per second to plan for.", type=POSITIVE, shown="that of --traffic")
    ] = None
    profile_price: Annotated[
        float | None,
        Option(
            "Price of an optimization profile, in engine seconds per day.",
            type=click.FloatRange(0),
            shown="computed from its build time and its share of the memory",
        ),
    ] = None
    shrink: Annotated[bool, Option("Shrink the largest bucket to the largest size in the traffic.")] = False
    engine: Annotated[str | None, Option("Time the engine of this version.", metavar="REF", shown="the fp32 graph")] = (
        None
    )
    latencies: Annotated[
        str | None, Option("Use the recorded latencies of this version; time nothing.", metavar="REF")
    ] = None
    choice: EngineChoice
    seconds: Annotated[float, Option("Seconds to time each size.", type=click.FloatRange(0, 3600, min_open=True))] = 0.3
    out: Annotated[Path | None, Option("Also draw a picture (.svg) into this file.", type=SVG)] = None
    write: Annotated[bool, Option("Write the buckets into SPEC; the rest of the file is unchanged.")] = False


@command()
@spec_argument
@takes(_BucketsOptions)
def buckets(spec: str, options: _BucketsOptions, stated_registry: str | None, quiet: bool, as_json: bool) -> None:
    """Choose the buckets with the lowest cost for recorded traffic, and print the saving.

    The cost of a request is the engine time of its padded batch, plus its share of the price of the profiles. Engine
    times are measured at candidate sizes. For one dim, the choice is optimal. For several dims, a heuristic combines
    the buckets of each dim.
    """
    from pipeline.canary.engines import choose
    from pipeline.traffic.buckets import advise_buckets, write_buckets
    from pipeline.traffic.place import BucketOptions, read_place, split_beyond
    from pipeline.traffic.summary import count_sizes, draw_choice

    reference, out_path = options.engine or options.latencies, options.out
    if options.engine and options.latencies:
        raise InputError("give --engine to time it, or --latencies to use the recorded times")
    bucket_options = BucketOptions(
        options.dims,
        options.most,
        options.batch,
        options.wait,
        options.rate,
        options.profile_price,
        options.shrink,
        options.seconds,
    )
    with opened_run(spec, stated_registry, quiet) as run:
        model_spec, engine_choice = run.spec, None
        if options.write and model_spec.is_copy:
            raise InputError(f"{model_spec.address} is a copy; give --write the spec's own file")
        recorded_traffic = read_place(options.traffic, model_spec.tensors(), model_spec.model)
        split = split_beyond(recorded_traffic.trace, model_spec.named_dims())
        if reference is not None:
            target, precision = target_named(options.choice.target), options.choice.precision
            engine_choice = choose(run.context.store, parse_reference(reference), target, precision)
            if (owner := engine_choice.manifest.model) != model_spec.model:
                raise InputError(f"{reference} is an engine of {owner}, but SPEC is of {model_spec.model}")
        is_recorded = bool(options.latencies)
        advice = advise_buckets(run, recorded_traffic, split, bucket_options, engine_choice, recorded=is_recorded)
    if out_path is not None:
        sizes = {dim: count_sizes(split.within.sizes[dim]) for dim in advice.choice.edges}
        write_whole(out_path, draw_choice(sizes, advice.choice.plans).encode())
        say(f"wrote {out_path}")
    if options.write:
        write_buckets(model_spec.path, advice.choice.edges)
        say(f"wrote the buckets into {model_spec.path}")
    if as_json:
        outlier_fields = {"beyond": encode(split.beyond), "fallback_share": split.fallback_share}
        emit_json({**encode(advice), "buckets": encode(advice.choice.edges), **outlier_fields})
    else:
        _print_advice(advice, split)


def _print_advice(advice: "BucketAdvice", split: "SplitTrace") -> None:
    from pipeline.traffic.summary import PLAN_COLUMNS, describe_choice, plan_rows

    for line in describe_choice(advice.choice, split):
        echo(line)
    print_table(PLAN_COLUMNS, plan_rows(advice.choice.plans))
    echo(f"engine times: {advice.engine}, measured at {advice.choice.timed} sizes; 95 % intervals")
    echo(
        f"price of a profile: {format_plain(advice.price.seconds_a_day)} engine seconds per day ({advice.price.words})"
    )
    for remark in advice.remarks:
        echo(remark)


_COLUMNS = ("engine", "machine", "requests/s", "batch", "wait", "busy", "machines", "cost per million")


@dataclass(frozen=True)
class _CapacityOptions:
    rate: Annotated[
        float, Option("Requests per second of the whole fleet.", type=click.FloatRange(0, 1e9, min_open=True))
    ]
    p99: Annotated[float, Option("Limit of the p99 latency, e.g. 50ms.", type=ShortTime(above=True))]
    prices: Annotated[Path | None, Option("Prices of machines (YAML).", shown="no costs")] = None
    fleet: Annotated[
        Path | None,
        Option("Inventory, as for `enginesmith fleet --inventory`; its machine counts replace those in --prices."),
    ] = None
    traffic: Annotated[
        Path | None,
        Option("Recorded requests: gives their sizes, and their arrivals, scaled to --rate.", shown="Poisson arrivals"),
    ] = None
    at: Annotated[
        str | None,
        Option("Input sizes of the requests, e.g. length=64.", metavar="NAME=SIZE,...", shown="opt sizes of the spec"),
    ] = None
    batch: Annotated[
        int | None, Option("Maximum number of samples per batch.", type=COUNT, shown="the best timed batch")
    ] = None
    wait: Annotated[
        float | None,
        Option(
            "Longest time that a request waits for others to join its batch, e.g. 2ms.",
            type=ShortTime(),
            shown="the best of 0, 5, 12.5, 25 and 50 % of --p99",
        ),
    ] = None
    headroom: Annotated[
        float, Option("Share of each machine's capacity to leave free, e.g. 20%.", type=percent, shown="0%")
    ] = 0.0
    spare: Annotated[
        int,
        Option("Number of machines that may fail while the rest still serves the rate.", type=click.IntRange(0, 100)),
    ] = 1
    batch_overhead: Annotated[
        float | None, Option("Time that your server adds to each batch.", type=ShortTime(), shown="not counted")
    ] = None
    request_overhead: Annotated[
        float | None, Option("Time that your server adds to each request.", type=ShortTime(), shown="not counted")
    ] = None
    precision: Annotated[str | None, precision_option("all")] = None
    out: Annotated[
        Path | None, Option("With --prices: draw cost against p99 limit into this file (.svg).", type=SVG)
    ] = None


@command()
@reference_argument
@takes(_CapacityOptions)
@click.pass_context
def capacity(
    ctx: click.Context, /, reference: str, options: _CapacityOptions, registry: str, quiet: bool, as_json: bool
) -> None:
    """Show how many machines of each kind serve REF at a request rate and p99 limit, their cost, and the cheapest mix.

    The command simulates a batcher with the recorded latencies of each engine on each kind of machine. It has no
    figures for an engine without recorded latencies. Exit code 1 if no engine meets the limit, or if there are too few
    machines for the rate.
    """
    from pipeline.capacity.forecast import CapacityTerms, ServerOverhead, ServingTerms, prepare
    from validation.capacity.greatest_rate import LatencyLimit, cost_svg
    from validation.capacity.machines import CapacityDemand

    out_path, overheads = options.out, (options.batch_overhead, options.request_overhead)
    if out_path and not options.prices:
        raise click.UsageError("the picture shows costs; give --prices")
    server = None if overheads == (None, None) else ServerOverhead(overheads[0] or 0.0, overheads[1] or 0.0)
    terms = CapacityTerms(
        CapacityDemand(options.rate, options.headroom, options.spare),
        LatencyLimit(options.p99),
        ServingTerms(options.batch, options.wait, server),
        options.prices,
        options.fleet,
        options.traffic,
        options.at,
        options.precision,
    )
    store = open_store(registry)
    forecaster = prepare(store, trusted_manifest(store, reference), terms, str if quiet else say)
    forecast = forecaster.forecast()
    if out_path:
        write_whole(out_path, cost_svg(forecaster.cost_curves(forecast), options.p99, forecast.currency).encode())
        say(f"picture: {out_path}")
    emit(as_json, encode(forecast), print_forecast, forecast)
    ctx.exit(0 if any(row.greatest for row in forecast.engines) and not forecast.why_no_mix else 1)


def print_forecast(forecast: "CapacityForecast") -> None:
    """Print the engines that were timed, those that were not, and the cheapest mix."""
    demand = forecast.demand
    free_text = f", {100 * demand.headroom:g} % of each machine free" if demand.headroom else ""
    spare_text = f", {demand.spare} machine{'s' if demand.spare > 1 else ''} lost" if demand.spare else ""
    limit_text = f"p99 within {1e3 * forecast.limit.seconds:g} ms"
    echo(f"{forecast.reference}: {demand.rate:,.12g} requests per second, {limit_text}{free_text}{spare_text}")
    echo(forecast.arrivals)
    rated_rows = [row for row in forecast.engines if row.greatest]
    if rated_rows:
        print_table(_COLUMNS, [_row(row, forecast.currency) for row in rated_rows])
    if any(row.busy for row in rated_rows):
        say("remark: engines marked * were timed on a busy machine; a machine without other load may be faster")
    if any(row.server is None for row in rated_rows):
        say(
            "remark: the overhead of your server is not counted; measure it, and pass --batch-overhead and"
            " --request-overhead"
        )
    if untimed_rows := [row for row in forecast.engines if not row.greatest]:
        print_table(("engine", "machine", "why not"), [[row.unit, row.machine, row.reason] for row in untimed_rows])
    if (mix := forecast.mix) and (price := forecast.mix_per_million) and forecast.mix_units is not None:
        cost_text = _cost(price.value, price.low, price.high, forecast.currency)
        mix_text = ", ".join(f"{count} {name} ({forecast.mix_units[name]})" for name, count in mix.machines.items())
        rate_text = f"{format_plain(mix.per_hour)} {forecast.currency} per hour"
        echo(f"cheapest mix: {mix_text}: {rate_text}, {cost_text} per million requests")
    elif forecast.why_no_mix:
        echo(f"no mix: {forecast.why_no_mix}")


def _row(row: "EngineCapacity", currency: str) -> Sequence[str]:
    greatest_rate, machines, cost = row.greatest, row.machines, row.per_million
    if greatest_rate is None or machines is None:
        return ()
    rate, policy = greatest_rate.rate, greatest_rate.policy
    high = "?" if machines.high is None else machines.high
    return (
        row.unit + (" *" if row.busy else ""),
        row.machine,
        f"{format_plain(rate.value)} ({format_plain(rate.low)} to {format_plain(rate.high)})",
        f"{greatest_rate.batch:.1f} of {policy.most}",
        f"{format_plain(1e3 * policy.wait_s)} ms",
        f"{100 * greatest_rate.utilization:.0f} %",
        f"{machines.value} ({machines.low} to {high})",
        _cost(cost.value, cost.low, cost.high, currency) if cost else "no price",
    )


def _cost(value: float, low: float, high: float | None, currency: str) -> str:
    high_text = "?" if high is None else format_plain(high)
    return f"{format_plain(value)} ({format_plain(low)} to {high_text}) {currency}".rstrip()


@command()
@click.argument("place", metavar="TRAFFIC", type=click.Path(path_type=Path))
@click.option(
    "--model",
    metavar="SPEC|REF",
    show_default="the model that TRAFFIC names",
    help="Recorded model: its spec (a .yaml file or registered:MODEL) or a version (REF).",
)
@click.option("--out", type=SVG, help="Also draw a picture (.svg) into this file.")
def traffic(place: Path, model: str | None, registry: str, out: Path | None, as_json: bool) -> None:
    """Show the input sizes, rates and bursts of recorded requests.

    Histograms show the sizes of each dynamic dim; a table shows them by hour.

    TRAFFIC: a file that `enginesmith traffic record` or enginesmith.Recorder wrote (.jsonl, .npz), or a folder of such
    files.
    """
    from pipeline.traffic.place import read_place
    from pipeline.traffic.summary import summarize

    spec = _model_of(place, model, registry)
    recorded_traffic = read_place(place, spec.tensors(), spec.model)
    dims = spec.named_dims()
    summary = summarize(recorded_traffic, dims)
    edges = {dim.name: [high for _, _, high in dim.buckets()] for dim in dims}
    for file in recorded_traffic.cut:
        say(f"{file}: its last line is half written and was left out")
    if out is not None:
        from pipeline.traffic.summary import draw_traffic

        write_whole(out, draw_traffic(summary, edges).encode())
        say(f"wrote {out}")
    if as_json:
        histograms = {dim: dict(counts.counts) for dim, counts in summary.dims.items()}
        emit_json({"model": spec.model, "histograms": histograms, **encode(summary)})
    else:
        _print_summary(summary, edges)


def _model_of(place: Path, spec_address: str | None, registry: str) -> "ModelSpec":
    """The spec that defines the inputs: of a spec, of a version, or of the model of `place`. Raises InputError."""
    from pipeline.intake.registration import spec_at
    from pipeline.operations.validate import spec_of
    from pipeline.traffic.place import model_of_place

    if spec_address and (spec_address.startswith("registered:") or spec_address.endswith((".yaml", ".yml"))):
        with spec_at(spec_address, registry) as spec_file:
            return spec_file.load()
    reference = spec_address or model_of_place(place)
    if not reference:
        raise InputError(f"{place} does not name the model of the requests; give --model SPEC or --model REF")
    return spec_of(trusted_manifest(open_store(registry), reference))


def _print_summary(summary: "TrafficSummary", edges: dict[str, list[int]]) -> None:
    from pipeline.traffic.summary import DIM_COLUMNS, describe_traffic, dim_rows, histogram_rows, hour_table

    for line in describe_traffic(summary):
        echo(line)
    print_table(DIM_COLUMNS, dim_rows(summary))
    for dim, counts in summary.dims.items():
        if len(counts.counts) > 1:
            echo()
            print_table((dim, "requests", "share", ""), histogram_rows(counts, edges[dim]))
    if len(summary.hours) > 1:
        echo()
        print_table(*hour_table(summary))
