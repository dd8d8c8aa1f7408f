"""What `Session.run` costs over the runtime's own call, for every installed backend that runs here:
`python -m benchmarks.bench_sessions [BACKEND ...]`.

Sums of 1 and of 8 inputs of 32 elements, which the runtimes take microseconds for. The runtime's own call is what
`Session.prepare_call` gives: the inputs are checked and in the runtime's form, the outputs stay in it. Both take turns
in blocks; CPU time, the least of the rounds, and the difference. Of a backend without such a call `run` alone is shown.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from builders.backends import discovery
from enginesmith.core.types import Backend, Target
from pipeline.sources.onnx_model import specs_of
from tests.conformance.trial import backend_of, request_for, target_for
from tests.pipeline.quantization.small_nets import build

CALLS, ROUNDS = 2000, 25


def main() -> None:
    """Build, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", help="default: all that are installed")
    print("| backend | inputs | runtime, µs | Session.run, µs | adds, µs |\n|---|---|---|---|---|")
    for name in parser.parse_args().backends or discovery.names():
        backend = backend_of(name)
        target = target_for(backend) if backend.versions() else None
        if target is None or backend.runs(target):
            continue
        for count in (1, 8):
            with tempfile.TemporaryDirectory() as folder:
                print(f"| {name} | {count} | {cells(backend, target, count, Path(folder))} |", flush=True)


def cells(backend: Backend, target: Target, count: int, folder: Path) -> str:
    """The figures of one row."""
    input_list = ", ".join(f"float[4,8] x{index}" for index in range(count))
    net = build(input_list, "float[4,8] y", f"y = Sum({', '.join(f'x{index}' for index in range(count))})", {})
    path = folder / "net.onnx"
    onnx.save(net, path)
    request = request_for(backend, target, (path, *specs_of(net)), ())
    with backend.open(backend.build(request, path, folder)) as session:
        inputs = {spec.name: np.ones((4, 8), np.float32) for spec in session.inputs}
        calls: list[Callable[[], object]] = [partial(session.run, inputs)]
        if own_call := session.prepare_call(inputs):
            calls.append(own_call)
        rounds = [[micros(call) for call in calls] for _ in range(ROUNDS)]
    min_times = [min(times) for times in zip(*rounds, strict=True)]
    runtime, adds = (f"{min_times[1]:.1f}", f"{min_times[0] - min_times[1]:.1f}") if len(min_times) == 2 else ("", "")
    return f"{runtime} | {min_times[0]:.1f} | {adds}"


def micros(call: Callable[[], object]) -> float:
    """CPU time of one call, in microseconds."""
    start_s = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start_s) / CALLS * 1e6


if __name__ == "__main__":
    main()
