"""Simulated logs of two sides as serving code leaves them, by name in `SIMULATIONS`, with the right verdicts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.core.codec import encode
from enginesmith.recording.recorder import end_of, header_of
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import ObservationTable

Rng = np.random.Generator
Array = np.ndarray[Any, Any]
HOUR = 3600.0
MIDNIGHT = 1_763_596_800.0
OUTPUT = "ab" * 32
# What some thousand requests without a fault meet, so that it is ends and hours which decide.
LIMITS = Thresholds({"p50": 0.05}, error_rate=0.2, quality=None)


@dataclass(frozen=True)
class Logs:
    """Both sides, and the verdicts that are right: a judge may give any of them."""

    candidate: ObservationTable
    baseline: ObservationTable
    right: tuple[str, ...]


EQUAL = ("PASS", "INSUFFICIENT")
Simulation = Callable[[Rng, int], Logs]


def log(
    name: str, times: Array, latencies: Array, *, named: bool = False, ok: Array | None = None, ended: bool = False
) -> ObservationTable:
    """A side: named gives its requests the names 0, 1, ..; ended is whether its writer stopped in order."""
    count = len(times)
    return ObservationTable(
        Path(f"{name}.jsonl"),
        accounted=count if ended else 0,
        time=list(map(float, times)),
        latency=list(map(float, latencies)),
        ok=[True] * count if ok is None else list(map(bool, ok)),
        score=[float("nan") if named else 1.0] * count,
        sqnr_db=[float("nan")] * count,
        flipped=[None] * count,
        output=[OUTPUT if named else None] * count,
        request=list(range(count)) if named else [None] * count,
        error=[""] * count,
        segment=[None] * count,
    )


def write_log(folder: Path, observed: ObservationTable) -> Path:
    """The side as a file in `folder`, under its own name."""
    lines = [header_of(encode(observed.identity), observed.planned)]
    for index, name in enumerate(observed.request):
        line = {"time": observed.time[index], "latency": observed.latency[index], "ok": observed.ok[index]}
        optional = {"request": name, "output": observed.output[index], "score": observed.score[index]}
        lines.append(line | {key: value for key, value in optional.items() if value is not None and value == value})
    if observed.accounted:
        lines.append(end_of(observed.accounted, observed.died))
    path = folder / observed.path.name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def dying(
    rng: Rng, count: int, *, side: str = "candidate", after: float = 0.4, closed: tuple[bool, bool] = (False, False)
) -> Logs:
    """The same requests to both, 20 a second; one side stops after a share of them. closed: candidate, baseline."""
    times = MIDNIGHT + np.cumsum(rng.exponential(0.05, count))
    counts = {name: int(after * count) if name == side else count for name in ("candidate", "baseline")}
    sides = [
        log(name, times[: counts[name]], _noise(rng, counts[name]) * 0.02, named=True, ended=ended_count)
        for name, ended_count in zip(counts, closed, strict=True)
    ]
    return Logs(sides[0], sides[1], ("FAIL", "INSUFFICIENT") if side == "candidate" else ("INSUFFICIENT",))


def dying_after_a_slow_answer(rng: Rng, count: int) -> Logs:
    """The candidate dies five requests before the end, all younger than one answer, which took a minute."""
    result = dying(rng, count, after=1 - 5 / count)
    result.baseline.latency[count // 2] = 60.0
    return result


def mirrored(rng: Rng, count: int, *, slower: float = 0.0, in_flight: int = 0) -> Logs:
    """The same requests to both, still being served; the last ones are not answered by the candidate yet."""
    times = MIDNIGHT + np.cumsum(rng.exponential(0.05, count))
    our_log = log(
        "candidate", times[: count - in_flight], _noise(rng, count - in_flight) * 0.02 * (1 + slower), named=True
    )
    return Logs(our_log, log("baseline", times, _noise(rng, count) * 0.02, named=True), ("FAIL",) if slower else EQUAL)


def apart(rng: Rng, count: int, *, slower: float = 0.0) -> Logs:
    """The baseline in the busy hours, the candidate in the quiet ones: nothing of it is the engine's."""
    our_arrivals, their_arrivals = arrivals(rng, count, 0, 8), arrivals(rng, count, 9, 17)
    return _of_a_day(rng, our_arrivals, their_arrivals, slower, ("INSUFFICIENT",))


def same_hours_of_two_days(rng: Rng, count: int, *, slower: float = 0.0) -> Logs:
    """From 9 to 17, the candidate a day later, when the machine was a tenth faster."""
    our_arrivals, their_arrivals = (arrivals(rng, count, 9, 17) for _ in "ab")
    return _of_a_day(rng, our_arrivals + 24 * HOUR, their_arrivals, slower - 0.1, ("INSUFFICIENT",))


def hour_about(rng: Rng, count: int, *, slower: float = 0.0) -> Logs:
    """The two sides serve in turns of an hour."""
    times = arrivals(rng, 2 * count, 0, 24)
    candidate_hours = (times // HOUR) % 2 == 0
    return _of_a_day(rng, times[candidate_hours], times[~candidate_hours], slower, ("INSUFFICIENT",))


def halves(rng: Rng, count: int, *, slower: float = 0.0, drift: float = 0.0) -> Logs:
    """Each request of a day goes to one side by chance. drift: how far the candidate's share is above one half in the
    quiet hours, and below it in the busy ones."""
    times = arrivals(rng, 2 * count, 0, 24)
    is_mine = rng.random(len(times)) < 0.5 - drift * (load(times) - 1.0)
    return _of_a_day(rng, times[is_mine], times[~is_mine], slower, ("FAIL", "INSUFFICIENT") if slower else EQUAL)


def split(rng: Rng, count: int, *, slower: float = 0.0) -> Logs:
    """Each request of an hour of even load goes to one side by chance."""
    times = MIDNIGHT + np.cumsum(rng.exponential(HOUR / (2 * count), 2 * count))
    is_mine = rng.random(2 * count) < 0.5
    our_log, their_log = (
        log(name, side, 0.02 * factor * _noise(rng, len(side)))
        for name, side, factor in (("candidate", times[is_mine], 1.0 + slower), ("baseline", times[~is_mine], 1.0))
    )
    return Logs(our_log, their_log, ("FAIL",) if slower else EQUAL)


def ramp(rng: Rng, count: int, *, slower: float = 0.0) -> Logs:
    """The candidate's share grows from a tenth to nine tenths in the course of a day, and its load with it."""
    times = arrivals(rng, 2 * count, 0, 24)
    is_mine = rng.random(len(times)) < 0.1 + 0.8 * (times - times[0]) / (times[-1] - times[0])
    return _of_a_day(rng, times[is_mine], times[~is_mine], slower, ("INSUFFICIENT",))


def dying_half(rng: Rng, count: int) -> Logs:
    """Halves of a day, and the candidate stops in the evening: nobody names the requests that it never answered."""
    actual = halves(rng, count)
    last_number = MIDNIGHT + 18 * HOUR
    death = np.asarray(actual.candidate.time) < last_number
    our_log = log("candidate", np.asarray(actual.candidate.time)[death], np.asarray(actual.candidate.latency)[death])
    return Logs(our_log, actual.baseline, ("INSUFFICIENT",))


def arrivals(rng: Rng, count: int, first: float, last: float) -> Array:
    """Arrivals between two hours of a day, as dense as its load; in order."""
    grid = MIDNIGHT + np.linspace(first, last, 2001) * HOUR
    share = np.concatenate([[0.0], np.cumsum(load(grid)[1:])])
    return np.interp(np.sort(rng.random(count)) * share[-1], share, grid)


def load(times: Array) -> Array:
    """Requests relative to the mean of the day: 0.2 at 4 in the morning, 1.8 at 16."""
    result: Array = 1.0 - 0.8 * np.cos(2 * np.pi * ((times - MIDNIGHT) / HOUR - 4.0) / 24.0)
    return result


def _of_a_day(rng: Rng, ours: Array, theirs: Array, slower: float, right: tuple[str, ...]) -> Logs:
    """Latency follows the load: half as long again in the busiest hour as in the quietest."""
    sides = [
        log(name, times, 0.02 * (1.0 + 0.25 * load(times)) * _noise(rng, len(times)) * factor)
        for name, times, factor in (("candidate", ours, 1.0 + slower), ("baseline", theirs, 1.0))
    ]
    return Logs(sides[0], sides[1], right)


def _noise(rng: Rng, count: int) -> Array:
    result: Array = np.exp(rng.normal(size=count) * 0.2)
    return result


SIMULATIONS: dict[str, Simulation] = {
    "candidate dies": dying,
    "candidate dies, baseline was closed": lambda rng, count: dying(rng, count, closed=(False, True)),
    "candidate stops first, both were closed": lambda rng, count: dying(rng, count, closed=(True, True)),
    "candidate dies ten requests before the end": lambda rng, count: dying(rng, count, after=1 - 10 / count),
    "candidate dies five requests before the end, one answer took a minute": dying_after_a_slow_answer,
    "baseline dies": lambda rng, count: dying(rng, count, side="baseline"),
    "baseline stops first, both were closed": lambda rng, count: dying(
        rng, count, side="baseline", closed=(True, True)
    ),
    "one in flight": lambda rng, count: mirrored(rng, count, in_flight=1),
    "equal, other hours": apart,
    "10 % slower, at night": lambda rng, count: apart(rng, count, slower=0.1),
    "10 % slower, on a faster day": lambda rng, count: same_hours_of_two_days(rng, count, slower=0.1),
    "10 % slower, an hour each in turns": lambda rng, count: hour_about(rng, count, slower=0.1),
    "equal, a share that grows": ramp,
    "equal halves of an hour": split,
    "10 % slower half of an hour": lambda rng, count: split(rng, count, slower=0.1),
    "equal halves of a day": halves,
    "10 % slower half of a day": lambda rng, count: halves(rng, count, slower=0.1),
    "equal, more of the quiet hours": lambda rng, count: halves(rng, count, drift=0.05),
    "10 % slower, more of the quiet hours": lambda rng, count: halves(rng, count, slower=0.1, drift=0.05),
    "half that dies in the evening": dying_half,
}
