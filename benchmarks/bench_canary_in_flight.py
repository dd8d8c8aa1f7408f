"""How often canaries with several requests in flight are wrong: python -m benchmarks.bench_canary_in_flight

Simulated engines (`tests.validation.canary.simulated_in_flight`). Prints the table of
docs/concepts/canary-statistics.md; `bench_canary` has the one for one request at a time.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from tests.validation.canary.simulated_in_flight import MACHINES, in_flight_evidence
from validation.canary.judging.judge import judge
from validation.canary.judging.thresholds import Thresholds

ALL = Thresholds()
P50 = Thresholds({"p50": 0.02}, error_rate=None, quality=None)
# What is counted: how much slower the candidate is, what it is judged by, the verdict.
CASES = {
    "wrong FAIL, equal": (0.0, ALL, "FAIL"),
    "PASS, equal": (0.0, ALL, "PASS"),
    "wrong PASS, p50 at its margin": (0.02, P50, "PASS"),
    "wrong PASS, p50 3 % slower": (0.03, P50, "PASS"),
    "FAIL, 10 % slower": (0.1, ALL, "FAIL"),
}


def main() -> None:
    """Print a row for each number in flight and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canaries", type=int, default=500, help="a row, a fourth of them on each machine")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--machines", nargs="*", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--in-flight", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--loads", type=float, nargs="*", default=[0.3, 0.7])
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE", default=list(CASES))
    parser.add_argument("--seed", type=int, default=16)
    names = parser.parse_args()
    columns = ("in flight", "load", "requests", *names.cases)
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for servers in names.in_flight:
        for load in names.loads:
            rows = [
                count_verdicts(machine, servers, load, names.requests, names.canaries // 4, names.cases, names.seed)
                for machine in names.machines
            ]
            rates = 100 * np.mean(rows, axis=0)
            cells = " | ".join(f"{value:.1f}" for value in rates)
            print(f"| {servers} | {load:.0%} | {names.requests:,} | {cells} |", flush=True)


def count_verdicts(
    machine: str, servers: int, load: float, requests: int, canaries: int, cases: Sequence[str], first: int
) -> list[float]:
    """The share of canaries on a machine with the verdict of each case. Seeds differ from machine to machine."""
    verdict_counts = np.zeros(len(cases))
    for number in range(canaries):
        judged_states: dict[tuple[float, int], str] = {}
        for column, case in enumerate(cases):
            slower_side, limits, verdict = CASES[case]
            key = (slower_side, id(limits))
            if key not in judged_states:
                rng = np.random.default_rng((number, first, list(MACHINES).index(machine)))
                evidence = in_flight_evidence(rng, requests, servers, machine, load, slower_side)
                judged_states[key] = judge(evidence, limits, replicates=300, seed=number).verdict
            verdict_counts[column] += judged_states[key] == verdict
    return [float(value) for value in verdict_counts / canaries]


if __name__ == "__main__":
    main()
