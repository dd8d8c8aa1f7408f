"""How often the sequential test of a fallback rate is wrong, and how soon it finds a rise:
`python -m benchmarks.bench_traffic_drift [--streams 500]`.

Simulated requests, each a fallback or not by itself. Bars: at most 1 false alarm in 100,000 requests at a steady 1 %;
1 % to 3 % found within 2,000 requests after the change in 95 % of 500 streams. The rise comes after a drawn number of
quiet requests, so that the statistic has any value that it has in traffic; streams with an alarm before it count as
missed. `learned` has the rate of the first 10,000 requests for a reference. Exit 1 where a bar is missed.
"""

import argparse
import sys
import time

import numpy as np

from enginesmith.serving.drift import LEARN, RateDriftDetector

STEADY, RISEN, WITHIN = 0.01, 0.03, 2000
QUIET = 100_000
BARS = {"false alarms": 1.0, "found": 0.95}


def first_alarm(detector: RateDriftDetector, stream: np.ndarray) -> int | None:
    """Number of requests of a stream until the alarm; None without one."""
    return next((index + 1 for index, counts in enumerate(stream.tolist()) if detector.add(counts)), None)


def false_alarms(rng: np.random.Generator, streams: int, known: bool) -> float:
    """Alarms in 100,000 requests at a steady rate; each alarm begins the test anew."""
    alarms = 0
    for _ in range(streams):
        left = rng.random(QUIET + (0 if known else LEARN)) < STEADY
        while len(left) and (taken := first_alarm(detector_for(known), left)):
            alarms, left = alarms + 1, left[taken:]
    return alarms / streams


def delays(rng: np.random.Generator, streams: int, known: bool) -> list[float]:
    """Requests from the rise to its alarm for each stream; infinite where it was not found, or there was one before."""
    found = []
    for _ in range(streams):
        quiet = int(rng.integers(1, 10_000)) + (0 if known else LEARN)
        rates = np.repeat([STEADY, RISEN], [quiet, 10 * WITHIN])
        alarm = first_alarm(detector_for(known), rng.random(len(rates)) < rates)
        found.append(alarm - quiet if alarm and alarm > quiet else np.inf)
    return found


def detector_for(known: bool) -> RateDriftDetector:
    """The test with a known reference, or one that learns it."""
    return RateDriftDetector(STEADY if known else None)


def main() -> None:
    """Simulate, print a row for each kind of reference, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--quiet", type=int, default=100, help="streams of 100,000 requests at a steady rate")
    given = parser.parse_args()
    print(
        "| reference | false alarms in 100,000 | found within 2,000 | delay, median | delay, 95 % |\n"
        "|---|---|---|---|---|"
    )
    missed = False
    for known in (True, False):
        rng = np.random.default_rng(0)
        alarms, found = false_alarms(rng, given.quiet, known), np.array(delays(rng, given.streams, known))
        share = float(np.mean(found <= WITHIN))
        missed |= known and (alarms > BARS["false alarms"] or share < BARS["found"])
        name = "known, 1 %" if known else f"learned of {LEARN:,}"
        print(f"| {name} | {alarms:.3g} | {share:.3f} | {np.median(found):.0f} | {np.quantile(found, 0.95):.0f} |")
    detector, calls = RateDriftDetector(STEADY), (np.random.default_rng(1).random(200_000) < STEADY / 2).tolist()
    begun = time.process_time()
    for counts in calls:
        detector.add(counts)
    print(f"{(time.process_time() - begun) / len(calls) * 1e6:.2f} µs of CPU time a request")
    sys.exit(missed)


if __name__ == "__main__":
    main()
