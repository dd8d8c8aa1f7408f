"""Change points in series of latencies: steps that are found, and alarms on flat series, with noise as measured.

    python -m benchmarks.bench_trend [--series 300] [--seed 0]

A series-year is one point a day for 365 days, looked at after every point: it alarms if any of these looks shows a
change. A step comes after 60 to 300 points of a flat series, and counts as found within 5 points if a look at one of
the first 5 points after it shows a change within 5 points of it, and no look before.

The noise is drawn, with replacement and scaled by sqrt(n / (n - 1)), from the logarithms of ratios and medians that
`enginesmith profile` gave for one engine (examples/digits, fp32, batch 8) again and again on a machine of two cores, of
which other programs used 85 to 93 % all the time. `normal` is normal noise of the same standard deviation.
"""

import argparse
import json
from collections.abc import Callable

import numpy as np

from enginesmith.arrays import Array
from validation.latency.formatting import find_changes

DAYS, STEP, WITHIN = 365, 1.03, 5
FOUND, ALARMS = 0.90, 0.01
# In percent: repeated `profile digits@1 --against digits@1 --seconds 5` (what --record does), the same with 2 s, and
# the median of the runtime's call by `profile --seconds 1`.
MEASURED = {
    "relative, 5 s": (-0.18, -0.32, -1.99, -0.28, -1.03, 0.85, 0.17, -0.54, -1.45, 0.1, -0.42),
    "relative, 2 s": (-0.55, -1.11, 0.89, 1.48, -1.30, 0.84, 2.71, -0.04, 0.03, 1.33, 1.49, 1.07),
    "median, busy machine": (
        -19.6, -15.7, -10.4, 14.6, -8.3, 22.7, -4.5, 20.6, -24.4, -8.9, 8.4, 14.2, 11.0, 10.4,
    ),
}  # fmt: skip
Draw = Callable[[np.random.Generator, int], Array]


def sampler(percents: tuple[float, ...], normal: bool) -> Draw:
    """Draws noise [n] in logarithms with the spread of these measurements."""
    logs = np.array(percents) / 100
    logs = (logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1))
    spread = float(np.std(logs))
    return lambda rng, count: rng.normal(0, spread, count) if normal else rng.choice(logs, count)


def alarms(series: Array) -> bool:
    """Whether any look at a growing series shows a change."""
    return any(find_changes(series[:count]) for count in range(12, len(series) + 1))


def finds(rng: np.random.Generator, draw: Draw, step: float) -> tuple[bool, bool]:
    """Whether a step is found within WITHIN points, and within 10, by a look after each point."""
    number_before = int(rng.integers(60, 300))
    series = np.exp(draw(rng, number_before + 10))
    series[number_before:] *= step
    first_number = next((n for n in range(1, 11) if _near(series[: number_before + n], number_before)), 99)
    return first_number <= WITHIN, first_number <= 10


def _near(series: Array, index: int) -> bool:
    return any(abs(change.index - index) <= WITHIN for change in find_changes(series))


def rates(name: str, percents: tuple[float, ...], normal: bool, count: int, seed: int) -> dict[str, object]:
    """The shares of steps found and of flat series-years that alarm, over `count` of each."""
    rng, draw = np.random.default_rng(seed), sampler(percents, normal)
    is_found = [finds(rng, draw, STEP) for _ in range(count)]
    big_flags = [finds(rng, draw, 1.10) for _ in range(count // 2)]
    wrong_total = sum(alarms(np.exp(draw(rng, DAYS))) for _ in range(count))
    return {
        "noise": f"{name}, {'normal' if normal else 'drawn'}",
        "sd_percent": round(100 * float(np.std(np.array(percents) / 100, ddof=1)), 2),
        "found_within_5": sum(first_flag for first_flag, _ in is_found) / count,
        "found_within_10": sum(second_flag for _, second_flag in is_found) / count,
        "found_10_percent_within_5": sum(first_flag for first_flag, _ in big_flags) / (count // 2),
        "flat_years_alarming": wrong_total / count,
    }


def main() -> None:
    """Print a row for each kind of noise, and whether the bars are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=300, help="series of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="noise whose name begins so")
    chosen = parser.parse_args()
    for name, percents in MEASURED.items():
        for is_normal in (False, True):
            if name.startswith(chosen.only or ""):
                row = rates(name, percents, is_normal, chosen.series, chosen.seed)
                flag = float(str(row["found_within_5"])) >= FOUND and float(str(row["flat_years_alarming"])) <= ALARMS
                print(json.dumps({**row, "series": chosen.series, "bars": "kept" if flag else "missed"}), flush=True)


if __name__ == "__main__":
    main()
