"""Which engine of a comparison to take, why, and what would change that (docs/reference/backends.md has the reasons).

1. Only what is proven and was timed here counts: accuracy is a gate first, by the limits of the spec.
2. The fastest wins, where its lead was shown. What no difference was shown to is as fast, unless the runs were so noisy
   that it may well be slower: then nothing but the times speaks, and the answer says so.
3. Among those that are as fast: the most of the fleet's targets, then the most sizes answered, then the accuracy, then
   the cheaper rebuild; in that order, as what goes wrong in production comes before what costs build time.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from enginery.core.text import format_bytes
from pipeline.operations.compare.report import (
    SHAPES,
    EngineFacts,
    Flip,
    PairedComparison,
    Recommendation,
    find_fastest,
    is_too_noisy,
)
from validation.plots.texts import seconds_text

# Smaller differences decide nothing: a hundredth of a point of accuracy, one bit, a factor of two.
METRIC_STEP, SQNR_STEP_DB, COST_FACTOR = 1e-4, 6.0, 2.0
# After so many runs per build or start, what those cost is forgotten by everybody.
MOST_RUNS = 1e12


def recommend(facts: Sequence[EngineFacts], pairs: Sequence[PairedComparison], fleet: Sequence[str]) -> Recommendation:
    """The engine to take. pairs: of the fastest, `first` in all of them, against each of the others.  fleet: targets to
    be served.
    """
    entrants = [item for item in facts if item.runs]
    lead = next((item for item in entrants if pairs and item.unit == pairs[0].first), find_fastest(facts))
    if lead is None:
        return Recommendation(None, _why_nothing(facts))
    shown = {pair.second: pair for pair in pairs}
    as_fast = [item for item in entrants if item is lead or _no_slower(shown.get(item.unit))]
    chosen, axis = _narrow(as_fast, lead)
    ties = tuple(item.unit for item in as_fast if item is not chosen)
    reason = _reason(chosen, as_fast, axis, shown, fleet)
    flips = tuple(flip for flip in _flips(chosen, lead, entrants, shown, fleet) if flip.unit != chosen.unit)
    return Recommendation(chosen.unit, reason, ties, flips)


def _why_nothing(facts: Sequence[EngineFacts]) -> str:
    if not facts:
        return "no backend that is installed builds for this target; `enginery backends` says what would"
    unproven = [item for item in facts if item.status == "unproven"]
    if unproven:
        return f"nothing runs here: {unproven[0].unit}: {unproven[0].reason}; compare on a node that has it"
    return f"no engine passed: {facts[0].unit}: {facts[0].reason}"


def _no_slower(pair: PairedComparison | None) -> bool:
    slower = pair is None or pair.verdict not in ("no difference shown", "slower")
    return not slower and not _too_noisy(pair)


def _too_noisy(pair: PairedComparison | None) -> bool:
    return pair is not None and is_too_noisy(pair.verdict, pair.low)


def _narrow(as_fast: list[EngineFacts], lead: EngineFacts) -> tuple[EngineFacts, str | None]:
    """The best of those that are as fast, and the axis that decided; None where nothing but speed did."""
    left = as_fast
    for axis, score, step in AXES:
        best = max(map(score, left))
        kept = [item for item in left if score(item) > best - step]
        if len(kept) < len(left) and len(kept) == 1:
            return kept[0], axis
        left = kept
    # Nothing tells them apart: the one with the least median of its own, which is no proof of anything.
    return (lead if lead in left else left[0]), None


def _portability(item: EngineFacts) -> float:
    return float(len(item.covers))


def _shapes(item: EngineFacts) -> float:
    return -1.0 if item.shapes is None else float(SHAPES.index(item.shapes))


def _metric(item: EngineFacts) -> float:
    return sum(item.metrics.values())


def _sqnr(item: EngineFacts) -> float:
    return item.sqnr_db if item.sqnr_db is not None else 0.0


def _cheapness(item: EngineFacts) -> float:
    """Of a rebuild; a difference of 1 is a factor of two."""
    return -math.log(max(item.build_s or 0.0, 1e-3), COST_FACTOR)


Axis = tuple[str, Callable[[EngineFacts], float], float]
AXES: tuple[Axis, ...] = (
    ("portability", _portability, 1.0),
    ("shapes", _shapes, 1.0),
    ("accuracy", _metric, METRIC_STEP),
    ("accuracy", _sqnr, SQNR_STEP_DB),
    ("rebuild", _cheapness, 1.0),
)


def _reason(
    chosen: EngineFacts,
    as_fast: Sequence[EngineFacts],
    axis: str | None,
    shown: dict[str, PairedComparison],
    fleet: Sequence[str],
) -> str:
    speed = f"{seconds_text(chosen.median_s or 0.0)} a run"
    if len(as_fast) == 1:
        return _reason_alone(speed, shown)
    others = ", ".join(item.unit for item in as_fast if item is not chosen)
    least = f"{speed}; no difference in speed shown to {others}"
    if axis is None:
        return f"{least}, and nothing else tells them apart: either will do"
    why = {
        "portability": f"it builds for {len(chosen.covers)} of the fleet's {len(fleet)} targets",
        "shapes": _shape_words(chosen),
        "accuracy": f"it is nearer to the original ({_accuracy_words(chosen)})",
        "rebuild": f"it builds in {seconds_text(chosen.build_s or 0.0)}, in half the time or less",
    }[axis]
    return f"{least}, and {why}"


def _reason_alone(speed: str, shown: dict[str, PairedComparison]) -> str:
    noisy = ", ".join(pair.second for pair in shown.values() if _too_noisy(pair))
    beaten = [pair for pair in shown.values() if pair.verdict in ("faster", "far faster")]
    if noisy:
        return f"the least median, {speed}; the runs were too noisy to tell whether {noisy} may be as fast"
    return f"the fastest, {speed}{_lead(beaten)}" if beaten else f"the only engine that is proven here, {speed}"


def _lead(beaten: Sequence[PairedComparison]) -> str:
    nearest = max((pair for pair in beaten if pair.ratio is not None), key=lambda pair: pair.ratio or 0, default=None)
    if nearest is None or not nearest.ratio:
        return ""
    sure = "by the times that each had alone"
    if nearest.low and nearest.high:
        sure = f"95 %: {1 / nearest.high:.3g} to {1 / nearest.low:.3g}"
    return f"; the next, {nearest.second}, takes {1 / nearest.ratio:.3g} times as long ({sure})"


def _flips(
    chosen: EngineFacts,
    lead: EngineFacts,
    entrants: Sequence[EngineFacts],
    shown: dict[str, PairedComparison],
    fleet: Sequence[str],
) -> Iterator[Flip]:
    if lead is not chosen:
        detectable = shown[chosen.unit].detectable
        unseen = "" if detectable is None else f" (one of {100 * detectable:.2g} % would have been)"
        condition = f"if speed alone counts, and its lead turns out real: none was shown here{unseen}"
        yield Flip("throughput", lead.unit, condition)
    yield from (Flip("throughput", pair.second, _noisy_words(pair)) for pair in shown.values() if _too_noisy(pair))
    for axis, score, step in AXES:
        best = max(entrants, key=score)
        if score(best) > score(chosen) + step / 2 and score(best) >= score(chosen) + step:
            yield Flip(axis, best.unit, _conditions(axis, chosen, best, fleet))
    yield from _cheaper("start", "load_s", chosen, entrants)
    smallest = min(entrants, key=lambda item: item.memory_bytes or math.inf)
    if COST_FACTOR * (smallest.memory_bytes or math.inf) <= (chosen.memory_bytes or 0):
        sizes = [format_bytes(item.memory_bytes) for item in (smallest, chosen)]
        yield Flip("memory", smallest.unit, f"if memory is short: it takes {sizes[0]}, not {sizes[1]}")


def _noisy_words(pair: PairedComparison) -> str:
    most = 1 / (pair.low or 1)
    return (
        "if longer runs (--seconds) or a quieter machine show it to be no slower: "
        f"by these it may take {most:.3g} times as long, or less time"
    )


def _conditions(axis: str, chosen: EngineFacts, best: EngineFacts, fleet: Sequence[str]) -> str:
    if axis == "portability":
        held = f"{len(best.covers)} of {len(fleet)} targets, not {len(chosen.covers)}"
        return f"if one backend shall serve the fleet ({', '.join(fleet)}): it builds for {held}"
    if axis == "shapes":
        return f"if other sizes come than the chosen one answers: {_shape_words(best)}"
    if axis == "accuracy":
        return f"if the limits are not enough: {_accuracy_words(best)}, not {_accuracy_words(chosen)}"
    found = next(_cheaper("rebuild", "build_s", chosen, [best]), None)
    return found.condition if found else f"if builds are frequent: it builds in {seconds_text(best.build_s or 0.0)}"


def _cheaper(axis: str, name: str, chosen: EngineFacts, entrants: Sequence[EngineFacts]) -> Iterator[Flip]:
    """The engine whose build or start costs half or less, and the number of runs up to which that pays."""
    cost = {item.unit: getattr(item, name) or math.inf for item in entrants}
    best = min(entrants, key=lambda item: cost[item.unit])
    have, slower = getattr(chosen, name) or 0.0, (best.median_s or 0.0) - (chosen.median_s or 0.0)
    if COST_FACTOR * cost[best.unit] > have:
        return
    what = {"rebuild": "a build", "start": "a start"}[axis]
    times = f"{seconds_text(cost[best.unit])}, not {seconds_text(have)}"
    if slower <= 0 or (have - cost[best.unit]) / slower > MOST_RUNS:
        yield Flip(axis, best.unit, f"if {what} costs more than runs do: it takes {times}")
        return
    runs = (have - cost[best.unit]) / slower
    yield Flip(axis, best.unit, f"if fewer than {runs:,.0f} runs follow {what}, which takes {times}")


def _shape_words(item: EngineFacts) -> str:
    words = {"any": "it answers any size", "within": "it answers every size within the spec's dims"}
    return words.get(item.shapes or "", "it answers the sizes that it was built for, and no others")


def _accuracy_words(item: EngineFacts) -> str:
    told = [f"{name} {value:.4f}" for name, value in item.metrics.items()]
    return ", ".join(told + ([] if item.sqnr_db is None else [f"SQNR {item.sqnr_db:.0f} dB"]))
