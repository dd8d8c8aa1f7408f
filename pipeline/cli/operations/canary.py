"""`enginesmith canary`: compare a candidate with the version in service, on replayed traffic or on observations."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.options import (
    combine,
    emit_json,
    engine_options,
    json_option,
    number_option,
    path_option,
    registry_option,
    say,
)
from enginesmith.cli.tables import echo
from enginesmith.core.codec import encode
from enginesmith.core.parsing import user

if TYPE_CHECKING:
    from pipeline.canary.verdicts import WrittenReport
    from validation.canary.judging.criteria import Thresholds


# What both commands do with a verdict, as `_finish` takes it.
_act_options = combine(
    json_option,
    registry_option,
    click.option(
        "--attach",
        is_flag=True,
        help="Keep the verdict in the registry, beside the version: promotion without a person counts it.",
    ),
    click.option(
        "--channel",
        metavar="CHANNEL",
        default="stable",
        show_default=True,
        help="Channel of the candidate's model for --auto.",
    ),
    click.option("--auto", is_flag=True, help="On FAIL, roll --channel back if it serves the candidate."),
)


@click.group()
def canary() -> None:
    """Compare a candidate with the version in service: PASS, FAIL or INSUFFICIENT. Exit code 0 for PASS, else 1."""


@canary.command()
@click.option("--candidate", required=True, metavar="REF", help="Version to be served next.")
@click.option("--baseline", required=True, metavar="REF", help="Version that is served now.")
@engine_options
@click.option(
    "--traffic", required=True, type=click.Path(path_type=Path), help="File of recorded requests, .jsonl or .npz."
)
@number_option(
    "--duration",
    click.FloatRange(0, min_open=True),
    None,
    "Seconds to replay; traffic that is shorter is repeated.",
    shown="the traffic once",
)
@number_option("--scale", click.FloatRange(0, min_open=True), 1.0, "Factor on the recorded request rate.")
@number_option(
    "--in-flight",
    click.IntRange(1, 32),
    None,
    "Requests that an engine may have at once; 1 sends one after the other, to both engines in turns.",
    shown="as the record shows",
)
@path_option("--observed", "Observation log of production, which shows how many requests were in flight.")
@number_option("--seed", click.IntRange(0), 0, "Seed of the order of requests and of the bootstrap.")
@number_option(
    "--looks", click.IntRange(1, 20), 4, "How many times to judge, at most; a clear verdict ends the replay early."
)
@number_option("--warmup", click.IntRange(0), 20, "Requests at the start that are not judged.")
@path_option("--out", "Folder for observations, report and page.", shown="canary-CANDIDATE-against-BASELINE")
@_act_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    candidate: str,
    baseline: str,
    target: str,
    precision: str | None,
    traffic: Path,
    duration: float | None,
    scale: float,
    in_flight: int | None,
    observed: Path | None,
    seed: int,
    looks: int,
    warmup: int,
    out: Path | None,
    registry: str,
    **after: Any,
) -> None:
    """Replay recorded traffic against both engines at its recorded times, in turns, and judge the observations."""
    from enginesmith.core.hardware.machine import target_named
    from enginesmith.core.names import parse_reference
    from enginesmith.registry.store.base import open_store
    from pipeline.canary.run import CanaryRun, run_canary
    from validation.canary.replay import ReplayPace

    store = open_store(registry)
    references = parse_reference(candidate), parse_reference(baseline)
    place = out or Path(f"canary-{candidate}-against-{baseline}".replace("@", "-").replace(":", "-"))
    pace = ReplayPace(scale, duration, seed, warmup, in_flight)
    wanted = CanaryRun(*references, target_named(target), traffic, place, precision, pace, looks, observed)
    try:
        written = run_canary(store, wanted, say)
    except KeyboardInterrupt:
        said = "interrupted before the first request; nothing was observed"
        if (place / "candidate.jsonl").exists():
            previous = f" --previous {place}/report.json" if (place / "report.json").exists() else ""
            said = (
                f"the observations so far are in {place}; judge them with: enginesmith canary judge "
                f"--candidate {place}/candidate.jsonl --baseline {place}/baseline.jsonl{previous}"
            )
        say(said)
        raise
    _finish(ctx, written, registry, **after)


@canary.command()
@click.option(
    "--candidate", required=True, type=click.Path(path_type=Path), help="File of the candidate's observations, JSONL."
)
@click.option(
    "--baseline", required=True, type=click.Path(path_type=Path), help="File of the baseline's observations, JSONL."
)
@path_option("--spec", "Spec whose thresholds are used.")
@number_option(
    "--planned", click.IntRange(1), None, "Number of requests at the last look.", shown="this look is the only one"
)
@path_option("--previous", "The report.json of the look before this one.")
@click.option(
    "--missing",
    type=click.Choice(["failed", "ignored"]),
    default="failed",
    show_default=True,
    help="How a request counts that only one side observed.",
)
@number_option("--seed", click.IntRange(0), 0, "Seed of the bootstrap.")
@path_option("--out", "Folder for report and page.", shown="the folder of --candidate")
@_act_options
@click.pass_context
def judge(
    ctx: click.Context,
    /,
    candidate: Path,
    baseline: Path,
    spec: Path | None,
    planned: int | None,
    previous: Path | None,
    missing: str,
    seed: int,
    out: Path | None,
    registry: str,
    **after: Any,
) -> None:
    """Judge observations that were collected in production, or by an interrupted run.

    Thresholds: those of --spec, else of the candidate's version if the registry has it, else the defaults.
    """
    from pipeline.canary.verdicts import JudgeOptions, judge_files, read_report_file

    limits, source = _thresholds(candidate, spec, registry)
    before = read_report_file(previous) if previous else None
    asked = JudgeOptions(limits, source, planned, before, missing == "ignored", seed)
    _finish(ctx, judge_files(candidate, baseline, asked, out or candidate.parent), registry, **after)


def _thresholds(candidate: Path, spec: Path | None, registry: str) -> "tuple[Thresholds, str]":
    """The thresholds, and where they are from in words: `spec`, else the candidate's version, else the defaults."""
    from enginesmith.core.errors import UnavailableError, UnknownNameError
    from enginesmith.core.names import Reference, check_model, check_version
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.versions.lookup import locate
    from pipeline.canary.verdicts import DEFAULTS, spec_thresholds, thresholds_of
    from validation.canary.judging.criteria import Thresholds
    from validation.canary.observations import read_head

    if spec:
        return spec_thresholds(spec)
    identity = read_head(candidate)
    if not identity.model or not identity.version:
        return Thresholds(), DEFAULTS
    reference = Reference(check_model(identity.model), check_version(identity.version))
    try:
        return thresholds_of(locate(open_store(registry), reference).manifest)
    except (UnavailableError, UnknownNameError):
        return Thresholds(), f"{DEFAULTS}; {reference} is not in {registry}"


def _finish(
    ctx: click.Context,
    /,
    written: "WrittenReport",
    registry: str,
    *,
    auto: bool,
    channel: str,
    attach: bool,
    as_json: bool,
) -> None:
    """Act on the verdict as `_act_options` say, print it, and leave with its exit code."""
    from enginesmith.core.names import check_channel
    from enginesmith.registry.store.base import open_store
    from pipeline.canary.settle import attach as attach_verdict
    from pipeline.canary.verdicts import roll_back
    from validation.canary.judging.criteria import describe_measured

    report, moved = written.report, None
    if attach:
        store = open_store(registry)
        found = attach_verdict(store, report, store.put_bytes(report.to_bytes()))
        say(f"kept in {store.uri}: the verdict on {found.target}")
    if auto and report.verdict == "FAIL":
        moved = roll_back(open_store(registry), report, check_channel(channel), user())
    if as_json:
        files = {"report": str(written.json), "page": str(written.page)}
        emit_json({**encode(report), "files": files, "channel": moved})
    else:
        echo(f"{report.verdict}: {report.reason}")
        for item in report.criteria:
            echo(f"  {item.verdict:<12} {item.name}: {describe_measured(item)}")
        for note in report.notes:
            say(f"note: {note}")
        echo(f"report: {written.json}\npage:   {written.page}")
    if moved:
        say(moved)
    ctx.exit(0 if report.verdict == "PASS" else 1)
