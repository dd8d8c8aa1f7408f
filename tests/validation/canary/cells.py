"""The 40 cells in which the judge is held to its promises: each a kind of simulated canary with its true verdict.

A candidate that is `worse` must not PASS, an `equal` one must not FAIL, and one that is `broken` must FAIL; a canary
with another verdict counts as wrong. Requests come ten a second; 9,000 are 15 minutes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.validation.canary.latencies import KINDS, Rng, autoregressive, load_steps, noise
from tests.validation.canary.sides import side
from tests.validation.canary.simulated_logs import dying
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import QualityThresholds, Thresholds
from validation.statistics.rates import CanaryEvidence, Side

Flags = np.ndarray
Truth = Literal["equal", "worse", "broken"]
Draw = Callable[[Rng, int], CanaryEvidence]
PER_SECOND, QUARTER_HOUR = 10.0, 9000
OUTAGE = 100
MEDIAN, TAIL = (Thresholds({name: margin}, None, None) for name, margin in (("p50", 0.02), ("p99", 0.05)))
ERRORS, SCORES = Thresholds({}, quality=None), Thresholds({}, None, QualityThresholds(disagreement=None))
UNNAMED = Thresholds(quality=None)


@dataclass(frozen=True)
class Cell:
    """draw: evidence of so many requests.  truth: of its candidate.  limits: of the criteria that are judged.

    passes: whether an equal candidate is to PASS in 90 %.  looks: how often growing logs are judged; the first verdict
    that is no INSUFFICIENT counts.
    """

    truth: Truth
    draw: Draw
    count: int = QUARTER_HOUR
    limits: Thresholds = field(default_factory=Thresholds)
    passes: bool = False
    looks: int = 1


def both(ours: np.ndarray, theirs: np.ndarray, paired: bool = True, differs: Flags | None = None) -> CanaryEvidence:
    """Sides that answered everything, the same answers where they are paired."""
    times = np.arange(len(ours)) / PER_SECOND
    same_array = np.zeros(len(ours), bool) if differs is None else differs
    return CanaryEvidence(side(ours, time=times), side(theirs, time=times), paired, same_array if paired else None)


def of_kind(kind: str, slower: float = 0.0, paired: bool = True) -> Draw:
    """A kind of latency; the candidate's are longer by so much. Unpaired sides have different requests of one time."""

    def draw(rng: Rng, count: int) -> CanaryEvidence:
        our_draw, their_draw = DRAWN[kind](rng, count if paired else count * 20 // 19)
        result = both(our_draw * (1 + slower), their_draw, paired)
        if paired:
            return result
        sides = [item.select(rng.random(len(item)) < 0.95) for item in (result.candidate, result.baseline)]
        return CanaryEvidence(sides[0], sides[1], False)

    return draw


def shared_steps(rng: Rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight levels of a load that both sides have."""
    steps = load_steps(rng, count)
    return steps * noise(rng, count, 0.1), steps * noise(rng, count, 0.1)


def unalike_95(rng: Rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    """An autocorrelation of .95, on each side by itself."""
    return np.exp(autoregressive(rng, count, 0.95, 0.2)), np.exp(autoregressive(rng, count, 0.95, 0.2))


DRAWN = {**KINDS, "load steps of both": shared_steps, "AR .95": unalike_95}


def bursts(rng: Rng, count: int, share: float, size: int = OUTAGE) -> Flags:
    """A share of requests, in bursts of `size` that begin at any time."""
    starts = np.flatnonzero(rng.random(count + size) < share / size)
    steps = np.zeros(count + 2 * size, int)
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + size, -1)
    result: Flags = np.cumsum(steps)[size : size + count] > 0
    return result


def singly(rng: Rng, count: int, share: float) -> Flags:
    result: Flags = rng.random(count) < share
    return result


def failing(ours: Callable[[Rng, int], Flags], theirs: Callable[[Rng, int], Flags], paired: bool = True) -> Draw:
    """Lognormal latencies; some requests fail on either side."""

    def draw(rng: Rng, count: int) -> CanaryEvidence:
        sides = [
            side(noise(rng, count, 0.2), ~flags(rng, count), time=np.arange(count) / PER_SECOND)
            for flags in (ours, theirs)
        ]
        answered_number = int((sides[0].ok & sides[1].ok).sum())
        return CanaryEvidence(sides[0], sides[1], paired, np.zeros(answered_number, bool) if paired else None)

    return draw


def share(of: float, draw_flags: Callable[[Rng, int, float], Flags] = singly) -> Callable[[Rng, int], Flags]:
    return lambda rng, count: draw_flags(rng, count, of)


def after(part: float) -> Callable[[Rng, int], Flags]:
    """Every request from a part of the run on."""
    return lambda rng, count: np.arange(count) >= round(part * count)


def outages(number: int) -> Callable[[Rng, int], Flags]:
    """Half of the requests, in so many outages, the last of which ends before the run does."""

    def draw(rng: Rng, count: int) -> Flags:
        actual = np.zeros(count, bool)
        for start in np.arange(number) * count // number + int(rng.integers(count // number // 2 - 30)):
            actual[start : start + count // number // 2] = True
        return actual

    return draw


def slow_stretch(part: float) -> Draw:
    """Three times slower for one part of the run."""

    def draw(rng: Rng, count: int) -> CanaryEvidence:
        our_noise, their_noise, length = noise(rng, count, 0.2), noise(rng, count, 0.2), round(part * count)
        start = int(rng.integers(count - length))
        our_noise[start : start + length] *= 3
        return both(our_noise, their_noise)

    return draw


def slow_share(of: float, factor: float) -> Draw:
    """A share of the candidate's requests takes so many times as long."""

    def draw(rng: Rng, count: int) -> CanaryEvidence:
        our_noise, their_noise = noise(rng, count, 0.2), noise(rng, count, 0.2)
        return both(np.where(rng.random(count) < of, factor, 1.0) * our_noise, their_noise)

    return draw


def sized(slower: float, large: float = 0.1) -> Draw:
    """A part of the requests is sixteen times as large and takes four times as long; those are slower."""

    def draw(rng: Rng, count: int) -> CanaryEvidence:
        is_big = rng.random(count) < large
        size, base = np.where(is_big, 16.0, 1.0), np.where(is_big, 4.0, 1.0)
        sides = [
            Side(one_side.time, one_side.latency, one_side.ok, one_side.score, size)
            for factor in (np.where(is_big, 1 + slower, 1.0), 1.0)
            for one_side in [side(base * factor * noise(rng, count, 0.1), time=np.arange(count) / PER_SECOND)]
        ]
        return CanaryEvidence(sides[0], sides[1], True, np.zeros(count, bool))

    return draw


def other_answers(of: float, draw_flags: Callable[[Rng, int, float], Flags] = singly) -> Draw:
    """A share of the answers differs, of engines that otherwise answer alike."""
    return lambda rng, count: both(noise(rng, count, 0.2), noise(rng, count, 0.2), differs=draw_flags(rng, count, of))


def scored(drop: float, draw_scores: Callable[[Rng, int], np.ndarray]) -> Draw:
    """The candidate's mean score is lower by so much; each side by itself."""

    def draw(rng: Rng, count: int) -> CanaryEvidence:
        our_side, their_side = (side(np.ones(count), score=draw_scores(rng, count) - less) for less in (drop, 0.0))
        return CanaryEvidence(our_side, their_side, True)

    return draw


def killed(rng: Rng, count: int) -> CanaryEvidence:
    """Logs of named requests; the candidate's ends 600 or more requests early, without a closing line."""
    after_part = rng.uniform(0.2, 1 - 60 * PER_SECOND / count)
    logs = dying(rng, count, after=after_part, closed=(False, True))
    return evidence_of(logs.candidate, logs.baseline, 15.0)[0]


def hung(rng: Rng, count: int) -> CanaryEvidence:
    """For the last minute each request of the candidate takes until a time-out of 30 s, and counts as answered."""
    our_noise, their_noise = noise(rng, count, 0.2), noise(rng, count, 0.2)
    our_noise[-round(60 * PER_SECOND) :] = 150.0
    return both(our_noise, their_noise)


CELLS: Mapping[str, Cell] = {
    "lognormal": Cell("equal", of_kind("lognormal"), passes=True),
    "lognormal, unnamed": Cell("equal", of_kind("lognormal", paired=False), limits=UNNAMED, passes=True),
    "shared load steps": Cell("equal", of_kind("load steps of both"), passes=True),
    "shared load steps, unnamed": Cell(
        "equal", of_kind("load steps of both", paired=False), limits=UNNAMED, passes=True
    ),
    "separate load steps": Cell("equal", of_kind("load steps")),
    "AR .95": Cell("equal", of_kind("AR .95")),
    "AR .99": Cell("equal", of_kind("AR .99")),
    "AR .999": Cell("equal", of_kind("AR .999")),
    "AR .95, unnamed": Cell("equal", of_kind("AR .95", paired=False), limits=UNNAMED),
    "Pareto 2.5": Cell("equal", of_kind("heavy")),
    "Pareto 1.5": Cell("equal", of_kind("Pareto 1.5")),
    "half take twice as long": Cell("equal", of_kind("two modes")),
    "1 % take 100 times as long": Cell("equal", of_kind("outliers")),
    "queue, server 80 % busy": Cell("equal", of_kind("queue")),
    "20 % sine wave": Cell("equal", of_kind("sine")),
    "10 % large requests": Cell("equal", sized(0.0)),
    "0.1 % independent errors": Cell("equal", failing(share(0.001), share(0.001)), limits=ERRORS),
    "0.1 % errors, in outages of 100 requests": Cell(
        "equal", failing(share(0.001, bursts), share(0.001, bursts)), limits=ERRORS
    ),
    "growing log, 18 looks": Cell("equal", of_kind("lognormal"), limits=MEDIAN, looks=18),
    "growing log with 1 % errors, 18 looks": Cell("equal", failing(share(0.01), share(0.01)), limits=ERRORS, looks=18),
    "2 % slower median (the margin)": Cell("worse", of_kind("lognormal", 0.02), limits=MEDIAN),
    "2 % slower median (the margin), unnamed": Cell("worse", of_kind("lognormal", 0.02, False), limits=MEDIAN),
    "5 % slower p99 (the margin)": Cell("worse", of_kind("two humps", 0.05), limits=TAIL),
    "3 % slower, AR .95": Cell("worse", of_kind("AR .95", 0.03), limits=MEDIAN),
    "3 % slower, AR .99": Cell("worse", of_kind("AR .99", 0.03), limits=MEDIAN),
    "0.2 % errors, baseline 0.1 % (the margin)": Cell("worse", failing(share(0.002), share(0.001)), limits=ERRORS),
    "0.3 % errors, baseline 0.1 %": Cell("worse", failing(share(0.003), share(0.001)), limits=ERRORS),
    "0.2 % different answers (the margin)": Cell("worse", other_answers(0.002)),
    "0.5 % different answers": Cell("worse", other_answers(0.005)),
    "0.3 % take 1,000 times as long": Cell("worse", slow_share(0.003, 1000.0)),
    "10 % large requests, 20 % slower": Cell("worse", sized(0.2)),
    "mean score lower by 0.01 (the margin)": Cell(
        "worse", scored(0.01, lambda rng, count: 0.8 + rng.normal(size=count) * 0.05), limits=SCORES
    ),
    "all fail after 50 % of the run": Cell("broken", failing(after(0.5), share(0.0))),
    "all fail after 90 % of the run": Cell("broken", failing(after(0.9), share(0.0))),
    "all fail after 99 % of the run": Cell("broken", failing(after(0.99), share(0.001))),
    "killed 600 or more requests early": Cell("broken", killed),
    "hung for the last 600 requests": Cell("broken", hung),
    "half fail, in 1 outage": Cell("broken", failing(outages(1), share(0.001))),
    "half fail, in 5 outages": Cell("broken", failing(outages(5), share(0.001))),
    "3 times slower for 10 % of the run": Cell("broken", slow_stretch(0.1)),
}
WRONG: Mapping[Truth, tuple[str, ...]] = {"equal": ("FAIL",), "worse": ("PASS",), "broken": ("PASS", "INSUFFICIENT")}


def verdict_in(cell: Cell, rng: Rng, replicates: int = 200) -> str:
    evidence, result = cell.draw(rng, cell.count), "INSUFFICIENT"
    if cell.looks == 1:
        return judge(evidence, cell.limits, replicates=replicates).verdict
    for look in range(1, cell.looks + 1):
        stop = cell.count * look // cell.looks
        sides = [item.select(np.arange(cell.count) < stop) for item in (evidence.candidate, evidence.baseline)]
        part = CanaryEvidence(sides[0], sides[1], evidence.paired, growing=True)
        if (result := judge(part, cell.limits, replicates=replicates).verdict) == "FAIL":
            return result
    return result


def count_verdicts(name: str, simulations: int, seed: int, replicates: int = 200) -> dict[str, int]:
    """How often each verdict came in so many canaries of a cell."""
    actual = dict.fromkeys(("PASS", "FAIL", "INSUFFICIENT"), 0)
    for index in range(simulations):
        actual[verdict_in(CELLS[name], np.random.default_rng((seed, index)), replicates)] += 1
    return actual
