"""Looking early without cheating: how much of the error a look may spend, and the level that leaves for its tests.

Every look at growing data is another chance to be wrong by luck. Lan & DeMets (Biometrika 70, 1983) spend the error by
the share of the planned data that is there; the spending function here is the one that approximates O'Brien & Fleming's
(1979) boundaries: almost nothing early, almost everything at the end. The boundaries follow by the recursive
integration of Armitage, McPherson & Rowe (JRSS A 132, 1969); Jennison & Turnbull (2000), chapters 7 and 19.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from enginery.core.errors import InputError
from validation.statistics.distributions import NORMAL

LEAST_LEVEL = 1e-9
LEAST_STEP = 0.005
_POINTS, _REACH = 801, 8.0


def spend_error(fraction: float, alpha: float) -> float:
    """The one-sided error that may be used up once `fraction` of the planned data is there."""
    if fraction >= 1.0:
        return alpha
    return 2.0 - 2.0 * NORMAL.cdf(NORMAL.inv_cdf(1.0 - alpha / 2.0) / math.sqrt(fraction))


def level_of(fractions: Sequence[float], alpha: float) -> float:
    """The one-sided level of the test at the last of several looks, each at a share of the planned data in (0, 1].

    One look at everything gives `alpha` itself. Raises InputError for shares that do not rise by 0.005 or more.
    """
    before = 0.0
    for fraction in fractions:
        if not (before + LEAST_STEP <= fraction + 1e-12 and fraction <= 1.0):
            raise InputError(
                f"looks at {', '.join(f'{item:.3f}' for item in fractions)} of the plan: each must have at least "
                f"{LEAST_STEP} more than the one before it, and the last at most 1"
            )
        before = fraction
    return _level(tuple(float(fraction) for fraction in fractions), alpha)


@lru_cache(maxsize=256)
def _level(fractions: tuple[float, ...], alpha: float) -> float:
    """Walk through the looks, carrying the density of the statistic where no boundary was crossed yet."""
    start, level = fractions[0], max(spend_error(fractions[0], alpha), LEAST_LEVEL)
    bound = NORMAL.inv_cdf(1.0 - level) * math.sqrt(start)
    grid = np.linspace(-_REACH * math.sqrt(start), bound, _POINTS)
    density = np.exp(-(grid**2) / (2 * start)) / math.sqrt(2 * math.pi * start)
    for before, fraction in pairwise(fractions):
        wide, after = _diffuse(grid, density, fraction, fraction - before)
        bound = _find_boundary(wide, after, max(spend_error(fraction, alpha) - spend_error(before, alpha), LEAST_LEVEL))
        level = 1.0 - NORMAL.cdf(bound / math.sqrt(fraction))
        grid = np.linspace(wide[0], bound, _POINTS)
        density = np.interp(grid, wide, after)
    return max(level, LEAST_LEVEL)


def _diffuse(grid: np.ndarray, density: np.ndarray, fraction: float, step: float) -> tuple[np.ndarray, np.ndarray]:
    """The density one look later, before its boundary is drawn."""
    wide = np.linspace(-_REACH * math.sqrt(fraction), _REACH * math.sqrt(fraction), 2 * _POINTS)
    kernel = np.exp(-((wide[:, None] - grid[None, :]) ** 2) / (2 * step)) / math.sqrt(2 * math.pi * step)
    weights = np.full(len(grid), grid[1] - grid[0])
    weights[[0, -1]] /= 2
    return wide, kernel @ (density * weights)


def _find_boundary(wide: np.ndarray, density: np.ndarray, share: float) -> float:
    """Where the upper tail of a density holds `share`."""
    width = wide[1] - wide[0]
    tail = np.concatenate([np.cumsum((density[::-1][:-1] + density[::-1][1:]) / 2 * width)[::-1], [0.0]])
    return float(np.interp(-share, -tail, wide))
