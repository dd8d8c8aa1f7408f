"""The report of a canary, as values and as views."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, stored_arrays
from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode, refuse_newer
from enginesmith.core.errors import DataError, InputError, IntegrityError, digest_of
from validation.canary.judging.criteria import REPLICATES, Criterion, Verdict, is_finite, verdict_of
from validation.canary.judging.judge import CanaryJudgement, Looks, overall
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import EngineIdentity, ObservationTable
from validation.statistics.rates import CanaryEvidence, Side, mean_ranks, quantile_effects, select_answered
from validation.statistics.serial_dependence import NORMAL

# Synthetic traffic for the first canary of a new service: real inputs, at arrivals drawn from a Poisson process.
#
# Real traffic has bursts and repeats some inputs: a verdict on synthetic traffic is valid only for such traffic. Its
# files are marked as made up.


def made_up(
    path: Path, per_second: float, requests: int | None, batch: int, seed: int
) -> Iterator[tuple[float, dict[str, Array]]]:
    """Made-up requests: arrival in seconds, 0 for the first, and inputs by name: `batch` samples along axis 0 from each
    array of an .npz file.

    requests: their number; None: each sample once.  per_second: mean rate.
    Raises DataError for arrays without names or with unequal counts.
    """
    arrays = {name: stored_array.read() for name, stored_array in stored_arrays(path).items()}
    if "" in arrays:
        raise DataError(f"{path} holds an array without a name; save it as .npz under the name of its input")
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or min(counts.values()) < batch:
        raise DataError(f"{path} holds {counts} samples; all inputs need the same number, at least {batch}")
    group_count = min(counts.values()) // batch
    rng = np.random.default_rng(seed)
    arrival_s = 0.0
    for index in range(requests or group_count):
        start = index % group_count * batch
        yield arrival_s, {name: array[start : start + batch] for name, array in arrays.items()}
        arrival_s += float(rng.exponential(1.0 / per_second))


# The view of a canary's report beside the criteria: distributions, latency over time, errors, the worst requests.
#
# The view does not affect the verdict. Mann & Whitney's U (Annals of Mathematical Statistics 18, 1947) assumes
# independent requests, and with enough data it detects any small difference; its p is shown and not judged. The common
# language effect size (McGraw & Wong, Psychological Bulletin 111, 1992; ties count half: Vargha & Delaney, 2000) is the
# probability that a request on the candidate is slower than another on the baseline.

# The most points of a curve, windows of time, and rows of a table on a page.
CURVE_POINTS, WINDOWS, LEAST_IN_WINDOW, MOST_ERRORS, MOST_WORST = 160, 48, 8, 12, 8
PROBABILITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
# The error probability on either side of an interval, for intervals of 90 %.
INTERVAL_LEVEL = 0.05


@dataclass(frozen=True)
class MannWhitney:
    """The test of latencies: U, z corrected for ties, two-sided p. cles: probability that the candidate is slower."""

    u: float
    z: float
    p: float
    cles: float


@dataclass(frozen=True)
class QuantileSlowdown:
    """A quantile of latency in seconds on both sides, and the slowdown with its 90 % confidence interval.

    p: from 0 to 1.  low, high: ends of the interval.
    """

    p: float
    candidate: float
    baseline: float
    slowdown: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyCurves:
    """Distribution functions: points (latency in seconds, share of requests up to it), denser towards the tail."""

    candidate: tuple[tuple[float, float], ...]
    baseline: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LatencyCourses:
    """Latency over time, by windows: (seconds since the first request, median, 90th percentile)."""

    candidate: tuple[tuple[float, float, float], ...]
    baseline: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class ErrorCount:
    """An error's text, and its number of occurrences on each side."""

    error: str
    candidate: int
    baseline: int


@dataclass(frozen=True)
class UnlikeAnswers:
    """A request with different answers. candidate, baseline: latencies in seconds; None if that side failed.
    sqnr_db: of the candidate's outputs against the baseline's.  flipped: whether the argmax differs; None if unknown.
    """

    request: str
    sqnr_db: float
    flipped: bool | None
    candidate: float | None
    baseline: float | None


@dataclass(frozen=True)
class CanaryView:
    """The part of a report that is shown and not judged. errors: most frequent first.  worst: lowest SQNR first."""

    mann_whitney: MannWhitney | None
    quantiles: tuple[QuantileSlowdown, ...]
    ecdf: LatencyCurves
    over_time: LatencyCourses
    errors: tuple[ErrorCount, ...]
    worst: tuple[UnlikeAnswers, ...]


def view_of(candidate: ObservationTable, baseline: ObservationTable, evidence: CanaryEvidence, seed: int) -> CanaryView:
    """The part of a report beside the criteria. seed: of the bootstrap.  evidence: of both tables."""
    latency_pair = select_answered(evidence)
    counts = [
        Counter(text or "no reason given" for is_ok, text in zip(table.ok, table.error, strict=True) if not is_ok)
        for table in (candidate, baseline)
    ]
    texts = sorted(counts[0] | counts[1], key=lambda text: (-counts[0][text] - counts[1][text], text))
    return CanaryView(
        mann_whitney=mann_whitney(*latency_pair),
        quantiles=tuple(_quantiles(evidence, latency_pair, seed)),
        ecdf=LatencyCurves(*map(_curve, latency_pair)),
        over_time=LatencyCourses(tuple(_windows(evidence.candidate)), tuple(_windows(evidence.baseline))),
        errors=tuple(ErrorCount(text, counts[0][text], counts[1][text]) for text in texts[:MOST_ERRORS]),
        worst=tuple(_worst(candidate, baseline)),
    )


def mann_whitney(candidate: Array, baseline: Array) -> MannWhitney | None:
    """Mann & Whitney's test of two sides' latencies (seconds, [requests]); None if a side has no latency."""
    candidate_count, baseline_count = len(candidate), len(baseline)
    if not candidate_count or not baseline_count:
        return None
    ranks, counts = mean_ranks(np.concatenate([candidate, baseline]))
    u = float(ranks[:candidate_count].sum()) - candidate_count * (candidate_count + 1) / 2.0
    total = candidate_count + baseline_count
    tie_term = float(np.sum(counts.astype(float) ** 3 - counts)) / (total * (total - 1.0)) if total > 1 else 0.0
    u_std = math.sqrt(max(candidate_count * baseline_count / 12.0 * (total + 1.0 - tie_term), 0.0))
    z = (u - candidate_count * baseline_count / 2.0) / u_std if u_std > 0 else 0.0
    return MannWhitney(u, z, 2.0 * (1.0 - NORMAL.cdf(abs(z))), u / (candidate_count * baseline_count))


def _quantiles(evidence: CanaryEvidence, sides: tuple[Array, Array], seed: int) -> Iterator[QuantileSlowdown]:
    count = min(map(len, sides))
    probabilities = [p for p in PROBABILITIES if count * min(p, 1 - p) >= 5]
    effects = quantile_effects(sides, probabilities, seed, REPLICATES, evidence.design_block)
    z = NORMAL.inv_cdf(1.0 - INTERVAL_LEVEL)
    for p, effect in zip(probabilities, effects, strict=True):
        if math.isfinite(effect.error):
            candidate_quantile, baseline_quantile = (
                float(np.quantile(side, p, method="inverted_cdf")) for side in sides
            )
            ratios = (effect.log_ratio, effect.log_ratio - z * effect.error, effect.log_ratio + z * effect.error)
            yield QuantileSlowdown(p, candidate_quantile, baseline_quantile, *map(math.expm1, ratios))


def _curve(values: Array) -> tuple[tuple[float, float], ...]:
    if not len(values):
        return ()
    shares = 1.0 - np.geomspace(1.0, max(0.5 / len(values), 1e-5), CURVE_POINTS)
    shares = np.unique(np.concatenate([np.linspace(0.0, 1.0, CURVE_POINTS // 2), shares]))
    curve_values = np.quantile(values, shares, method="inverted_cdf")
    return tuple((float(x), float(p)) for x, p in zip(curve_values, shares, strict=True))


def _windows(side: Side) -> Iterator[tuple[float, float, float]]:
    time, latency = side.time[side.ok], side.latency[side.ok]
    if not len(time) or not np.isfinite(time).all():
        return
    duration = float(time.max() - time.min())
    count = max(1, min(WINDOWS, len(time) // LEAST_IN_WINDOW))
    window_indices = np.minimum(((time - time.min()) / (duration or 1.0) * count).astype(int), count - 1)
    for index in range(count):
        window_latencies = latency[window_indices == index]
        if len(window_latencies) >= LEAST_IN_WINDOW:
            median, p90 = np.quantile(window_latencies, [0.5, 0.9])
            yield (index + 0.5) / count * duration, float(median), float(p90)


def _worst(candidate: ObservationTable, baseline: ObservationTable) -> Iterator[UnlikeAnswers]:
    baseline_rows = {name: index for index, name in enumerate(baseline.request) if name is not None}
    distance = np.asarray(candidate.sqnr_db)
    order = [index for index in np.argsort(distance, kind="stable") if not np.isnan(distance[index])]
    for index in order[:MOST_WORST]:
        name, is_flipped = candidate.request[index], candidate.flipped[index]
        if (baseline_row := baseline_rows.get(name)) is not None:
            latencies = (candidate.latency[index], baseline.latency[baseline_row])
            finite_latencies = (latency if is_finite(latency) else None for latency in latencies)
            yield UnlikeAnswers(str(name), float(distance[index]), is_flipped, *finite_latencies)


# The report of a canary: a JSON document of a versioned format that carries its own digest.
#
# The digest detects damage and edits by hand. It is no signature: anybody can write another report with a digest.
# Reading a report also checks that the verdict follows from the criteria, and each criterion's from its interval.

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
    """The looks at the data so far, the present one last. planned: total number of requests; None for a single look.

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
    """The replayed traffic and its rate; all None for observations of production.

    made: the source of made-up requests.
    sampling: share of the requests that were recorded.  scale: factor on the rate.
    """

    digest: str | None = None
    recorded: int | None = None
    sampling: float | None = None
    scale: float | None = None
    duration: float | None = None
    seed: int | None = None
    in_flight: int | None = None
    made: str | None = None


@dataclass(frozen=True)
class Circumstances:
    """Facts of a report beside the statistics. thresholds_from: the source of the thresholds, as text.

    target: the hardware of the canary, if known: 'sm_89', or the kind of CPU.
    created_at: ISO 8601, UTC.  host: this machine.  traffic: the replayed traffic.
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
    """The document. paired: whether both sides answered the same requests.  view: numbers that do not decide.

    created_at, host, versions, thresholds_from, traffic, notes, target: as in `Circumstances`.
    digest: of the document without this field; None before `sign`.  observations: digest and counts of both files.
    verdict, reason, criteria: of the judgement, by `thresholds` at `looks`.
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
    view: CanaryView
    target: str | None = None
    created_at: str
    host: Mapping[str, str]
    versions: Mapping[str, str]
    thresholds_from: str
    traffic: TrafficReplayed
    notes: tuple[str, ...]
    digest: str | None = None

    def sign(self) -> "CanaryReport":
        """The same document with its digest."""
        document = encode(self)
        del document["digest"]
        return replace(self, digest=digest_of(document))

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
    """The document of a judgement, with its digest. candidate, baseline: the tables behind `evidence`.

    looks: the looks before this one.  seed: of the bootstrap for the intervals in the view.
    """
    levels, requests = judgement.levels, (*looks.before, evidence.requests)
    observed_sides = (SideObserved(table.digest, len(table), table.ok.count(False)) for table in (candidate, baseline))
    return CanaryReport(
        **vars(circumstances),
        verdict=judgement.verdict,
        reason=judgement.reason,
        candidate=candidate.identity,
        baseline=baseline.identity,
        paired=evidence.paired,
        observations=BothObserved(*observed_sides),
        thresholds=thresholds,
        looks=LooksTaken(looks.planned, requests, judgement.fractions, levels.passing, levels.failing),
        criteria=tuple(criterion.without_infinities() for criterion in judgement.criteria),
        view=view_of(candidate, baseline, evidence, seed),
    ).sign()


def read_report(data: bytes) -> CanaryReport:
    """Read a report. Raises IntegrityError for a report that was edited, contradicts itself or has another format."""
    if len(data) > MOST_BYTES:
        raise IntegrityError(f"the canary report has {len(data)} bytes; the limit is {MOST_BYTES}")
    try:
        document = parsing.load_json(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the canary report is not JSON ({str(error)[:200]})") from None
    if not isinstance(document, dict):
        raise IntegrityError("the canary report is not a JSON object")
    stated_digest = document.pop("digest", None)
    if document.get("kind") == KIND:
        refuse_newer("the canary report", document.get("format"), FORMAT)
    if document.get("kind") != KIND or document.get("format") != FORMAT:
        raise IntegrityError(f"this is not a canary report of format {FORMAT}; `enginesmith canary run` writes one")
    try:
        actual = digest_of(document)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the canary report cannot be digested ({error})") from None
    if stated_digest != actual:
        raise IntegrityError(
            f"the canary report's digest is {actual}, but it states {str(stated_digest)[:64]}: it was edited by hand "
            "or damaged; judge the observations again"
        )
    try:
        report = replace(decode(document, CanaryReport), digest=actual)
        _check(report)
    except (IntegrityError, ValueError) as error:
        raise IntegrityError(f"the canary report is invalid ({error}); judge the observations again") from None
    return report


def continue_looks(previous: CanaryReport, candidate: ObservationTable, baseline: ObservationTable) -> Looks:
    """The looks before the present one, from the report of the last look.

    Raises InputError if that report is decided, is about other engines, or has no plan.
    """
    if previous.verdict != "INSUFFICIENT":
        raise InputError(f"the earlier look already decided: {previous.verdict} ({previous.reason})")
    for name, previous_identity, current_identity in (
        ("candidate", previous.candidate, candidate.identity),
        ("baseline", previous.baseline, baseline.identity),
    ):
        if previous_identity != current_identity:
            raise InputError(f"the earlier look was at another {name}; give the report of this canary")
    if previous.looks.planned is None:
        raise InputError("the earlier look had no --planned, so it spent the whole allowed error; start a new canary")
    return Looks(previous.looks.planned, previous.looks.requests)


def _check(report: CanaryReport) -> None:
    """Raise ValueError for a verdict that does not follow from the numbers."""
    for criterion in report.criteria:
        low, high = (math.nan if bound is None else bound for bound in (criterion.low, criterion.high))
        expected = "INSUFFICIENT" if criterion.note else verdict_of(low, high, criterion.margin)
        expected = "FAIL" if criterion.kind == "fact" else expected
        if criterion.verdict != expected:
            raise ValueError(f"{criterion.name} says {criterion.verdict}, but its values give {expected}")
    if not report.looks.fractions or not report.looks.requests:
        raise ValueError("it records no look at the data")
    if report.verdict != overall([criterion.verdict for criterion in report.criteria]):
        raise ValueError(f"the verdict {report.verdict} does not follow from its criteria")
