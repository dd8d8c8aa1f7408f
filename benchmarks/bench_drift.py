"""How fast and in how much memory a pair of large outputs is compared, beside Polygraphy where it is installed.

    python -m benchmarks.bench_drift [--megabytes 200]        # pip install polygraphy for the row beside

GB/s count both arrays. Each row runs in a process of its own: GB per second of CPU time and of wall time, and the peak
of resident memory beyond the two arrays. `read` is the limit: one pass that adds up both arrays. `samples` measures the
slices and the variation over the samples too. The rows take turns, `--rounds` times; the best round counts.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

ROWS = ("read", "enginesmith, one thread", "enginesmith, one thread, samples", "enginesmith", "polygraphy")
ROUNDS = 3


def pair(megabytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of 1,000 classes, and the same with noise."""
    rng, rows = np.random.default_rng(0), megabytes * 250
    expected = rng.standard_normal((rows, 1000), np.float32)
    actual = expected.copy()
    for start in range(0, rows, 1000):
        block = actual[start : start + 1000]
        block += 1e-3 * rng.standard_normal(block.shape, np.float32)
    return expected, actual


def work(row: str, expected: np.ndarray, actual: np.ndarray) -> Callable[[], object]:
    """The call that is measured."""
    if row == "read":
        return lambda: (expected.sum(), actual.sum())
    if row == "polygraphy":
        return polygraphy(expected, actual)
    from validation.metrics.drift import measure

    threads, samples = 1 if "one" in row else 0, len(expected) if "samples" in row else None
    return lambda: measure(expected, actual, threads=threads, samples=samples)


def polygraphy(expected: np.ndarray, actual: np.ndarray) -> Callable[[], object]:
    """Its comparison of two runs by tolerances, with its statistics of errors, quietly."""
    from polygraphy.comparator import Comparator, CompareFunc, IterationResult, RunResults
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    runs = [(name, [IterationResult({"y": array})]) for name, array in (("a", expected), ("b", actual))]
    return lambda: Comparator.compare_accuracy(RunResults(runs), compare_func=CompareFunc.simple(atol=1, rtol=1))


def measure_row(row: str, megabytes: int) -> dict[str, float]:
    """In this process: the best of three."""
    expected, actual = pair(megabytes)
    call = work(row, expected, actual)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    walls, cpus = [], []
    for _ in range(1 if row == "polygraphy" else ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    extra_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    both = 2 * expected.nbytes / 1e9
    return {"gb_per_cpu_s": both / min(cpus), "gb_per_s": both / min(walls), "extra_mb": extra_peak / 1024}


def main() -> None:
    """Measure every row in a fresh process and print the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="of each array")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure_row(options.row, options.megabytes)))
        return
    best_rows: dict[str, dict[str, float]] = {}
    for row in ROWS * options.rounds:
        if row == "polygraphy" and importlib.util.find_spec("polygraphy") is None:
            print("polygraphy is not installed; its row is left out", file=sys.stderr)
            continue
        command = [sys.executable, __file__, "--row", row, "--megabytes", str(options.megabytes)]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        done_result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        values = {name: round(value, 2) for name, value in json.loads(done_result.stdout).items()}
        best_rows[row] = max(best_rows.get(row, values), values, key=lambda item: item["gb_per_cpu_s"])
        print(row, values, file=sys.stderr)
    print(json.dumps(best_rows, indent=2))


if __name__ == "__main__":
    main()
