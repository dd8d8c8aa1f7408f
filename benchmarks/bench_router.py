"""What `Router.run` costs over calling the engine's session itself: `python -m benchmarks.bench_router`.

A sum of two inputs [batch, sequence] by ONNX Runtime on one thread, called itself, through a router that pads nothing,
and through one that pads every request to another length and crops its output. CPU time of a call, the rows by turns in
blocks. What a router adds is the least of the rounds over the session's least, as in bench_sessions: others on the same
cores make the same instructions take up to three times as long, and the medians show how much that was. Bar: at most
20 µs by the least, padding included; exit 1 beyond. `batcher` is the
wall time from `submit` to the answer of single requests that do not wait, on top of a router: two switches of threads.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime

from enginesmith.core.state import Padding
from enginesmith.core.types import ShapeProfile, TensorSpec
from enginesmith.serving.batcher import Batcher
from enginesmith.serving.buckets import RoutedEngine
from enginesmith.serving.router import Router
from tests.pipeline.quantization.small_nets import build

CALLS, ROUNDS, BAR_US = 200, 200, 20.0
NAMES = ("ids", "mask")
RULES = {name: {"batch": "repeat", "sequence": 0.0} for name in NAMES}


def main() -> None:
    """Measure, print a row for each way, and compare with the bar."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        shape = "float[batch,sequence]"
        onnx.save(build(", ".join(f"{shape} {name}" for name in NAMES), f"{shape} y", "y = Sum(ids, mask)", {}), path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": session.run(["y"], inputs)[0]}

    inputs = {name: np.ones((2, 30), np.float32) for name in NAMES}
    exact_router, padding = router_of(run, {}), router_of(run, {"sequence": (32,)})
    calls: dict[str, Callable[[], object]] = {
        "session": partial(run, inputs),
        "router": partial(exact_router.run, inputs),
        "router, padding": partial(padding.run, inputs),
    }
    rounds = [[micros(call) for call in calls.values()] for _ in range(ROUNDS)]
    min_counts, middle_counts = ([pick(times) for times in zip(*rounds, strict=True)] for pick in (min, median))
    print("| way | least, µs | adds, µs | median, µs | adds, µs |\n|---|---|---|---|---|")
    for name, low, mid in zip(calls, min_counts, middle_counts, strict=True):
        print(f"| {name} | {low:.1f} | {low - min_counts[0]:.1f} | {mid:.1f} | {mid - middle_counts[0]:.1f} |")
    with Batcher(padding, most=1, wait_s=0.0) as batcher:
        start_s = time.perf_counter()
        for _ in range(CALLS):
            batcher.submit(inputs).result()
        print(f"| batcher | {(time.perf_counter() - start_s) / CALLS * 1e6:.1f} | | | |")
    assert padding.counts().padding_share > 0 and exact_router.counts().padding_share == 0
    sys.exit(max(min_counts) - min_counts[0] > BAR_US)


def router_of(run: Callable[..., dict[str, np.ndarray]], edges: dict[str, tuple[int, ...]]) -> Router:
    """A router over the session. edges: that it pads to."""
    inputs = [TensorSpec(name, "float32", ("batch", "sequence")) for name in NAMES]
    outputs = [TensorSpec("y", "float32", ("batch", "sequence"))]
    profile = ShapeProfile(tuple((name, (1, 1), (8, 64), (8, 64)) for name in NAMES))
    engine = RoutedEngine("cpu fp32 onnxruntime", run, inputs, outputs, [profile])
    return Router([engine], Padding(RULES, edges))


def micros(call: Callable[[], object]) -> float:
    """CPU time of one call, in microseconds."""
    start_s = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start_s) / CALLS * 1e6


if __name__ == "__main__":
    main()
