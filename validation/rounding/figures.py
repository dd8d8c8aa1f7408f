"""What `honest_rounding` finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from validation.drift import Drift
from validation.slices import AxisSums, Slices


@dataclass(frozen=True)
class Honest:
    """By output and kind of case ('golden', 'edge'), the drift that honest rounding adds.

    reason: why it is not known; empty where it is.
    """

    drifts: Mapping[tuple[str, str], Drift] = field(default_factory=dict)
    reason: str = ""


def greatest(drifts: Sequence[Drift], usual: Drift) -> Drift:
    """A drift that has the worst of some in each metric, of slices the most energy per element.

    usual: of the golden set, by whose variation over the samples all are measured: an edge may hold one sample.
    """
    worst = min(drifts, key=lambda drift: drift.sqnr_db)
    drifts = [item.scaled(worst.exponent) for item in drifts]
    most = max(item.error_sq / item.count for item in drifts) * worst.count
    variation = usual.scaled(worst.exponent).centered_sq / usual.count * worst.count
    return replace(
        worst,
        max_abs=worst.peak * max(item.max_rel for item in drifts),
        centered_sq=variation * worst.error_sq / most if most else 0.0,
        slices=_greatest_slices([item.slices for item in drifts if item.slices]),
    )


def _greatest_slices(found: Sequence[Slices]) -> Slices | None:
    if not found:
        return None
    axes = {}
    for axis in sorted({axis for slices in found for axis in slices.axes}):
        sums = [slices.axes[axis] for slices in found if axis in slices.axes]
        energies = np.zeros((len(sums), max(len(item.count) for item in sums)))
        for row, item in zip(energies, sums, strict=True):
            np.divide(item.error_sq, item.count, out=row[: len(item.count)], where=item.count > 0)
        ones = np.ones(energies.shape[1])
        axes[axis] = AxisSums(ones, ones, energies.max(axis=0), ones)
    return Slices(axes, 0.0, 0, None, 0.0)
