"""`enginesmith canary`: compare a candidate with the version in service, on replayed traffic or on observations."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from enginesmith.cli.options import COUNT, FOLDER, POSITIVE, EngineChoice, Group, Option, emit_json, say, takes
from enginesmith.cli.tables import echo
from enginesmith.core.codec import encode
from enginesmith.core.errors import UnavailableError, UnknownNameError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import STABLE, Reference, check_channel, check_model, check_version, parse_reference
from enginesmith.core.parsing import user
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate

if TYPE_CHECKING:
    from pipeline.canary.verdicts import WrittenReport
    from validation.canary.judging.thresholds import Thresholds


@dataclass(frozen=True)
class _After:
    """Actions after a verdict."""

    attach: Annotated[bool, Option("Store the verdict in the registry, for automatic promotion.")] = False
    auto: Annotated[
        str | None,
        Option(
            "On FAIL, roll back this channel if it serves the candidate; --auto without a name: channel stable.",
            metavar="[CHANNEL]",
            is_flag=False,
            flag_value=STABLE,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    candidate: Annotated[str, Option("Version to judge.", metavar="REF")]
    baseline: Annotated[str, Option("Version that is served now.", metavar="REF")]
    traffic: Annotated[Path, Option("File of recorded requests, .jsonl or .npz.")]
    choice: EngineChoice
    duration: Annotated[
        float | None, Option("Seconds to replay; shorter traffic is repeated.", type=POSITIVE, shown="the traffic once")
    ] = None
    scale: Annotated[float, Option("Factor for the recorded request rate.", type=POSITIVE)] = 1.0
    in_flight: Annotated[
        int | None,
        Option(
            "Maximum number of concurrent requests to an engine; 1: one at a time, alternately to both engines.",
            type=click.IntRange(1, 32),
            shown="from the recorded latencies",
        ),
    ] = None
    observed: Annotated[
        Path | None, Option("Observations of production (JSONL) from which to take the default of --in-flight.")
    ] = None
    looks: Annotated[
        int,
        Option("Maximum number of times to judge; a clear verdict ends the replay early.", type=click.IntRange(1, 20)),
    ] = 4
    warmup: Annotated[int, Option("Number of requests at the start that are not judged.", type=click.IntRange(0))] = 20
    out: Annotated[
        Path | None,
        Option(
            "Folder for observations, report.json and its HTML page.",
            shown="canary-CANDIDATE-against-BASELINE",
            type=FOLDER,
        ),
    ] = None
    after: _After

    def place(self) -> Path:
        """The output folder."""
        name = f"canary-{self.candidate}-against-{self.baseline}".replace("@", "-").replace(":", "-")
        return self.out or Path(name)


@click.group(cls=Group)
def canary() -> None:
    """Compare a candidate with the version in service: PASS, FAIL or INSUFFICIENT. Exit code 0 for PASS, else 1."""


@canary.command()
@takes(_RunOptions)
@click.pass_context
def run(ctx: click.Context, /, options: _RunOptions, registry: str, as_json: bool) -> None:
    """Replay recorded traffic at its recorded times to both engines, alternately, and judge the observations."""
    from pipeline.canary.run import CanaryRun, run_canary
    from validation.canary.replay import ReplayPace

    store = open_store(registry)
    references, out_folder = (parse_reference(options.candidate), parse_reference(options.baseline)), options.place()
    pace = ReplayPace(options.scale, options.duration, 0, options.warmup, options.in_flight)
    target, precision = target_named(options.choice.target), options.choice.precision
    canary_run = CanaryRun(
        *references, target, options.traffic, out_folder, precision, pace, options.looks, options.observed
    )
    try:
        report_files = run_canary(store, canary_run, say)
    except KeyboardInterrupt:
        message = "interrupted before the first request; nothing was observed"
        if (out_folder / "candidate.jsonl").exists():
            previous_option = f" --previous {out_folder}/report.json" if (out_folder / "report.json").exists() else ""
            message = (
                f"the observations so far are in {out_folder}; judge them with: enginesmith canary judge "
                f"--candidate {out_folder}/candidate.jsonl --baseline {out_folder}/baseline.jsonl{previous_option}"
            )
        say(message)
        raise
    _finish(ctx, report_files, registry, options.after, as_json)


@dataclass(frozen=True, kw_only=True)
class _JudgeOptions:
    candidate: Annotated[Path, Option("File of the candidate's observations, JSONL.")]
    baseline: Annotated[Path, Option("File of the baseline's observations, JSONL.")]
    spec: Annotated[Path | None, Option("Spec with the margins.")] = None
    planned: Annotated[
        int | None,
        Option(
            "If you judge more than once: total number of requests at the last judgment.",
            type=COUNT,
            shown="this judgment is the only one",
        ),
    ] = None
    previous: Annotated[Path | None, Option("If you judge more than once: report.json of the previous judgment.")] = (
        None
    )
    missing: Annotated[Literal["failed", "ignored"], Option("How to count a request that only one side observed.")] = (
        "failed"
    )
    out: Annotated[
        Path | None, Option("Folder for report.json and its HTML page.", shown="the folder of --candidate", type=FOLDER)
    ] = None
    after: _After


@canary.command()
@takes(_JudgeOptions)
@click.pass_context
def judge(ctx: click.Context, /, options: _JudgeOptions, registry: str, as_json: bool) -> None:
    """Judge observations that were collected in production, or by an interrupted run.

    The margins are those of --spec. Without --spec, they are those of the candidate's version in the registry, or the
    defaults.
    """
    from pipeline.canary.verdicts import JudgeOptions, judge_files, read_report_file

    limits, source = _thresholds(options.candidate, options.spec, registry)
    previous_report = read_report_file(options.previous) if options.previous else None
    judge_options = JudgeOptions(limits, source, options.planned, previous_report, options.missing == "ignored")
    files = judge_files(options.candidate, options.baseline, judge_options, options.out or options.candidate.parent)
    _finish(ctx, files, registry, options.after, as_json)


def _thresholds(candidate: Path, spec: Path | None, registry: str) -> "tuple[Thresholds, str]":
    """The thresholds, and where they are from in words: `spec`, else the candidate's version, else the defaults."""
    from pipeline.canary.verdicts import DEFAULTS, spec_thresholds, thresholds_of
    from validation.canary.judging.thresholds import Thresholds
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


def _finish(ctx: click.Context, /, written: "WrittenReport", registry: str, after: _After, as_json: bool) -> None:
    """Act on the verdict, print it, and leave with its exit code."""
    from pipeline.canary.settle import attach as attach_verdict
    from pipeline.canary.verdicts import roll_back
    from validation.canary.judging.criteria import describe_measured

    report, channel_message = written.report, None
    if after.attach:
        store = open_store(registry)
        verdict = attach_verdict(store, report, store.put_bytes(report.to_bytes()))
        say(f"stored the verdict on {verdict.target} in {store.uri}")
    if after.auto and report.verdict == "FAIL":
        channel_message = roll_back(open_store(registry), report, check_channel(after.auto), user())
    if as_json:
        files = {"report": str(written.json), "page": str(written.page)}
        emit_json({**encode(report), "files": files, "channel": channel_message})
    else:
        echo(f"{report.verdict}: {report.reason}")
        for criterion in report.criteria:
            echo(f"  {criterion.verdict:<12} {criterion.name}: {describe_measured(criterion)}")
        for note in report.notes:
            say(f"note: {note}")
        echo(f"report: {written.json}\npage:   {written.page}")
    if channel_message:
        say(channel_message)
    ctx.exit(0 if report.verdict == "PASS" else 1)
