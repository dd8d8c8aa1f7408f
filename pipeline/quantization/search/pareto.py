"""The trade-off between quality and latency: the front of the points that were run, and the chosen point.

A point is on the front if no other point is as fast and better. Quality is the relative RMS error of the outputs. The
knee is the point farthest below the line from the fastest point of the front to its most accurate one, with latency and
error scaled to their ranges (Satopaa et al., "Finding a Kneedle in a Haystack", ICDCSW 2011). If no point is below the
line, the knee is the fastest.
"""

import math
from collections.abc import Sequence

from enginesmith.core.errors import DataError
from enginesmith.core.text import format_plain
from pipeline.quantization.search.trial import FrontierPoint, in_json
from validation.reporting.quantization import LEAST_DB, decibels_text


def error_of(point: FrontierPoint) -> float:
    """Relative RMS error of the outputs of a point that was run; all SQNR below `LEAST_DB` counts as `LEAST_DB`."""
    return 0.0 if point.sqnr_db is None else 10 ** (-max(point.sqnr_db, LEAST_DB) / 20)


def find_front(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """The points that no other point dominates, the fastest first; of equal points, the first."""
    front = list[FrontierPoint]()
    for point in sorted(points, key=lambda point: (_ms(point), error_of(point))):
        if not front or error_of(point) < error_of(front[-1]):
            front.append(point)
    return front


def find_knee(points: Sequence[FrontierPoint]) -> FrontierPoint:
    """The knee of the front of these points."""
    front = find_front(points)
    first, last = front[0], front[-1]
    ms_range, error_range = _ms(last) - _ms(first) or 1.0, error_of(first) - error_of(last) or 1.0

    def height(point: FrontierPoint) -> float:
        return (_ms(point) - _ms(first)) / ms_range + (error_of(point) - error_of(last)) / error_range

    return min(front, key=lambda point: round(height(point), 9))  # of equal ones, the fastest


def find_within(points: Sequence[FrontierPoint], budget_ms: float, latency: str) -> FrontierPoint:
    """The most accurate of the points within a budget; of equal points, the fastest. latency: source of their times.

    Raises DataError, with the nearest point, if there is none.
    """
    affordable_points = [point for point in points if _ms(point) <= budget_ms]
    if not affordable_points:
        nearest_point, source = min(points, key=_ms), latency or "no target is here, or has known rates"
        raise DataError(
            f"quantization.budget_ms {budget_ms:g} is out of reach: the fastest point takes "
            f"{describe_point(nearest_point)} ({source}); raise the budget"
        )
    return min(affordable_points, key=lambda point: (error_of(point), _ms(point)))


def list_depths(count: int) -> list[int]:
    """The numbers of groups in float at the points that are tried: 0, 1, 2, 4, ... and `count`."""
    return sorted({0, count, *(2**power for power in range(count.bit_length()) if 2**power < count)})


def describe_point(point: FrontierPoint) -> str:
    """'1.234 ms, at 31.2 dB with 97.0 % of the multiplications in the narrow format, 3.0 % in fp8'."""
    quality_text = decibels_text(in_json(point.sqnr_db))
    ms_text = "" if point.ms is None else f"{format_plain(point.ms)} ms, at "
    share_text = f"{100 * point.share:.1f} % of the multiplications in the narrow format{point.mix_text}"
    return f"{ms_text}{quality_text} with {share_text}"


def _ms(point: FrontierPoint) -> float:
    return math.inf if point.ms is None else point.ms
