"""A criterion in words: its interval, and what this much data can show."""

import math
from collections.abc import Sequence

from enginery.core.text import pluralize
from validation.canary.judging.criteria import Criterion, is_finite


def describe(item: Criterion) -> str:
    """One line for people: 'latency p50: +3.1 % (+2.4 % to +3.7 %), margin +2 %'."""
    return f"{item.name}: {describe_measured(item, of=('INSUFFICIENT',))}"


def describe_measured(item: Criterion, of: tuple[str, ...] = ("PASS", "FAIL", "INSUFFICIENT")) -> str:
    """A criterion's note, or its estimate, interval and margin; for the verdicts `of`, what the data can
    show as well."""
    if item.note:
        return item.note
    found = f"{describe_value(item.estimate, item.kind)} ({describe_interval(item)}), "
    found += f"margin {describe_value(item.margin, item.kind)}"
    return f"{found}; {describe_power(item)}" if item.verdict in of else found


def describe_interval(item: Criterion) -> str:
    """'+2.4 % to +3.7 %', 'at most +3.7 %' where nothing is known of the other end, or 'without bounds'."""
    low, high = (describe_value(end, item.kind) for end in (item.low, item.high))
    from_below = is_finite(item.low) and (item.kind != "latency" or item.low > -1.0)
    if from_below and is_finite(item.high):
        return f"{low} to {high}"
    return f"at least {low}" if from_below else f"at most {high}" if is_finite(item.high) else "without bounds"


def describe_power(item: Criterion) -> str:
    """Which effect this many requests would have failed, which margin an equal candidate would have passed at (power
    0.8 both), and what was assumed."""
    detectable, provable = (describe_value(value, item.kind) for value in (item.detectable, item.provable))
    found = pluralize(item.requests, "request")
    parts = [f"{detectable} or more"] if _says(item, item.detectable) else []
    parts += [f"an equal candidate to be within {provable}"] if _says(item, item.provable) else []
    found += f" would have shown {', and '.join(parts)}" if parts else " can show no difference"
    return f"{found}; {item.assumed}" if item.assumed else found


def describe_needed(criteria: Sequence[Criterion], requests: int, seconds: float | None) -> str:
    """How many requests would likely suffice for an equal candidate, and how many seconds of such traffic. '' where no
    number of them does, or nothing tells.

    requests, seconds: how many there were, and in what time; None: no time is known.
    """
    lacking = [item for item in criteria if item.verdict == "INSUFFICIENT"]
    if not lacking or any(item.needed is None for item in lacking):
        return ""
    count = max(item.needed or 0 for item in lacking)
    if count <= requests:
        return "an equal candidate would likely have passed with as many: it may be slower, by about the margin"
    found = f"some {_round_up(count)} requests"
    if seconds is not None:
        found += f" ({_round_up(math.ceil(seconds * count / requests))} s of such traffic)"
    if any(item.note for item in lacking):
        return f"{found} or more are needed for a verdict"
    return f"{found} would likely suffice for an equal candidate"


def _round_up(count: int) -> int:
    """A count to two digits, rounded up."""
    step = int(10 ** max(len(str(count)) - 2, 0))
    return math.ceil(count / step) * step


def describe_value(value: float | None, kind: str) -> str:
    """A criterion's number with its unit: points of score, or percent."""
    if value is None:
        return "unknown"
    return f"{value:+.3g}" if kind == "score" else f"{100 * value:+.3g} %"


def _says(item: Criterion, value: float | None) -> bool:
    """Whether an effect is known, and, for a share, is less than all requests."""
    return is_finite(value) and (item.kind != "share" or round(value, 3) < 1.0)
