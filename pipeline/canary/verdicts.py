"""Verdicts of canaries: thresholds, judging observations, the report on disk, and what it allows for a channel."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnknownNameError, digest_of_bytes
from enginesmith.core.hardware.machine import describe_host, parse_targets
from enginesmith.core.requirements import JsonObject
from enginesmith.core.text import join_first, now, pluralize
from enginesmith.registry.evidence.canaries import canary_target
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import reachable, write_whole
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import Channel, position_of, read_channel
from enginesmith.registry.versions.policies import CanaryPass
from pipeline.compile.run_context import versions
from validation.canary.judging.judge import Looks, judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import QualityThresholds, Thresholds
from validation.canary.observations import read_both
from validation.canary.page import render
from validation.canary.report import (
    MOST_BYTES,
    CanaryReport,
    Circumstances,
    TrafficReplayed,
    continue_looks,
    make_report,
    read_report,
)

DEFAULTS = "the documented defaults"


@dataclass(frozen=True)
class WrittenReport:
    """A report, and the files it was written to, as JSON and as an HTML page."""

    report: CanaryReport
    json: Path
    page: Path


@dataclass(frozen=True)
class JudgeOptions:
    """How to judge files of observations. limits: the thresholds.  source: the origin of the limits, for the report.

    planned: number of requests at the last look; None for a single look.  previous: report of the look
    before.  ignore_missing: whether a request that only one side observed is left out; else it counts as failed.
    """

    limits: Thresholds
    source: str
    planned: int | None = None
    previous: CanaryReport | None = None
    ignore_missing: bool = False


def judge_files(candidate: Path, baseline: Path, terms: JudgeOptions, out: Path) -> WrittenReport:
    """Judge two files of observations and write report and page into `out`.

    Raises DataError for an invalid file, InputError for looks that do not fit the plan.
    """
    new_table, baseline_table = read_both(candidate, baseline)
    looks = (
        continue_looks(terms.previous, new_table, baseline_table)
        if terms.previous
        else Looks(terms.planned or new_table.planned)
    )
    if terms.previous and terms.previous.thresholds != terms.limits:
        raise InputError("the earlier look had other thresholds; they may not change between looks")
    quality = terms.limits.quality or QualityThresholds()
    evidence, notes = evidence_of(new_table, baseline_table, quality.sqnr_db, ignore_missing=terms.ignore_missing)
    judgement = judge(evidence, terms.limits, looks, seed=0)
    if new_table.identity.engine and new_table.identity.engine == baseline_table.identity.engine:
        notes = (*notes, "both sides are the same engine")
    target = None
    # The target that the engine was built for: observations do not say which kind of CPU served it.
    with suppress(UnknownNameError):
        target = canary_target(parse_targets(new_table.identity.target)[0]) if new_table.identity.target else None
    conditions = circumstances(terms.source, notes, TrafficReplayed(), target)
    report = make_report(judgement, terms.limits, looks, new_table, baseline_table, evidence, conditions, seed=0)
    return write_report(report, out)


def circumstances(source: str, notes: Sequence[str], traffic: TrafficReplayed, target: str | None) -> Circumstances:
    """Context of a report: this machine, the versions, and the arguments.

    source: where the thresholds are from.  target: what the canary ran on ('sm_89'), None or '' where unknown.
    """
    return Circumstances(
        now(), describe_host(), versions("enginesmith", "numpy"), source, traffic, tuple(notes), target or None
    )


def write_report(report: CanaryReport, out: Path) -> WrittenReport:
    """Write report.json and report.html into a folder, each whole or not at all. Raises UnavailableError."""
    report_files = WrittenReport(report, out / "report.json", out / "report.html")
    write_whole(report_files.json, report.to_bytes())
    write_whole(report_files.page, render(report).encode())
    return report_files


def read_report_file(path: Path) -> CanaryReport:
    """The report in a file. Raises InputError where there is none, IntegrityError for one that is damaged."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; `enginesmith canary run` writes report.json into its --out folder")
    with reachable(f"reading {path}"), path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    try:
        return read_report(data)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Judged(Excerpt):
    canary: JsonObject | None = None


def thresholds_of(manifest: Manifest) -> tuple[Thresholds, str]:
    """The thresholds of a version's spec, else the defaults, and which of the two in words. Raises InputError for a
    value that is no threshold."""
    spec_section = manifest.spec if manifest.graphs else manifest.spec.get("validation") or {}
    canary_terms = decode(spec_section, _Judged, "spec" if manifest.graphs else "spec.validation").canary
    if canary_terms is None:
        return Thresholds(), DEFAULTS
    return Thresholds.from_json(canary_terms), f"the spec of {manifest.reference}"


def spec_thresholds(path: Path) -> tuple[Thresholds, str]:
    """The thresholds of a spec file, and its name in words. Raises SpecError."""
    from pipeline.spec.ensembles.model import LoadedEnsemble, load_any

    spec = load_any(path)
    terms = spec.spec.canary if isinstance(spec, LoadedEnsemble) else spec.validation.canary
    terms_json = terms.model_dump(mode="json", exclude_unset=True)
    return Thresholds.from_json(terms_json), f"the spec {path.name}"


def promotion_refusal(report: CanaryReport, manifest: Manifest, channel: Channel | None) -> str | None:
    """Why a report does not allow promoting this version; None if it does. channel: None where it serves nothing."""
    reference = manifest.reference
    if report.verdict != "PASS":
        return f"the canary's verdict is {report.verdict}: {report.reason}"
    candidate, baseline = report.candidate, report.baseline
    judged_reference = f"{candidate.model}@{candidate.version}"
    if judged_reference != reference or candidate.manifest != manifest.digest:
        return f"the canary is about {judged_reference} (manifest {candidate.manifest}), not about {reference}"
    if candidate.engine not in {entry.digest for entry in manifest.engines if entry.digest}:
        return f"the canary ran engine {candidate.engine}, which {reference} does not have"
    if channel and channel.manifest not in (manifest.digest, baseline.manifest):
        return (
            f"the canary's baseline is version {baseline.version}, and {channel.model}:{channel.name} "
            f"serves {channel.version}; run it against that"
        )
    if report.thresholds != thresholds_of(manifest)[0]:
        return f"the canary was judged with other thresholds than those of {reference}"
    return None


def roll_back(store: Store, report: CanaryReport, channel: str, person: str) -> str:
    """After a FAIL, roll the channel back if it serves the candidate. Returns a line that describes the action."""
    model, manifest = report.candidate.model, report.candidate.manifest
    if report.verdict != "FAIL":
        return f"the verdict is {report.verdict}, not FAIL; no channel was moved"
    if not (model and report.candidate.version and manifest):
        return "the observations do not say which engine they are of; no channel was moved"
    reason = f"canary FAIL {str(report.digest)[:12]}: {report.reason}"
    while (live_channel := read_channel(store, model, channel)) is None or live_channel.manifest == manifest:
        decided_on = position_of(live_channel)
        try:
            new_state = channels.rollback(store, model, channel, by=person, why=reason[:500], decided_on=decided_on)
            return f"rolled back: {model}:{channel} -> {new_state.version}"
        except (ConflictError, UnknownNameError) as error:
            if position_of(read_channel(store, model, channel)) == decided_on:
                return f"{error}; no channel was moved"
    return f"channel {model}:{channel} now serves version {live_channel.version}; no channel was moved"


def canary_passes(
    store: Store, manifest: Manifest, channel: str, reports: Sequence[Path], say: Callable[[str], None]
) -> tuple[str, list[CanaryPass]]:
    """Check the report files that a promotion is based on, and store them as blobs.

    Returns the words for the channel's history and a pass for each report; `say` names engines without a canary.

    Raises InputError unless every report is a PASS of exactly this version against what the channel serves.
    """
    live_channel = read_channel(store, manifest.model, channel)
    short_digests, passes, contents = [], [], []
    for path in reports:
        read_report_file(path)
        with reachable(f"reading {path}"):
            contents.append(path.read_bytes())
        report = read_report(contents[-1])
        if refusal := promotion_refusal(report, manifest, live_channel):
            raise InputError(f"{path}: {refusal}; {manifest.model}:{channel} was not moved")
        engine, baseline = str(report.candidate.engine), report.baseline.manifest or ""
        passes.append(CanaryPass(digest_of_bytes(contents[-1]), engine, baseline, report.target or ""))
        short_digests.append(str(report.digest)[:12])
    engines = {canary_pass.engine for canary_pass in passes}
    if uncovered_units := [entry.unit for entry in manifest.engines if entry.digest and entry.digest not in engines]:
        say(f"{pluralize(len(uncovered_units), 'engine')} without a canary: {join_first(uncovered_units, 5)}")
    for content in contents:
        store.put_bytes(content)
    return f"canary PASS {', '.join(short_digests)}", passes
