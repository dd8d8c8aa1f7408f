"""How often canaries with several requests in flight are wrong: python -m benchmarks.bench_canary_in_flight

Simulated engines (`tests.validation.canary.simulated_in_flight`). Prints the table of docs/canary.md; `bench_canary`
has the one for one request at a time.
"""

import argparse

import numpy as np

from tests.validation.canary.simulated_in_flight import MACHINES, in_flight_evidence
from validation.canary.judge import judge
from validation.canary.thresholds import Thresholds

COLUMNS = (
    "",
    "in flight",
    "load",
    "wrong FAIL, equal",
    "PASS, equal",
    "wrong PASS, p50 at its margin",
    "FAIL, 10 % slower",
)
P50 = Thresholds({"p50": 0.02}, error_rate=None, quality=None)


def main() -> None:
    """Print a row for each machine, number in flight and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--in-flight", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--loads", type=float, nargs="*", default=[0.3, 0.7])
    parser.add_argument("--seed", type=int, default=16)
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for machine in given.machines:
        for servers in given.in_flight:
            for load in given.loads:
                found = row(machine, servers, load, given.requests, given.canaries, given.seed)
                cells = " | ".join(f"{value:.1f}" for value in found)
                print(f"| {machine} | {servers} | {load:.0%} | {cells} |", flush=True)


def row(machine: str, servers: int, load: float, requests: int, canaries: int, first: int) -> list[float]:
    """Percentages: wrong FAIL and PASS of an equal one, wrong PASS at the margin, FAIL of one 10 % slower."""
    found = np.zeros(4)
    for number in range(canaries):
        verdicts = []
        for slower, limits in ((0.0, Thresholds()), (0.02, P50), (0.1, Thresholds())):
            rng = np.random.default_rng((number, first))
            evidence = in_flight_evidence(rng, requests, servers, machine, load, slower)
            verdicts.append(judge(evidence, limits, replicates=300, seed=number).verdict)
        found += [verdicts[0] == "FAIL", verdicts[0] == "PASS", verdicts[1] == "PASS", verdicts[2] == "FAIL"]
    return [float(value) for value in 100 * found / canaries]


if __name__ == "__main__":
    main()
