"""What `Session.run` costs over ONNX Runtime's own call, and the timing loop over bare `session.run` calls:
`python -m benchmarks.bench_latency [--seconds S]`.

The first table: `OrtSession.run(inputs)` less `onnxruntime.InferenceSession.run(names, inputs)` of a session with ONNX
Runtime's own defaults, for nets of 1 and of 8 inputs, in blocks that take turns: the differences of the blocks'
medians, their median over the rounds and their quartiles. Beside it the call that `OrtSession.prepare_call` gives.

The second. Bare: the mean over a plain loop that reads the clock twice in all. Ours: the mean of what
`measurement.loop` measures, and the wall-clock time that it takes for each run. Interleaved, round by round; the
median of the rounds' ratios, with their quartiles.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from builders.backends.onnxruntime import OrtSession
from tests.pipeline.quantization.small_nets import build
from tests.validation.latency.nets import big_addition, huge_product, many_tiny
from validation.latency.measurement.loop import latencies

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
    _print_sessions(chosen.seconds, chosen.rounds)
    print("\n| net | bare, µs a run | our mean over bare | our wall clock over bare |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in NETS.items():
            path = Path(folder) / "net.onnx"
            onnx.save(make(), path)
            print(_row(name, path, chosen.seconds, chosen.rounds), flush=True)


def _print_sessions(seconds: float, rounds: int) -> None:
    print("| inputs | onnxruntime, µs | Session.run adds, µs | prepare_call adds, µs |\n|---|---|---|---|")
    for count in (1, 8):
        input_list = ", ".join(f"float[batch,8] x{index}" for index in range(count))
        net = build(input_list, "float[batch,8] y", f"y = Sum({', '.join(f'x{index}' for index in range(count))})", {})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            onnx.save(net, path)
            print(f"| {count} | {_session_cells(path, seconds, rounds)} |", flush=True)


def _session_cells(path: Path, seconds: float, rounds: int) -> str:
    bare_session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with OrtSession(path) as session:
        inputs = {spec.name: np.ones((4, 8), np.float32) for spec in session.inputs}
        calls = (partial(bare_session.run, ["y"], inputs), partial(session.run, inputs), session.prepare_call(inputs))
        medians = [[1e6 * float(np.median(latencies(call, seconds))) for call in calls] for _ in range(rounds)]
    added_texts = [_spread([row[side] - row[0] for row in medians], 1) for side in (1, 2)]
    return f"{statistics.median(row[0] for row in medians):.1f} | {added_texts[0]} | {added_texts[1]}"


def _row(name: str, path: Path, seconds: float, rounds: int) -> str:
    with OrtSession(path) as session:
        inputs = {spec.name: np.ones(spec.shape, np.float32) for spec in session.inputs}
        latencies(lambda: session.run(inputs), seconds)
        rounds_s = [_round(session, inputs, seconds) for _ in range(rounds)]
    bare_median = statistics.median(item[0] for item in rounds_s)
    ratios = [_spread([item[side] / item[0] for item in rounds_s]) for side in (1, 2)]
    return f"| {name} | {bare_median * 1e6:.1f} | {ratios[0]} | {ratios[1]} |"


def _round(session: OrtSession, inputs: dict, seconds: float) -> tuple[float, float, float]:
    start_s = time.perf_counter()
    series = latencies(lambda: session.run(inputs), seconds)
    wall = (time.perf_counter() - start_s) / len(series)
    start_s = time.perf_counter()
    for _ in range(len(series)):
        session.run(inputs)
    bare_s = (time.perf_counter() - start_s) / len(series)
    return bare_s, float(series.mean()), wall


def _spread(values: list[float], digits: int = 3) -> str:
    low, middle_quantile, high = statistics.quantiles(values, n=4)
    return f"{middle_quantile:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
