"""Verdicts: thresholds from a spec, reports on disk, and what a verdict may do to a channel."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import ConflictError, InputError, UnknownNameError
from enginery.core.hardware.host import describe_host
from enginery.core.hardware.targets import parse_targets
from enginery.core.moment import now
from enginery.registry.evidence.canaries import canary_target
from enginery.registry.manifest import Manifest
from enginery.registry.store.atomic_write import reachable, write_whole
from enginery.registry.store.base import Store
from enginery.registry.versions import channels
from enginery.registry.versions.channels import Channel
from pipeline.compile.run_context import versions
from validation.canary.judging.judge import Looks, judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import Quality, Thresholds
from validation.canary.observations import Observations, read_both
from validation.canary.page import render
from validation.canary.report import MOST_BYTES, CanaryReport, continued, make_report, read_report

DEFAULTS = "the documented defaults"


@dataclass(frozen=True)
class Written:
    """A report, and where it lies with its page."""

    report: Mapping[str, Any]
    json: Path
    page: Path

    @property
    def verdict(self) -> str:
        """PASS, FAIL or INSUFFICIENT."""
        return str(self.report["verdict"])


@dataclass(frozen=True)
class Asked:
    """How to judge observations. planned, previous: see `validation.canary.judging.judge.Looks`."""

    limits: Thresholds
    source: str
    planned: int | None = None
    previous: CanaryReport | None = None
    ignore_missing: bool = False
    seed: int = 0


def judge_files(candidate: Path, baseline: Path, asked: Asked, out: Path) -> Written:
    """Judge two files of observations and write report and page into `out`.

    Raises DataError for a file that is not in order, InputError for looks that do not fit the plan.
    """
    ours, theirs = read_both(candidate, baseline)
    looks = continued(asked.previous, ours, theirs) if asked.previous else Looks(asked.planned or ours.planned)
    if asked.previous and dict(asked.previous.thresholds) != asked.limits.to_json():
        raise InputError("the earlier look had other thresholds; they may not change between looks")
    quality = asked.limits.quality or Quality()
    evidence, notes = evidence_of(ours, theirs, quality.sqnr_db, ignore_missing=asked.ignore_missing)
    judgement = judge(evidence, asked.limits, looks, seed=asked.seed)
    known = facts(asked.source, [*notes, *_same(ours, theirs)], {}, _target_of(ours))
    report = make_report(judgement, asked.limits, looks, ours, theirs, evidence, known, asked.seed)
    return write_report(report, out)


def _same(candidate: Observations, baseline: Observations) -> list[str]:
    same = candidate.identity.get("engine") and candidate.identity.get("engine") == baseline.identity.get("engine")
    return ["both sides are the same engine"] if same else []


def _target_of(candidate: Observations) -> str | None:
    """What the engine was built for: observations do not say which kind of CPU served it."""
    name = candidate.identity.get("target")
    with suppress(UnknownNameError):
        return canary_target(parse_targets(name)[0]) if name else None
    return None


def facts(source: str, notes: Sequence[str], traffic: Mapping[str, Any], target: str | None) -> dict[str, Any]:
    """What a report says beside the statistics. target: what the canary ran on, where that is known: 'sm_89'."""
    return {
        **({"target": target} if target else {}),
        "created_at": now(),
        "host": describe_host(),
        "versions": versions("enginery", "numpy"),
        "thresholds_from": source,
        "traffic": dict(traffic),
        "notes": list(notes),
    }


def write_report(report: Mapping[str, Any], out: Path) -> Written:
    """report.json and report.html in a folder, each whole. Raises UnavailableError."""
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    written = Written(report, out / "report.json", out / "report.html")
    write_whole(written.json, text.encode())
    write_whole(written.page, render(report).encode())
    return written


def read_report_file(path: Path) -> CanaryReport:
    """A report on disk. Raises InputError where there is none, IntegrityError for one that is not in order."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; `enginery canary run` writes report.json into its --out folder")
    with reachable(f"reading {path}"), path.open("rb") as stream:
        return read_report(stream.read(MOST_BYTES + 1))


def thresholds_of(manifest: Manifest) -> tuple[Thresholds, str]:
    """The thresholds of a version's spec, and where they are from. Raises InputError for ones that are none."""
    given = (manifest.spec.get("validation") or {}).get("canary")
    if given is None:
        return Thresholds(), DEFAULTS
    return Thresholds.from_json(given), f"the spec of {manifest.model}@{manifest.version}"


def spec_thresholds(path: Path) -> tuple[Thresholds, str]:
    """The thresholds of a spec file. Raises SpecError."""
    from pipeline.spec.file import load_spec

    given = load_spec(path).validation.canary.model_dump(mode="json", exclude_unset=True)
    return Thresholds.from_json(given), f"the spec {path.name}"


def promotion_refusal(report: CanaryReport, manifest: Manifest, channel: Channel | None) -> str | None:
    """Why a canary does not speak for promoting this version; None if it does."""
    reference = f"{manifest.model}@{manifest.version}"
    if report.verdict != "PASS":
        return f"the canary's verdict is {report.verdict}: {report.reason}"
    about = f"{report.candidate.get('model')}@{report.candidate.get('version')}"
    if about != reference or report.candidate.get("manifest") != manifest.digest:
        return f"the canary is about {about} (manifest {report.candidate.get('manifest')}), not about {reference}"
    if report.candidate.get("engine") not in {entry.digest for entry in manifest.engines if entry.digest}:
        return f"the canary ran engine {report.candidate.get('engine')}, which {reference} does not have"
    if channel and channel.manifest not in (manifest.digest, report.baseline.get("manifest")):
        return (
            f"the canary's baseline is version {report.baseline.get('version')}, and {channel.model}:{channel.name} "
            f"serves {channel.version}; run it against that"
        )
    if dict(report.thresholds) != thresholds_of(manifest)[0].to_json():
        return f"the canary was judged with other thresholds than those of {reference}"
    return None


def roll_back(store: Store, report: Mapping[str, Any], channel: str, by: str) -> str:
    """After a FAIL: point the channel back, if the failed candidate is what it serves. What was done, in a line."""
    candidate = report["candidate"]
    model, version, manifest = (candidate.get(name) for name in ("model", "version", "manifest"))
    if report["verdict"] != "FAIL":
        return f"{report['verdict']} is no FAIL; no channel was moved"
    if not (model and version and manifest):
        return "the observations do not say which engine they are of; no channel was moved"
    why = f"canary FAIL {str(report['digest'])[:12]}: {report['reason']}"
    try:
        after = channels.rollback(store, model, channel, by=by, why=why[:500], serving=manifest)
    except (ConflictError, UnknownNameError) as error:
        return f"{error}; no channel was moved"
    return f"rolled back: {model}:{channel} -> {after.version}"
