"""Which groups a floor leaves in float: from all groups in int8 down to the first point that holds it.

The damages of single groups say which point to try next; whether it holds the floor is measured on the whole model.
A floor that cannot do its work ends in an error: one that nothing can miss, and one that nothing reaches.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from enginery.core.errors import DataError
from enginery.core.types import Tensors
from pipeline.quantization.search.choice import FrontierPoint
from pipeline.quantization.search.quality import Quality, SearchFloor
from pipeline.quantization.search.sensitivity import decides


def check_decisions(outputs: Tensors) -> None:
    """Raises DataError when no output of the model holds decisions: a floor of these would hold whatever int8 does."""
    if not any(decides(values) for values in outputs.values()):
        raise DataError(
            "quantization.floor.argmax_agreement: every output has one value along its last axis, whose argmax cannot "
            "change; ask for sqnr_db or cosine"
        )


def check_reached(floor: SearchFloor, found: Quality) -> None:
    """Raises DataError when the search ended without reaching the floor: not even the float model (found) does."""
    if not found.finite:
        raise DataError(
            "quantization.floor cannot be judged: the float model itself gives NaN or infinities on the calibration "
            "samples; correct the samples or the model"
        )
    if floor.accuracy is not None and (found.accuracy is None or found.accuracy < floor.accuracy):
        own = "was not measured" if found.accuracy is None else f"has {found.accuracy:.4f} on the calibration samples"
        raise DataError(
            f"quantization.floor.accuracy {floor.accuracy:g} is out of reach: the float model itself {own}; "
            "ask for less, or correct calibration.labels"
        )


# Groups that are tried to be swapped, each by two runs of the whole model.
_MOST_SWAPS = 8


class Trial(Protocol):
    """What is known of a model while points are tried. ranked: groups by damage per multiplication, worst first.

    macs: multiplications by group.  qualities: by the groups left in float, of points that were run.
    """

    @property
    def ranked(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def macs(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def qualities(self) -> Mapping[tuple[str, ...], Quality]: ...  # noqa: D102
    def predicted_db(self, left: Sequence[str]) -> float: ...  # noqa: D102
    def point(self, left: Sequence[str]) -> FrontierPoint: ...  # noqa: D102


def find_shallowest(trial: Trial, floor: SearchFloor, tried: dict[int, FrontierPoint]) -> int:
    """The least number of top-ranked groups to leave in float, by bisection; every step runs the whole model."""

    def holds(depth: int) -> bool:
        if depth not in tried:
            tried[depth] = trial.point(trial.ranked[:depth])
        return floor.holds(trial.qualities[tried[depth].left])

    low, high = 0, len(trial.ranked)
    while low < high:
        middle = (low + high) // 2 if 0 in tried else 0
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    holds(low)
    return low


def refill_groups(trial: Trial, floor: SearchFloor, point: FrontierPoint) -> FrontierPoint:
    """The point with groups taken back into int8 that the floor allows, those that compute most first."""
    for group in sorted(point.left, key=lambda name: -trial.macs[name]):
        left = tuple(name for name in point.left if name != group)
        if floor.sqnr_db is not None and trial.predicted_db(left) < floor.sqnr_db:
            continue
        other = trial.point(left)
        if floor.holds(trial.qualities[other.left]):
            point = other
    return point


def swap_groups(trial: Trial, floor: SearchFloor, point: FrontierPoint) -> FrontierPoint:
    """The point with groups taken back into int8 and smaller ones left in float instead, which together compute less.

    Only for a floor in decibels, which can be predicted: a group is often more than what is missing.
    """
    if floor.sqnr_db is None:
        return point
    for group in sorted(point.left, key=lambda name: -trial.macs[name])[:_MOST_SWAPS]:
        left = _smaller(trial, floor.sqnr_db, tuple(name for name in point.left if name != group), trial.macs[group])
        if left is not None:
            other = trial.point(left)
            if floor.holds(trial.qualities[other.left]):
                point = other
    return point


def _smaller(trial: Trial, sqnr_db: float, left: tuple[str, ...], most: float) -> tuple[str, ...] | None:
    """`left` with more groups, of less than `most` multiplications together, that should reach the floor; or None."""
    start = trial.point(left)
    # What interactions cost beyond the sum of damages is taken to stay the same over so small a step.
    beyond = trial.predicted_db(left) - start.sqnr_db if start.sqnr_db is not None else 0.0
    spent = 0.0
    for name in trial.ranked:
        if name in left or spent + trial.macs[name] >= most:
            continue
        left, spent = (*left, name), spent + trial.macs[name]
        if trial.predicted_db(left) - beyond >= sqnr_db:
            return left
    return None
