"""The report of a canary: a JSON document of a versioned format that carries its own digest.

The digest finds damage and edits by hand; it is no signature, and whoever can write a report can write another. Reading
one back also asks whether the verdict follows from the criteria, and each criterion from its interval.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginery.core.digest import digest_of, is_digest
from enginery.core.errors import InputError, IntegrityError
from enginery.recording.recorder import IDENTITY
from validation.canary.judging.criteria import VERDICTS, Verdict, verdict_of
from validation.canary.judging.judge import Judgement, Looks, overall
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import Observations
from validation.canary.shown import shown
from validation.statistics.evidence import Evidence

FORMAT = 1
KIND = "enginery-canary"
MOST_BYTES = 16 << 20
Json = dict[str, Any]


@dataclass(frozen=True)
class CanaryReport:
    """A report that was read back. candidate, baseline: which engines; empty where the observations did not say."""

    verdict: Verdict
    reason: str
    candidate: Mapping[str, str]
    baseline: Mapping[str, str]
    thresholds: Mapping[str, Any]
    looks: Looks
    digest: str
    document: Mapping[str, Any]


def make_report(
    judgement: Judgement,
    thresholds: Thresholds,
    looks: Looks,
    candidate: Observations,
    baseline: Observations,
    evidence: Evidence,
    facts: Mapping[str, Any],
    seed: int = 0,
) -> Json:
    """The document. facts: what else is known: created_at, host, versions, thresholds_from, traffic, notes."""
    document: Json = {
        "format": FORMAT,
        "kind": KIND,
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "candidate": dict(candidate.identity),
        "baseline": dict(baseline.identity),
        "paired": evidence.paired and not evidence.matched,
        "observations": {
            name: {"digest": one.digest, "requests": len(one), "failed": one.ok.count(False)}
            for name, one in (("candidate", candidate), ("baseline", baseline))
        },
        "thresholds": thresholds.to_json(),
        "looks": {
            "planned": looks.planned,
            "requests": [*looks.before, evidence.requests],
            "fractions": list(judgement.fractions),
            "level_pass": judgement.levels.passing,
            "level_fail": judgement.levels.failing,
        },
        "criteria": [item.to_json() for item in judgement.criteria],
        "shown": shown(candidate, baseline, evidence, seed),
        **facts,
    }
    document = _finite(document)
    return {**document, "digest": digest_of(document)}


def read_report(data: bytes) -> CanaryReport:
    """Read a report. Raises IntegrityError for bytes that were edited, contradict themselves or have another format."""
    document = _parsed(data)
    stated = document.pop("digest", None)
    if document.get("kind") != KIND or document.get("format") != FORMAT:
        raise IntegrityError(f"this is not a canary report of format {FORMAT}; `enginery canary run` writes one")
    try:
        actual = digest_of(document)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the canary report cannot be digested ({error})") from None
    if stated != actual:
        raise IntegrityError(
            f"the canary report's digest is {actual}, and it says {str(stated)[:64]}: it was edited by hand or "
            "damaged; judge the observations again"
        )
    try:
        return _checked(document, actual)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"the canary report is not whole ({error!r}); judge the observations again") from None


def continued(previous: CanaryReport, candidate: Observations, baseline: Observations) -> Looks:
    """The looks that go on from an earlier one. Raises InputError when it was decided, or about something else."""
    if previous.verdict != "INSUFFICIENT":
        raise InputError(f"the earlier look already decided: {previous.verdict} ({previous.reason})")
    for name, then, now in (
        ("candidate", previous.candidate, candidate.identity),
        ("baseline", previous.baseline, baseline.identity),
    ):
        if dict(then) != dict(now):
            raise InputError(f"the earlier look was at another {name}; give the report of this canary")
    if previous.looks.planned is None:
        raise InputError("the earlier look had no --planned, so it used the whole error up; start a new canary")
    return previous.looks


def _parsed(data: bytes) -> Json:
    if len(data) > MOST_BYTES:
        raise IntegrityError(f"the canary report has {len(data)} bytes; {MOST_BYTES} are the most")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the canary report is not JSON ({str(error)[:200]})") from None
    if not isinstance(document, dict):
        raise IntegrityError("the canary report is not a JSON object")
    return document


def _checked(document: Json, digest: str) -> CanaryReport:
    verdicts = []
    for item in document["criteria"]:
        low, high, margin = (_bound(item[name]) for name in ("low", "high", "margin"))
        follows = "INSUFFICIENT" if item["note"] else verdict_of(low, high, margin)
        if item["verdict"] != follows:
            raise ValueError(f"{item['name']} says {item['verdict']} where {follows} follows from its interval")
        verdicts.append(item["verdict"])
    if document["verdict"] not in VERDICTS or document["verdict"] != overall(verdicts):
        raise ValueError(f"the verdict {document['verdict']} does not follow from its criteria")
    looks, planned = document["looks"], document["looks"]["planned"]
    if not all(type(count) is int for count in [*looks["requests"], *([] if planned is None else [planned])]):
        raise ValueError("looks are counted in whole requests")
    return CanaryReport(
        document["verdict"],
        str(document["reason"]),
        _identity(document["candidate"]),
        _identity(document["baseline"]),
        dict(document["thresholds"]),
        Looks(planned, tuple(looks["requests"])),
        digest,
        {**document, "digest": digest},
    )


def _bound(value: Any) -> float:
    return math.nan if value is None else float(value)


def _identity(value: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(value[name]) for name in IDENTITY if name in value}
    for name in ("manifest", "engine"):
        if name in found and not is_digest(found[name]):
            raise ValueError(f"{name} is not a digest")
    return found


def _finite(value: Any) -> Any:
    """The value with null for what JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
