"""The report of a canary: a JSON document of a versioned format that carries its own digest.

The digest shows damage and edits by hand; it is no signature: whoever can write a report can write another one. Reading
a report also checks that the verdict follows from the criteria, and each criterion's from its interval.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from enginesmith.core import parsing
from enginesmith.core.codec import OMIT_NONE, decode, encode
from enginesmith.core.digest import digest_of
from enginesmith.core.errors import InputError, IntegrityError
from validation.canary.judging.criteria import Criterion, Verdict, verdict_of
from validation.canary.judging.judge import CanaryJudgement, Looks, overall
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import EngineIdentity, ObservationTable
from validation.canary.views import CanaryView, view_of
from validation.statistics.evidence import CanaryEvidence

FORMAT = 1
KIND = "enginesmith-canary"
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class SideObserved:
    """The observations of one side. digest: of their file.  failed: how many requests were not answered."""

    digest: str
    requests: int
    failed: int


@dataclass(frozen=True)
class BothObserved:
    """Both sides' observations."""

    candidate: SideObserved
    baseline: SideObserved


@dataclass(frozen=True)
class LooksTaken:
    """The looks at the data so far, the present one last. planned: requests in all, None for a single look.

    requests, fractions: at each look, in requests and as a share of `planned`.  level_pass, level_fail: one-sided
    levels of the bounds that decided at the present look.
    """

    planned: int | None
    requests: tuple[int, ...]
    fractions: tuple[float, ...]
    level_pass: float
    level_fail: float


@dataclass(frozen=True)
class TrafficReplayed:
    """The traffic that was replayed, and how; all None for observations of production.

    digest: of the file.  recorded: its number of requests.  made: where requests are from that nobody sent.
    """

    digest: str | None = field(default=None, metadata=OMIT_NONE)
    recorded: int | None = field(default=None, metadata=OMIT_NONE)
    sampling: float | None = field(default=None, metadata=OMIT_NONE)
    scale: float | None = field(default=None, metadata=OMIT_NONE)
    duration: float | None = field(default=None, metadata=OMIT_NONE)
    seed: int | None = field(default=None, metadata=OMIT_NONE)
    in_flight: int | None = field(default=None, metadata=OMIT_NONE)
    made: str | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class Circumstances:
    """Facts of a report beside the statistics. thresholds_from: where the thresholds come from, as text.

    target: what the canary ran on, where that is known: 'sm_89', or the kind of CPU.
    """

    created_at: str
    host: Mapping[str, str]
    versions: Mapping[str, str]
    thresholds_from: str
    traffic: TrafficReplayed
    notes: tuple[str, ...]
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class CanaryReport:
    """The document. paired: whether both sides answered the same requests.  shown: numbers that do not decide.

    created_at, host, versions, thresholds_from, traffic, notes, target: as in `Circumstances`.
    digest: of the document without it; None until `sign` has set it.
    """

    format: int = FORMAT
    kind: str = KIND
    verdict: Verdict
    reason: str
    candidate: EngineIdentity
    baseline: EngineIdentity
    paired: bool
    observations: BothObserved
    thresholds: Thresholds
    looks: LooksTaken
    criteria: tuple[Criterion, ...]
    shown: CanaryView
    target: str | None = field(default=None, metadata=OMIT_NONE)
    created_at: str
    host: Mapping[str, str]
    versions: Mapping[str, str]
    thresholds_from: str
    traffic: TrafficReplayed
    notes: tuple[str, ...]
    digest: str | None = field(default=None, metadata=OMIT_NONE)

    def sign(self) -> "CanaryReport":
        """The same document with its digest."""
        return replace(self, digest=digest_of(encode(replace(self, digest=None))))

    def to_bytes(self) -> bytes:
        """The JSON that `read_report` reads."""
        return (json.dumps(encode(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def make_report(
    judgement: CanaryJudgement,
    thresholds: Thresholds,
    looks: Looks,
    candidate: ObservationTable,
    baseline: ObservationTable,
    evidence: CanaryEvidence,
    circumstances: Circumstances,
    seed: int = 0,
) -> CanaryReport:
    """The document of a judgement, with its digest. candidate, baseline: what `evidence` was made of.

    looks: before this one.  seed: of the bootstrap of what is shown.
    """
    levels = judgement.levels
    return CanaryReport(
        **vars(circumstances),
        verdict=judgement.verdict,
        reason=judgement.reason,
        candidate=candidate.identity,
        baseline=baseline.identity,
        paired=evidence.paired,
        observations=BothObserved(
            *(SideObserved(one.digest, len(one), one.ok.count(False)) for one in (candidate, baseline))
        ),
        thresholds=thresholds,
        looks=LooksTaken(
            looks.planned, (*looks.before, evidence.requests), judgement.fractions, levels.passing, levels.failing
        ),
        criteria=tuple(item.without_infinities() for item in judgement.criteria),
        shown=view_of(candidate, baseline, evidence, seed),
    ).sign()


def read_report(data: bytes) -> CanaryReport:
    """Read a report. Raises IntegrityError for bytes that were edited, contradict themselves or have another format."""
    if len(data) > MOST_BYTES:
        raise IntegrityError(f"the canary report has {len(data)} bytes; {MOST_BYTES} are the most")
    try:
        document = parsing.load_json(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the canary report is not JSON ({str(error)[:200]})") from None
    if not isinstance(document, dict):
        raise IntegrityError("the canary report is not a JSON object")
    stated = document.pop("digest", None)
    if document.get("kind") != KIND or document.get("format") != FORMAT:
        raise IntegrityError(f"this is not a canary report of format {FORMAT}; `enginesmith canary run` writes one")
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
        found = replace(decode(document, CanaryReport), digest=actual)
        _check(found)
    except (IntegrityError, ValueError) as error:
        raise IntegrityError(f"the canary report is not whole ({error}); judge the observations again") from None
    return found


def continue_looks(previous: CanaryReport, candidate: ObservationTable, baseline: ObservationTable) -> Looks:
    """The looks before the present one, from the report of the last one.

    Raises InputError where that one was decided, was about other engines, or had no plan.
    """
    if previous.verdict != "INSUFFICIENT":
        raise InputError(f"the earlier look already decided: {previous.verdict} ({previous.reason})")
    for name, then, now in (
        ("candidate", previous.candidate, candidate.identity),
        ("baseline", previous.baseline, baseline.identity),
    ):
        if then != now:
            raise InputError(f"the earlier look was at another {name}; give the report of this canary")
    if previous.looks.planned is None:
        raise InputError("the earlier look had no --planned, so it used the whole error up; start a new canary")
    return Looks(previous.looks.planned, previous.looks.requests)


def _check(found: CanaryReport) -> None:
    """Raise ValueError for a verdict that does not follow from the numbers."""
    for item in found.criteria:
        low, high = (math.nan if bound is None else bound for bound in (item.low, item.high))
        follows = "INSUFFICIENT" if item.note else verdict_of(low, high, item.margin)
        if item.verdict != follows:
            raise ValueError(f"{item.name} says {item.verdict} where {follows} follows from its interval")
    if not found.looks.fractions or not found.looks.requests:
        raise ValueError("it was judged at no look")
    if found.verdict != overall([item.verdict for item in found.criteria]):
        raise ValueError(f"the verdict {found.verdict} does not follow from its criteria")
