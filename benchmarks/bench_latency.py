"""What the timing loop costs over bare `session.run` calls: `python -m benchmarks.bench_latency [--seconds S]`.

Bare: the mean over a plain loop that reads the clock twice in all. Ours: the mean of what `validation.latency.loop`
measures, and the wall-clock time that it takes for each run. Interleaved, round by round; the median of the rounds'
ratios, with their quartiles.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from builders.onnxruntime import OrtSession
from tests.validation.latency.nets import big_addition, huge_product, many_tiny
from validation.latency.loop import latencies

NETS = {
    "one tiny node": lambda: many_tiny(1),
    "200 tiny nodes": many_tiny,
    "product of 768": huge_product,
    "addition of 16 MB": big_addition,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each side of a round")
    parser.add_argument("--rounds", type=int, default=41)
    chosen = parser.parse_args()
    print("| net | bare, µs a run | our mean over bare | our wall clock over bare |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in NETS.items():
            path = Path(folder) / "net.onnx"
            onnx.save(make(), path)
            print(_row(name, path, chosen.seconds, chosen.rounds), flush=True)


def _row(name: str, path: Path, seconds: float, rounds: int) -> str:
    with OrtSession(path) as session:
        inputs = {spec.name: np.ones(spec.shape, np.float32) for spec in session.inputs}
        latencies(lambda: session.run(inputs), seconds)
        found = [_round(session, inputs, seconds) for _ in range(rounds)]
    bare = statistics.median(item[0] for item in found)
    ratios = [_spread([item[side] / item[0] for item in found]) for side in (1, 2)]
    return f"| {name} | {bare * 1e6:.1f} | {ratios[0]} | {ratios[1]} |"


def _round(session: OrtSession, inputs: dict, seconds: float) -> tuple[float, float, float]:
    begun = time.perf_counter()
    series = latencies(lambda: session.run(inputs), seconds)
    wall = (time.perf_counter() - begun) / len(series)
    begun = time.perf_counter()
    for _ in range(len(series)):
        session.run(inputs)
    bare = (time.perf_counter() - begun) / len(series)
    return bare, float(series.mean()), wall


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
