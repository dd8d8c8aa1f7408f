"""`enginesmith build` and `plan`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from enginesmith.cli.options import (
    Jobs,
    Option,
    Selection,
    command,
    emit,
    emit_json,
    log_format,
    optional_spec_argument,
    say,
    takes,
)
from enginesmith.cli.tables import STYLES, echo, print_engines, print_table
from enginesmith.core.codec import encode
from enginesmith.core.errors import IntegrityError
from enginesmith.core.names import parse_reference
from enginesmith.core.parsing import user
from enginesmith.core.state import ENSEMBLE
from enginesmith.core.text import format_metrics
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from enginesmith.registry.trust.signing import SigningKey, check_signer
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.policies import losses_of_build
from enginesmith.registry.versions.publish import add_signatures
from pipeline.cli.models.init import MODELS, draft_spec
from pipeline.cli.run_options import Building, run_options, shown_progress

if TYPE_CHECKING:
    from enginesmith.registry.manifest import EngineEntry
    from pipeline.compile.ensembles.assembly import EnsembleForecast
    from pipeline.compile.forecast import Forecast
    from pipeline.orchestration.run import RunOptions
    from pipeline.outcome import Outcome


# Rules of a proposal that are printed.
MOST_RULES = 24


@dataclass(frozen=True, kw_only=True)
class _Specs:
    """The options that `plan` and `build` share."""

    place: Annotated[
        str | None,
        Option(
            "Instead of SPEC: every spec in this folder or bucket prefix; registered: the newest registered spec of "
            "each model.",
            name="--all",
            metavar="LOCATION",
        ),
    ] = None
    selection: Selection
    jobs: Jobs = None


@dataclass(frozen=True, kw_only=True)
class _BuildOptions:
    specs: _Specs
    building: Building
    runner: Annotated[
        Literal["auto", "inprocess", "prefect"],
        Option(
            "Run the steps in this process, or as a Prefect flow; auto: prefect if PREFECT_API_URL is set, else "
            "inprocess."
        ),
    ] = "auto"
    sign_key: Annotated[
        Path | None,
        Option(
            "Sign the version with this private EC key (PEM file).", envvar="ENGINESMITH_SIGNING_KEY", show_envvar=True
        ),
    ] = None


def check_source(spec: str | None, place: str | None) -> None:
    """Raise click's usage error unless there is either a spec or a place with specs."""
    if (spec is None) == (place is None):
        raise click.UsageError("give SPEC or --all LOCATION")


@command()
@optional_spec_argument
@takes(_BuildOptions, "chosen")
@click.pass_context
def build(
    ctx: click.Context,
    /,
    spec: str | None,
    chosen: _BuildOptions,
    stated_registry: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Export, quantize, build, prove and publish the engines of SPEC.

    If SPEC is a model file (.onnx, .pt2, Triton's config.pbtxt) without a spec beside it, build first writes a spec for
    --target there. With --target, --precision or --backend, the version has only these engines, and no channel moves to
    it. With --all, a spec that fails does not stop the others. Exit code 1 if a unit failed.
    """
    from pipeline.intake.registration import registry_of

    specs, sign_key, runner = chosen.specs, chosen.sign_key, chosen.runner
    check_source(spec, specs.place)
    options = run_options(stated_registry, specs.selection, specs.jobs, chosen.building)
    if spec is None:
        if sign_key or runner == "prefect":
            raise click.UsageError("--all builds in this process: leave out --sign-key and --runner prefect")
        ctx.exit(build_all(specs.place or "", options, quiet, as_json))
    if Path(spec).suffix.lower() in MODELS:
        path, is_new = draft_spec(Path(spec), specs.selection.targets)
        say(f"{'wrote' if is_new else 'spec:'} {path}")
        # A new one names the targets itself: the run is of all of it.
        spec, options = str(path), replace(options, targets=None if is_new else options.targets)
    if sign_key:
        check_signer(SigningKey(sign_key))  # before hours of work end with it
    outcome = _compile(spec, options, runner, quiet)
    if sign_key and outcome.version is not None:
        outcome = _sign(outcome, sign_key, registry_of(spec, options.registry))
    emit(as_json, outcome.to_json(), show_outcome, outcome)
    ctx.exit(1 if outcome.failed or outcome.version is None else 0)


def _sign(outcome: "Outcome", sign_key: Path, registry: str) -> "Outcome":
    """Sign the published version, and try again to move its channel if that did not move: its policy may require the
    signature. Raises IntegrityError when the registry holds another manifest."""
    store, name = open_store(registry), f"{outcome.model}@{outcome.version}"
    manifest = locate(store, parse_reference(name)).manifest
    if manifest.digest != outcome.manifest:
        problem = f"{name} was published as manifest {outcome.manifest}, but is now {manifest.digest}; not signed"
        raise IntegrityError(problem)
    for signature in add_signatures(store, manifest, SigningKey(sign_key)):
        say(str(signature))
    if outcome.channel is None or outcome.channel_refusal is None:
        return outcome
    accepted_losses = losses_of_build(outcome.channel)
    refusal = channels.policy_refusal(store, manifest, outcome.channel, accepted_losses=accepted_losses)
    if refusal is None:
        reason = "built and signed"
        channels.promote(store, manifest, outcome.channel, by=user(), why=reason, accepted_losses=accepted_losses)
    return replace(outcome, channel_refusal=refusal)


def _compile(spec: str, options: "RunOptions", runner: str, quiet: bool) -> "Outcome":
    """Run the steps, here or as a Prefect flow."""
    from pipeline.compile.composition import InProcess
    from pipeline.intake.registration import registry_of
    from pipeline.orchestration.catalog import compile_any
    from pipeline.orchestration.run import compile_from_records

    with_prefect = runner == "prefect" or (runner == "auto" and bool(os.environ.get("PREFECT_API_URL")))
    if with_prefect and log_format() == "json":
        raise click.UsageError("a Prefect flow has a log of its own: use --runner inprocess for --log-format json")
    starts_services = with_prefect or options.executor == "ray"
    if starts_services and (outcome := compile_from_records(spec, options)):
        say("all results are in the registry: nothing was started")
        if with_prefect:
            _send_if_unsent(outcome, registry_of(spec, options.registry))
        return outcome
    if with_prefect:
        from pipeline.orchestration.flows.compile_model import run_flow

        return run_flow(spec, options, quiet)
    with shown_progress(quiet) as display:
        return compile_any(spec, options, InProcess(), display).outcome


def _send_if_unsent(outcome: "Outcome", registry: str) -> None:
    """Send the event of the version to a configured server, if the run that published it has not sent it."""
    from pipeline.orchestration.gpu_workers import PUBLISHED, was_sent

    store = open_store(registry)
    if outcome.manifest is None or was_sent(store, PUBLISHED, outcome.manifest):
        return
    from pipeline.orchestration.flows.compile_model import send_published
    from pipeline.orchestration.run import Compiled

    send_published(Compiled(outcome, store))


def show_outcome(outcome: "Outcome") -> None:
    """Print the table of engines, the task metrics of each graph they are built from, and where everything lies."""
    from pipeline.compile.publication.publish import HINTS

    for graph in outcome.graphs.values():
        show_outcome(graph)
    outcome = replace(outcome, graphs={})
    engines = []
    for engine in outcome.engines:
        reason = "; ".join(filter(None, (engine.entry.reason, _limited_to(engine.entry))))
        engines.append((replace(engine.entry, size_bytes=engine.size_bytes, reason=reason), engine.metrics))
    print_engines(engines, f"{outcome.model}" + (f"@{outcome.version}" if outcome.version else ""))
    for engine in outcome.failed:
        say(f"failed: {engine.entry.unit}: {engine.entry.reason}")
        if engine.failure:
            say(f"  reproduce: {engine.failure.command}")
            say("\n".join(f"  | {line}" for line in engine.failure.log.splitlines()[-15:]))
        for attribution in engine.attributed:
            say(f"  which node ({attribution.stage}): {attribution.headline}")
    _show_proposals(outcome)
    unit_notes = {note for engine in outcome.failed for note in engine.entry.notes}
    for hint in (hint for hint in HINTS if hint in unit_notes):
        say(f"note: {hint}")
    for engine in outcome.engines:
        for free_run in (free_run for free_run in engine.free_running if free_run.stage != "export"):
            echo(f"{engine.entry.unit} free running, {free_run.stage}, {free_run.output}: {free_run.text}")
    for name, metrics in () if outcome.cached else outcome.metrics.items():
        echo(f"{name} graph: " + format_metrics(metrics))
    _show_place(outcome)


def _show_proposals(outcome: "Outcome") -> None:
    """Print the repair of each failed graph, once, ready to paste into the spec; for many rules only where they are:
    such a graph is better built in another precision."""
    snippets = {
        attribution.name: attribution.snippet
        for engine in outcome.failed
        for attribution in engine.attributed
        if attribution.snippet
    }
    for name, snippet in snippets.items():
        rule_count = snippet.count("match:")
        if rule_count > MOST_RULES:
            say(f"{name} passes only with {rule_count} nodes left in float; the report has the rules")
            continue
        say(f"{name} passes if you replace quantization.overrides in the spec by:")
        echo(snippet)


def _show_place(outcome: "Outcome") -> None:
    """Print the version, its channel, and where the report lies."""
    if outcome.version is None:
        reason = f"graph {outcome.lacking!r} has no version" if outcome.lacking else "no engine passed"
        say(f"{outcome.model}: nothing was published, because {reason}")
        if outcome.page:
            say(f"report: {outcome.page}")
        return
    state = "unchanged: everything was cached" if outcome.cached else "published"
    is_served = outcome.channel and not (outcome.channel_refusal or outcome.narrowed)
    channel_text = f"; channel {outcome.channel} serves it" if is_served else ""
    # On the same line where nothing is new.
    report_text = f"{'; ' if outcome.cached else chr(10)}report: {outcome.page}" if outcome.page else ""
    if outcome.same_as:
        unchanged_text = (
            f"engines and proofs are equal to those of {outcome.same_as}: nothing was published, no channel was moved"
        )
        echo(f"{unchanged_text}{report_text}")
    else:
        echo(f"{outcome.model}@{outcome.version} {state}{channel_text}{report_text}")
    if outcome.channel_refusal:
        say(f"channel {outcome.channel} did not move: {outcome.channel_refusal}")
    if outcome.channel and outcome.narrowed:
        say(
            f"channel {outcome.channel} did not move: this run built only {outcome.narrowed}, not the whole spec; to "
            f"move it, run `enginesmith promote {outcome.model}@{outcome.version} {outcome.model}:{outcome.channel}`, "
            "with --accept-loss if nodes lose a target or a precision"
        )


def _limited_to(entry: "EngineEntry") -> str:
    """'opens in TensorRT for RTX only', of an engine for GPUs that one runtime alone opens; else ''."""
    from builders.backends.discovery import capabilities_of

    if not entry.usable or entry.hardware.is_cpu or entry.backend == ENSEMBLE:
        return ""
    opened_by = capabilities_of(entry.backend).opened_by
    return f"opens in {opened_by[0]} only" if len(opened_by) == 1 else ""


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    specs: _Specs
    executor: Annotated[
        Literal["local", "ray"],
        Option("Where builds would run: on this machine, or on a Ray cluster; the GPUs there limit the backends."),
    ] = "local"
    no_export: Annotated[bool, Option("Use only results in the registry; run nothing and write nothing.")] = False


@command()
@optional_spec_argument
@takes(_PlanOptions, "chosen")
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    spec: str | None,
    chosen: _PlanOptions,
    stated_registry: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """List what `build` would do for each unit of SPEC, and why. A unit is one engine: target, precision, backend.

    To know which engines exist already, plan first exports, calibrates and quantizes the model, unless these results
    are in the registry. With --no-export, units whose graph is not in the registry are 'unknown'. With --all, plan runs
    nothing. Exit code 1 if a unit has failed, or if all units are refused.
    """
    from pipeline.orchestration.catalog import foresee_spec

    specs = chosen.specs
    check_source(spec, specs.place)
    options = run_options(stated_registry, specs.selection, specs.jobs, Building(chosen.executor))
    if spec is None:
        if chosen.executor == "ray":
            raise click.UsageError("--all runs nothing and asks no cluster: leave out --executor ray")
        ctx.exit(plan_all(specs.place or "", options, as_json))
    with shown_progress(quiet) as progress:
        forecast = foresee_spec(spec, options, progress, chosen.no_export, lambda text: None if quiet else say(text))
    emit(as_json, forecast.to_json(), _print_plan, forecast)
    counts = forecast.counts
    if count := counts["unknown"]:
        verb = "is" if count == 1 else "are"
        say(f"{count} of {counts.total()} units {verb} unknown; to export them first, leave out --no-export")
    ctx.exit(int(is_stuck(counts)))


def _print_plan(forecast: "Forecast | EnsembleForecast") -> None:
    from pipeline.compile.forecast import Forecast

    if isinstance(forecast, Forecast):
        rows = [
            [
                *(unit.candidate.target.name, unit.candidate.precision, unit.candidate.backend.name, unit.action),
                *(unit.built_at, unit.candidate.opens_in),
                unit.reason + f"; {unit.candidate.absence}" * (unit.candidate.absence not in unit.reason),
            ]
            for unit in forecast.units
        ]
        _print_units(forecast.model, rows)
        for change in forecast.changes:
            echo(f"since the last build: {change}")
        return
    for graph in forecast.graphs.values():
        _print_plan(graph)
    ensemble_units = [
        [unit.target, unit.precision, "ensemble", unit.action, "", "enginesmith only", unit.reason]
        for unit in forecast.units
    ]
    _print_units(forecast.model, ensemble_units)


def _print_units(model: str, rows: list[list[str]]) -> None:
    counts = {action: sum(row[3] == action for row in rows) for action in (*_SHOWN, "failed", "unknown")}
    count_texts = [f"{count} {action}" for action, count in counts.items() if count or action in _SHOWN]
    header = ("target", "precision", "backend", "action", "built", "opens in", "why")
    print_table(header, rows, title=f"{model}: {', '.join(count_texts)}", styles=STYLES)


# Actions that are counted in the title, also where there is none.
_SHOWN = ("build", "cached", "refused")


def build_all(place: str, options: "RunOptions", quiet: bool, as_json: bool) -> int:
    """Build every spec in `place`, print a row for each, and return the exit code: 1 if a spec or an engine failed.

    place: a folder, a file:// URI, a prefix of a bucket, or 'registered': the newest spec of each model in the
    registry.
    """
    from pipeline.compile.composition import InProcess
    from pipeline.orchestration.catalog import compile_all, gather_specs, words
    from pipeline.orchestration.run import start_executors

    options = replace(options, registry=options.registry or DEFAULT_REGISTRY)
    with (
        gather_specs(place, options.registry) as addresses,
        shown_progress(quiet) as progress,
        start_executors(options) as executors,
    ):
        rows = compile_all(addresses, options, InProcess(), progress, executors)
    table_rows = [
        [
            *(row.spec, row.model or "", row.state, row.version or ""),
            ", ".join(f"{count} {status}" for status, count in row.engines.items()),
            row.reason,
        ]
        for row in rows
    ]
    columns = ("spec", "model", "state", "version", "engines", "reason")
    emit(as_json, encode(rows), print_table, columns, table_rows)
    if not as_json:
        say(words(rows))
    return 0 if all(row.good for row in rows) else 1


def plan_all(place: str, options: "RunOptions", as_json: bool) -> int:
    """Print for each spec in `place` how many units would be built, as far as that is on record; run nothing.

    Returns the exit code: 1 if a spec cannot be planned, a unit of it has failed, or all of them are refused.
    """
    from pipeline.orchestration.catalog import gather_specs, plan_catalog, summarize

    options = replace(options, registry=options.registry or DEFAULT_REGISTRY)
    with gather_specs(place, options.registry) as addresses:
        rows = plan_catalog(addresses, options)
    if as_json:
        emit_json(encode(rows))
    else:
        table_rows = [
            [
                *(row.spec, row.model or "", ", ".join(f"{count} {action}" for action, count in row.units.items())),
                row.reason or ", ".join(row.missing),
            ]
            for row in rows
            if not row.settled
        ]
        if table_rows:
            print_table(("spec", "model", "units", "missing results, or error"), table_rows)
        say(summarize(rows))
    return int(any(row.reason or is_stuck(row.units) for row in rows))


def is_stuck(counts: Mapping[str, int]) -> bool:
    """Whether a plan has units that have failed, or nothing but refusals. counts: of units by action."""
    return counts.get("failed", 0) > 0 or counts.get("refused", 0) == sum(counts.values()) > 0
