"""How often canaries with several requests in flight are wrong, on simulated engines: python -m benchmarks.bench_canary_in_flight

Prints the table of docs/canary.md. `bench_canary` has the same for one request at a time.
"""

import argparse

import numpy as np

from tests.validation.canary.simulated_in_flight import MACHINES, in_flight_evidence
from validation.canary.judge import judge
from validation.canary.thresholds import Thresholds

HEAD = "|  | in flight | requests | wrong FAIL, equal | PASS, equal | wrong PASS, p50 at its margin | FAIL, p50 10 % slower |"
P50 = Thresholds({"p50": 0.02}, error_rate=None, quality=None)


def main() -> None:
    """Print a row for each machine and number in flight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--in-flight", type=int, nargs="*", default=[2, 8, 32])
    given = parser.parse_args()
    print(HEAD + "\n" + "|---" * 7 + "|")
    for machine in given.machines:
        for servers in given.in_flight:
            cells = " | ".join(f"{value:.1f}" for value in row(machine, servers, given.requests, given.canaries))
            print(f"| {machine} | {servers} | {given.requests:,} | {cells} |", flush=True)


def row(machine: str, servers: int, requests: int, canaries: int) -> list[float]:
    """Percentages: wrong FAIL and PASS of an equal one, wrong PASS at the margin, FAIL of one 10 % slower."""
    found = np.zeros(4)
    for seed in range(canaries):
        verdicts = [
            judge(
                in_flight_evidence(np.random.default_rng((seed, 16)), requests, servers, machine, slower=slower),
                limits,
                replicates=300,
                seed=seed,
            ).verdict
            for slower, limits in ((0.0, Thresholds()), (0.02, P50), (0.1, Thresholds()))
        ]
        found += [verdicts[0] == "FAIL", verdicts[0] == "PASS", verdicts[1] == "PASS", verdicts[2] == "FAIL"]
    return list(100 * found / canaries)


if __name__ == "__main__":
    main()
