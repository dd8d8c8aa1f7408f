"""Which engine of a comparison to take, and why (reasons: docs/reference/backends.md).

1. Only engines that are proven and were timed here count: the limits of the spec on accuracy come first.
2. The fastest wins where its lead was shown. An engine to which no difference was shown counts as equally fast, unless
   the runs were so noisy that it may well be slower; then the least median wins, and the answer says so.
3. Among engines that are equally fast: the most of the fleet's targets, then accuracy, then the cheaper rebuild. What
   goes wrong in production comes before what costs build time.
"""

import math
from collections.abc import Callable, Sequence

from enginesmith.core.text import format_metrics, format_plain
from pipeline.operations.compare.report import EngineFacts, PairedComparison, Recommendation, find_fastest
from validation.limits.budget import at_most
from validation.plotting import seconds_text

# Smaller differences decide nothing: of a task metric, of the SQNR in dB (one bit), and as a factor of cost.
METRIC_STEP, SQNR_STEP_DB, COST_FACTOR = 1e-4, 6.0, 2.0


def recommend(facts: Sequence[EngineFacts], pairs: Sequence[PairedComparison], fleet: Sequence[str]) -> Recommendation:
    """The engine to take. pairs: of the fastest engine, `first` in all of them, with each of the others.  fleet: names
    of the targets to serve."""
    candidates = [engine for engine in facts if engine.runs]
    leader = next((engine for engine in candidates if pairs and engine.unit == pairs[0].first), find_fastest(facts))
    if leader is None:
        return Recommendation(None, _why_nothing(facts))
    pairs_by_rival = {pair.second: pair for pair in pairs}
    peers = {pair.second for pair in pairs if pair.verdict in ("no difference shown", "slower") and not pair.too_noisy}
    fast_engines = [engine for engine in candidates if engine is leader or engine.unit in peers]
    winner, axis = _narrow(fast_engines, leader)
    tied_units = tuple(engine.unit for engine in fast_engines if engine is not winner)
    return Recommendation(winner.unit, _reason(winner, tied_units, axis, pairs_by_rival, fleet), tied_units)


def _why_nothing(facts: Sequence[EngineFacts]) -> str:
    if not facts:
        return "no installed backend builds for this target; `enginesmith backends list` shows backends that do"
    engines = [engine for engine in facts if engine.status == "unproven"]
    if engines:
        return f"nothing runs here: {engines[0].unit}: {engines[0].reason}; compare on a node that has it"
    return f"no engine passed: {facts[0].unit}: {facts[0].reason}"


def _narrow(as_fast: list[EngineFacts], lead: EngineFacts) -> tuple[EngineFacts, str | None]:
    """The best of the engines that are equally fast, and the axis that decided; None where nothing but speed did."""
    candidates = as_fast
    for axis, score, step in AXES:
        best_score = max(map(score, candidates))
        leaders = [engine for engine in candidates if score(engine) > best_score - step]
        if len(leaders) < len(candidates) and len(leaders) == 1:
            return leaders[0], axis
        candidates = leaders
    # Nothing tells them apart: take the one with the least median of its own, which proves nothing.
    return (lead if lead in candidates else candidates[0]), None


def _goodness(name: str, value: float) -> float:
    """A task metric's value where more is better, in units of which METRIC_STEP decides nothing."""
    if name.endswith("_db"):
        return value * METRIC_STEP / SQNR_STEP_DB
    return -value if at_most(name) else value


# Name, score of an engine (more is better), and the difference of scores that decides. For a rebuild a difference of 1
# is a factor of COST_FACTOR in its time.
Axis = tuple[str, Callable[[EngineFacts], float], float]
AXES: tuple[Axis, ...] = (
    ("portability", lambda engine: float(len(engine.covers)), 1.0),
    ("accuracy", lambda engine: sum(_goodness(*pair) for pair in engine.metrics.items()), METRIC_STEP),
    ("accuracy", lambda engine: engine.sqnr_db if engine.sqnr_db is not None else 0.0, SQNR_STEP_DB),
    ("rebuild", lambda engine: -math.log(max(engine.build_s or 0.0, 1e-3), COST_FACTOR), 1.0),
)


def _reason(
    winner: EngineFacts, ties: Sequence[str], axis: str | None, pairs: dict[str, PairedComparison], fleet: Sequence[str]
) -> str:
    speed = f"{seconds_text(winner.median_s or 0.0)} per run"
    if not ties:
        if noisy_units := ", ".join(pair.second for pair in pairs.values() if pair.too_noisy):
            return f"the least median, {speed}; the runs were too noisy to tell whether {noisy_units} may be as fast"
        wins = [pair for pair in pairs.values() if pair.verdict == "faster"]
        return f"the fastest, {speed}{_lead(wins)}" if wins else f"the only engine that is proven here, {speed}"
    reason = f"{speed}; no difference in speed shown to {', '.join(ties)}"
    if axis is None:
        return f"{reason}, and they are equal otherwise: use either"
    accuracy = [format_metrics(winner.metrics)] if winner.metrics else []
    accuracy += [] if winner.sqnr_db is None else [f"SQNR {winner.sqnr_db:.0f} dB"]
    advantage = {
        "portability": f"it builds for {len(winner.covers)} of the fleet's {len(fleet)} targets",
        "accuracy": f"it is nearer to the original ({', '.join(accuracy)})",
        "rebuild": f"it builds in {seconds_text(winner.build_s or 0.0)}, in half the time or less",
    }[axis]
    return f"{reason}, and {advantage}"


def _lead(beaten: Sequence[PairedComparison]) -> str:
    """By how much the fastest engine leads, told of the next one."""
    runner_up = max((pair for pair in beaten if pair.ratio is not None), key=lambda pair: pair.ratio or 0, default=None)
    if runner_up is None or not runner_up.ratio:
        return ""
    evidence = "by the times that each had alone"
    if runner_up.low and runner_up.high:
        evidence = f"95 %: {format_plain(1 / runner_up.high)} to {format_plain(1 / runner_up.low)}"
    return f"; the next, {runner_up.second}, takes {format_plain(1 / runner_up.ratio)} times as long ({evidence})"
