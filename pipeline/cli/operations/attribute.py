"""`debug attribute`, `debug refit` and `traffic record`."""

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from enginesmith.cli.options import (
    COUNT,
    FILE,
    POSITIVE,
    Selection,
    command,
    emit_json,
    number_option,
    path_option,
    precision_option,
    reference_argument,
    say,
    takes,
    targets_option,
)
from enginesmith.cli.tables import echo, print_table
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError, UnavailableError
from enginesmith.core.text import pluralize
from enginesmith.registry.manifest import require_model
from enginesmith.registry.store.base import open_store
from pipeline.cli.run_options import local_context, run_options, shown_progress, target_names, trusted_manifest

if TYPE_CHECKING:
    from enginesmith.registry.manifest import Manifest
    from enginesmith.registry.store.base import Store
    from pipeline.operations.golden import AttributionAnswer
    from pipeline.operations.refit import PublishedRefit, Refit
    from pipeline.orchestration.run import RunOptions


@dataclass(frozen=True)
class _AttributeOptions:
    targets: Annotated[str, targets_option(None)]
    precision: Annotated[str | None, precision_option("all")] = None


@command()
@reference_argument
@takes(_AttributeOptions)
@click.pass_context
def attribute(
    ctx: click.Context, reference: str, options: _AttributeOptions, registry: str, quiet: bool, as_json: bool
) -> None:
    """Find the nodes whose outputs drifted in the graphs and engines of REF, with each node's own and total error.

    The own error of a node arises in the node; the total error at its output includes the errors of earlier nodes. For
    a quantized or cast graph that fails, the command also proposes nodes to leave in float. Exit code 1 if a check
    failed, or if an attribution could not be made.
    """
    from pipeline.operations.golden import attribute_version

    store = open_store(registry)
    manifest = trusted_manifest(store, reference)
    target_set = target_names(manifest, options.targets)
    with local_context(store, quiet) as context:
        answers = list(attribute_version(manifest, target_set, options.precision, context))
    if as_json:
        answers_json = [answer.to_json() for answer in answers]
        emit_json({"model": manifest.model, "version": manifest.version, "attributions": answers_json})
    else:
        for answer in answers:
            _show(answer)
    bad_answers = [
        item for item in answers if item.failed or (item.attribution and item.attribution.finding != "nothing-failed")
    ]
    ctx.exit(1 if bad_answers else 0)


def _show(answer: "AttributionAnswer") -> None:
    from validation.attribution.result import COLUMNS, SHOWN, describe_attribution, format_row

    echo(f"{answer.attributed.name} ({answer.attributed.stage})")
    attribution = answer.attribution
    if attribution is None:
        echo(f"  {'the attribution failed: ' if answer.failed else ''}{answer.attributed.headline}")
        return
    headline, *detail_lines = describe_attribution(attribution)
    echo(f"  {headline}")
    if attribution.rows:
        rows, omitted_count = attribution.rows[:SHOWN], len(attribution.rows) - SHOWN
        print_table(
            COLUMNS,
            [format_row(index, row) for index, row in enumerate(rows)],
            note=f"{omitted_count} more parts have smaller own errors; --json lists them" if omitted_count > 0 else "",
            red=[index for index, row in enumerate(rows) if row.blamed],
        )
    for line in detail_lines:
        echo(f"  {line}")


# Inputs as JSON; the time of arrival in seconds since the epoch and the seconds until the answer, where known.
_Request = tuple[Mapping[str, object], float | None, float | None]


@command()
@click.argument("traffic", type=FILE)
@number_option("--sampling", click.FloatRange(0, 1, min_open=True), 1.0, "Share of the requests to record.")
@number_option("--max-mib", COUNT, 1024, "Maximum size of TRAFFIC, in MiB.")
@path_option("--samples", "Generate traffic from these samples (.npz, .npy).")
@number_option("--per-second", POSITIVE, None, "With --samples: mean number of requests per second.")
@number_option("--requests", COUNT, None, "With --samples: number of requests.", default_text="each sample once")
@number_option("--batch", COUNT, 1, "With --samples: samples per request.")
@number_option("--seed", click.IntRange(0), 0, "Random seed of --sampling, and of the arrivals with --samples.")
@click.option("--model", default="", metavar="NAME", help="Name of the model, to store in TRAFFIC.")
def record(
    traffic: Path,
    sampling: float,
    max_mib: int,
    samples: Path | None,
    per_second: float | None,
    requests: int | None,
    batch: int,
    seed: int,
    model: str,
) -> None:
    """Append requests from stdin to the file TRAFFIC, which `canary run` and the other `traffic` commands read.

    stdin has one JSON object per line: {"inputs": {"x": [[0.1, 0.2]]}, "at": 1763640000.5, "latency": 0.01}. `at` is
    the time of arrival (default: when the line is read); `latency` is the time until the answer, in seconds (optional).
    In Python code, use enginesmith.Recorder. With --samples, the command generates traffic instead: the samples arrive
    at random (a Poisson process).
    """
    from enginesmith.recording.recorder import Recorder

    if (samples is None) != (per_second is None):
        raise InputError("--samples and --per-second go together: what to send, and how often")
    if samples and traffic.exists() and traffic.stat().st_size:
        raise InputError(f"{traffic} is not empty, and generated requests begin at time 0; name another file")
    origin, request_stream = "", _from_stdin()
    if samples and per_second:
        from enginesmith.recording.traffic import encode_inputs
        from validation.canary.report import made_up

        origin = f"{samples.name}, Poisson arrivals at {per_second:g} per second, seed {seed}"
        generated_requests = made_up(samples, per_second, requests, batch, seed)
        request_stream = ((encode_inputs(inputs), at_s, None) for at_s, inputs in generated_requests)
    first_requests = [*itertools.islice(request_stream, 1)]  # a mistake in it leaves no file behind
    with Recorder(traffic, sampling=sampling, max_bytes=max_mib << 20, seed=seed, made=origin, model=model) as recorder:
        try:
            for inputs, at_s, latency in itertools.chain(first_requests, request_stream):
                if not recorder.append_json(inputs, at_s, latency=latency) and recorder.full:
                    break
        finally:
            say(
                f"{traffic}: {pluralize(recorder.kept, 'request')} recorded"
                + (f", {recorder.lost} lost" if recorder.lost else "")
            )
        if recorder.failure:
            kind, _, reason = recorder.failure.partition(": ")
            raise UnavailableError(reason) if kind == UnavailableError.__name__ else InputError(recorder.failure)
        if recorder.full:
            raise InputError(f"{traffic} is full at {max_mib} MiB; raise --max-mib")


def _from_stdin() -> Iterator[_Request]:
    """The requests of stdin. Raises DataError that names the line."""
    from enginesmith.recording.json_lines import JsonLinesReader, number_in

    reader = JsonLinesReader(Path("/dev/stdin"), 64 << 20)
    for number, line_record in reader.of(sys.stdin.buffer):
        inputs = line_record.get("inputs")
        if not isinstance(inputs, dict):
            raise reader.error(number, "inputs is missing, or not an object")
        try:
            at_s = number_in(line_record, "at") if "at" in line_record else None
            latency = number_in(line_record, "latency", above=0.0) if "latency" in line_record else None
        except ValueError as error:
            raise reader.error(number, str(error)) from None
        yield inputs, at_s, latency


@command()
@reference_argument
@click.option(
    "--weights-from",
    "weights",
    required=True,
    metavar="SPEC|REF",
    help="Source of the new weights: a spec, which the command exports and quantizes, or a version (REF).",
)
@takes(Selection, "selection")
@click.option("--dry-run", is_flag=True, help="List the engines that could be refitted; do nothing.")
@click.pass_context
def refit(
    ctx: click.Context,
    /,
    reference: str,
    weights: str,
    selection: Selection,
    dry_run: bool,
    registry: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Give the engines of REF new weights without building them, prove them, and publish a version.

    Engines can be refitted if they were built with backends.tensorrt.refittable or strip_weights, and if the models
    differ only in their weights. If --weights-from is a spec, engines that cannot be refitted are built; if it is a
    version, nothing is built. Exit code 1 if nothing was refitted, or if a unit failed.
    """
    store = open_store(registry)
    base = trusted_manifest(store, reference)
    require_model(base)
    if Path(weights).suffix in (".yaml", ".yml"):
        options = run_options(registry, selection, jobs=None)
        refits, edition = _refit_with_spec(base, Path(weights), options, quiet, dry_run)
    else:
        refits, edition = _refit_with_version(base, trusted_manifest(store, weights), store, quiet, dry_run)
    if as_json:
        units = [unit_refit.to_json() for unit_refit in refits]
        emit_json({"from": base.reference, "units": units, **(encode(edition) if edition else {})})
    else:
        _show_refit(refits, edition, dry_run)
    if not dry_run:
        ctx.exit(0 if any(unit_refit.engine for unit_refit in refits) and not (edition and edition.failed) else 1)


def _refit_with_spec(
    base: "Manifest", spec: Path, options: "RunOptions", quiet: bool, dry_run: bool
) -> tuple[list["Refit"], "PublishedRefit | None"]:
    from pipeline.compile.composition import compile_model
    from pipeline.operations.refit import PublishedRefit, foresee_refits, refit_units
    from pipeline.orchestration.run import build_lock, lock_names, open_run

    with shown_progress(quiet) as progress, open_run(spec, options, progress, keep_state=not dry_run) as run:
        batches = run.prepare()
        requests = [unit.request for batch in batches for unit in batch.plan.wanted]
        if dry_run:
            return foresee_refits(requests, base), None
        refits = refit_units(requests, base, run)
        if not any(unit_refit.engine for unit_refit in refits):
            return refits, None
        with build_lock(run, lock_names(run, options)):
            outcome = compile_model(run)
    return refits, PublishedRefit.of(outcome)


def _refit_with_version(
    base: "Manifest", donor: "Manifest", store: "Store", quiet: bool, dry_run: bool
) -> tuple[list["Refit"], "PublishedRefit | None"]:
    from pipeline.compile.run_context import Work
    from pipeline.operations.refit import PublishedRefit, foresee_refits, publish_refitted, refit_units, wanted_of
    from pipeline.operations.validate import spec_of

    refit_items, refusals = wanted_of(base, donor)
    requests = [item.request for item in refit_items]
    if dry_run:
        return [*foresee_refits(requests, base), *refusals], None
    with local_context(store, quiet) as context:
        refits = refit_units(requests, base, Work(spec_of(donor), context))
        done_items = [item for result, item in zip(refits, refit_items, strict=True) if result.engine]
        if not done_items:
            return [*refits, *refusals], None
        edition = publish_refitted(base, donor, done_items, context)
    units = {item.request.unit for item in done_items}
    failed_units = tuple(entry.unit for entry in edition.manifest.engines if entry.unit in units and not entry.usable)
    return [*refits, *refusals], PublishedRefit(donor.model, edition.version, edition.channel_refusal, failed_units)


def _show_refit(refits: "list[Refit]", result: "PublishedRefit | None", dry_run: bool) -> None:
    done_text = "can be, if the models differ in their weights alone" if dry_run else "refitted"
    rows = [
        (unit_refit.request.unit, done_text if not unit_refit.reason else "no", unit_refit.reason)
        for unit_refit in refits
    ]
    print_table(("unit", "refitted", "why not"), rows)
    if result and result.version:
        echo(f"{result.model}@{result.version} published")
    elif not dry_run:
        echo("nothing was refitted and nothing published; run `enginesmith build` to compile")
    if result and result.channel_refusal:
        echo(f"the channel did not move: {result.channel_refusal}", err=True)
