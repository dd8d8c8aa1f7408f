"""How often the judge is wrong: cells of simulated canaries, by name, and the rates of their verdicts.

A cell has a truth: a candidate that is equal, one that is worse by exactly a margin, and one that is well beyond it.
`errors_of` counts; whatever it names "wrong" is promised to be at most 5 %.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tests.validation.canary.latencies import KINDS, Rng, autoregressive
from tests.validation.canary.sides import side
from validation.canary.judging.criteria import QualityThresholds, Thresholds
from validation.canary.judging.judge import judge
from validation.statistics.rates import CanaryEvidence

Flags = np.ndarray
Draw = Callable[[Rng, int, float], CanaryEvidence]
OUTAGE = 100
# Failures that say nothing of either side: single requests.
SINGLE = 0.001


@dataclass(frozen=True)
class Case:
    """Canaries that are worse by so much (0: equal), judged by `limits`, and the verdict that is counted."""

    worse: float
    limits: Thresholds
    verdict: str


@dataclass(frozen=True)
class Cell:
    """draw: evidence of a candidate that is worse by so much."""

    draw: Draw
    cases: Mapping[str, Case]


def equal_cases(limits: Thresholds) -> dict[str, Case]:
    """Of an equal candidate."""
    names = {"wrong FAIL, equal": "FAIL", "PASS, equal": "PASS", "INSUFFICIENT, equal": "INSUFFICIENT"}
    return {name: Case(0.0, limits, verdict) for name, verdict in names.items()}


def latency_cell(kind: str, paired: bool) -> Cell:
    """A kind of latency; the candidate's are longer by a factor."""

    def draw(rng: Rng, count: int, worse: float) -> CanaryEvidence:
        ours, theirs = KINDS[kind](rng, count)
        ours = ours * (1.0 + worse)
        if step := ROUNDED.get(kind):
            ours, theirs = (np.maximum(np.round(values / step), 1.0) * step for values in (ours, theirs))
        failed = rng.random(count) < SINGLE
        lost = failed if paired else rng.random(count) < SINGLE
        sides = side(ours, ~failed), side(theirs, ~lost)
        return CanaryEvidence(*sides, paired, np.zeros(int((~failed).sum()), bool) if paired else None)

    median, tail = (Thresholds({name: margin}, None, None) for name, margin in (("p50", 0.02), ("p99", 0.05)))
    return Cell(
        draw,
        {
            "wrong PASS, p50 at its margin": Case(0.02, median, "PASS"),
            "wrong PASS, p50 3 % slower": Case(0.03, median, "PASS"),
            "wrong PASS, p99 at its margin": Case(0.05, tail, "PASS"),
            **equal_cases(Thresholds() if paired else Thresholds(quality=None)),
        },
    )


ROUNDED = {"rounded to 10 %": 0.1, "rounded to 0.1 %": 0.001}


def bursts(rng: Rng, count: int, share: float, size: int = OUTAGE) -> Flags:
    """A share of requests, in bursts of `size` that begin at any time."""
    starts = np.flatnonzero(rng.random(count + size) < share / size)
    steps = np.zeros(count + 2 * size, int)
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + size, -1)
    found: Flags = np.cumsum(steps)[size : size + count] > 0
    return found


def error_cell(draw_flags: Callable[[Rng, int, float], Flags], paired: bool) -> Cell:
    """0.1 % of the requests fail, and more by so much on the candidate; each side by itself."""

    def draw(rng: Rng, count: int, worse: float) -> CanaryEvidence:
        ours, theirs = draw_flags(rng, count, 0.001 + worse), draw_flags(rng, count, 0.001)
        return CanaryEvidence(side(np.ones(count), ~ours), side(np.ones(count), ~theirs), paired)

    limits = Thresholds({}, 0.001, None)
    return Cell(draw, share_cases(0.001, 0.002, limits))


def share_cases(margin: float, beyond: float, limits: Thresholds) -> dict[str, Case]:
    return {
        "wrong PASS, at the margin": Case(margin, limits, "PASS"),
        "wrong PASS, beyond it": Case(beyond, limits, "PASS"),
        **equal_cases(limits),
    }


def answers_cell(name: str, draw_flags: Callable[[Rng, int, float], Flags], burst: int) -> Cell:
    """Answers that differ, or argmax flips."""
    quality = QualityThresholds(disagreement=None, score=None, burst=burst)
    values = {"disagreement": 0.01} if name == "differs" else {"flips": 0.01}
    limits = Thresholds({}, None, QualityThresholds(**{**quality.__dict__, **values}))

    def draw(rng: Rng, count: int, worse: float) -> CanaryEvidence:
        flags, one = draw_flags(rng, count, worse), side(np.ones(count))
        return CanaryEvidence(one, one, True, **{name: flags})

    return Cell(draw, share_cases(0.01, 0.02, limits))


def score_cell(draw_scores: Callable[[Rng, int, float], np.ndarray], paired: bool) -> Cell:
    """Scores of either side by itself; the candidate's mean is lower by so much."""

    def draw(rng: Rng, count: int, worse: float) -> CanaryEvidence:
        sides = [side(np.ones(count), score=draw_scores(rng, count, drop)) for drop in (worse, 0.0)]
        return CanaryEvidence(sides[0], sides[1], paired)

    return Cell(draw, share_cases(0.01, 0.015, Thresholds({}, None, QualityThresholds(disagreement=None))))


def remembering_scores(rng: Rng, count: int, drop: float) -> np.ndarray:
    return 0.8 - drop + autoregressive(rng, count, 0.99, 0.05)


def right_or_wrong(rng: Rng, count: int, drop: float) -> np.ndarray:
    return (rng.random(count) < 0.9 - drop).astype(float)


def falling_scores(rng: Rng, count: int, drop: float) -> np.ndarray:
    return 0.8 - drop - 0.1 * np.arange(count) / count + rng.normal(size=count) * 0.05


def singly(rng: Rng, count: int, share: float) -> Flags:
    found: Flags = rng.random(count) < share
    return found


def all_cells() -> dict[str, Cell]:
    """By name; those that end in "unpaired" saw different requests on either side."""
    cells = {}
    for paired, ending in ((True, ""), (False, ", unpaired")):
        cells |= {kind + ending: latency_cell(kind, paired) for kind in KINDS}
        cells |= {
            f"errors in outages of 100{ending}": error_cell(bursts, paired),
            f"errors one by one{ending}": error_cell(singly, paired),
            f"scores AR .99{ending}": score_cell(remembering_scores, paired),
            f"scores 0 or 1{ending}": score_cell(right_or_wrong, paired),
            f"scores that fall{ending}": score_cell(falling_scores, paired),
        }
    cells |= {
        "answers that differ in bursts of 100": answers_cell("differs", bursts, OUTAGE),
        "answers that differ one by one": answers_cell("differs", singly, 1),
        "flips in bursts of 100": answers_cell("flipped", bursts, OUTAGE),
    }
    return cells


CELLS = all_cells()


def errors_of(cell: str, count: int, simulations: int, seed: int = 0, replicates: int = 300) -> dict[str, float]:
    """The share of canaries of `count` requests with the verdict that each case of the cell counts."""
    found = dict.fromkeys(CELLS[cell].cases, 0)
    for index in range(simulations):
        judged: dict[tuple[float, str], str] = {}
        for name, case in CELLS[cell].cases.items():
            key = case.worse, str(case.limits)
            if key not in judged:
                evidence = CELLS[cell].draw(np.random.default_rng((seed, index)), count, case.worse)
                judged[key] = judge(evidence, case.limits, replicates=replicates).verdict
            found[name] += judged[key] == case.verdict
    return {name: hits / simulations for name, hits in found.items()}
