"""How often the canary's judge is wrong, on simulated canaries: `python -m benchmarks.bench_canary [--simulations N]`.

Per kind of latency, in percent. A candidate exactly at a margin may PASS in at most 5, judged by that quantile alone;
with all criteria and the documented defaults it, and an equal one, may FAIL in at most 5. How often an equal one passes
depends on how much data there is.
"""

import argparse

import numpy as np

from tests.validation.canary.simulated import KINDS, pair_evidence
from validation.canary.judge import judge
from validation.canary.thresholds import Thresholds

CASES = {
    "PASS, p50 at its margin": ({"slower": 0.02}, Thresholds({"p50": 0.02}, None, None), "PASS"),
    "PASS, p99 at its margin": ({"slower": 0.05}, Thresholds({"p99": 0.05}, None, None), "PASS"),
    "FAIL, p50 at its margin": ({"slower": 0.02}, Thresholds(), "FAIL"),
    "FAIL, equal": ({}, Thresholds(), "FAIL"),
    "PASS, equal": ({}, Thresholds(), "PASS"),
}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=400)
    parser.add_argument("--requests", type=int, default=5000)
    chosen = parser.parse_args()
    print(f"{chosen.simulations} canaries of {chosen.requests} requests each, in percent")
    for kind in KINDS:
        counts = dict.fromkeys(CASES, 0)
        for seed in range(chosen.simulations):
            for name, (fault, limits, wanted) in CASES.items():
                evidence = pair_evidence(np.random.default_rng(seed), chosen.requests, kind, **fault)
                counts[name] += judge(evidence, limits, seed=seed, replicates=1000).verdict == wanted
        shown = ", ".join(f"{name} {100 * count / chosen.simulations:.1f}" for name, count in counts.items())
        print(f"{kind:<12} {shown}", flush=True)


if __name__ == "__main__":
    main()
