"""A criterion as text: its interval, and which effects its data can show."""

import math
from collections.abc import Sequence

from enginesmith.core.text import pluralize
from validation.canary.judging.criteria import Criterion, is_finite


def describe(item: Criterion) -> str:
    """'latency p50: +3.1 % (+2.4 % to +3.7 %), margin +2 %'."""
    return f"{item.name}: {describe_measured(item, of=('INSUFFICIENT',))}"


def describe_measured(item: Criterion, of: tuple[str, ...] = ("PASS", "FAIL", "INSUFFICIENT")) -> str:
    """A criterion's note, or its estimate, interval and margin; if its verdict is one of `of`, `describe_power` too."""
    if item.note:
        return item.note
    estimate, margin = (describe_value(value, item.kind) for value in (item.estimate, item.margin))
    found = f"{estimate} ({describe_interval(item)}), margin {margin}"
    return f"{found}; {describe_power(item)}" if item.verdict in of else found


def describe_interval(item: Criterion) -> str:
    """'+2.4 % to +3.7 %', 'at most +3.7 %' where the other bound is not known, or 'without bounds'."""
    low, high = (describe_value(end, item.kind) for end in (item.low, item.high))
    from_below = is_finite(item.low) and (item.kind != "latency" or item.low > -1.0)
    if from_below and is_finite(item.high):
        return f"{low} to {high}"
    return f"at least {low}" if from_below else f"at most {high}" if is_finite(item.high) else "without bounds"


def describe_power(item: Criterion) -> str:
    """What so many requests would have shown with a power of 0.8, and what was assumed.

    That is the smallest effect that would have failed, and the smallest margin at which an equal candidate would have
    passed. Shares of all requests are left out.
    """
    parts = [
        text.format(describe_value(value, item.kind))
        for text, value in (("{} or more", item.detectable), ("an equal candidate to be within {}", item.provable))
        if is_finite(value) and (item.kind != "share" or round(value, 3) < 1.0)
    ]
    found = pluralize(item.requests, "request")
    found += f" would have shown {', and '.join(parts)}" if parts else " can show no difference"
    return f"{found}; {item.assumed}" if item.assumed else found


def describe_needed(criteria: Sequence[Criterion], requests: int, seconds: float | None) -> str:
    """About how many requests, and seconds of such traffic, would let an equal candidate pass; '' where none would.

    requests, seconds: how many requests there were, and in what time; None: the time is not known.
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
