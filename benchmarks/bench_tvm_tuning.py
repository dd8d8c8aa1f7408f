"""What TVM's tuning brings on this CPU: untuned, and after each of some minutes, against onnxruntime in the same run.

    python -m benchmarks.bench_tvm_tuning [--minutes 2] [--turns 2]

A network of three convolutions at 3x56x56, batch 1. Each turn goes on from the records of the one before. Ratios of
medians with 95 % intervals, engines opened anew and run in blocks in a drawn order (`measurement.paired`).
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from builders.backends import discovery
from builders.backends.onnxruntime import OrtSession
from builders.backends.optional_methods import GIVEN, GROWN
from builders.backends.tvm import Tvm
from enginesmith.core.hardware import machine
from enginesmith.core.types import BuildRequest, Engine, TensorSpec
from validation.latency.measurement.paired import compare_times, run_interleaved

NETWORK = """<ir_version: 9, opset_import: ["" : 17]>
g (float[1, 3, 56, 56] x) => (float[1, 10] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, k1) b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (b, k2) d = Relu(c)
    e = Conv <pads = [1, 1, 1, 1]> (d, k3) f = Relu(e)
    p = GlobalAveragePool(f) q = Flatten(p) y = MatMul(q, w)
}"""
WEIGHTS = {"k1": (32, 3, 3, 3), "k2": (64, 32, 3, 3), "k3": (64, 64, 3, 3), "w": (64, 10)}
RNG = np.random.default_rng(0)
INPUTS = {"x": RNG.standard_normal((1, 3, 56, 56)).astype("f")}


def network(path: Path) -> Path:
    """The model in a file."""
    model = onnx.parser.parse_model(NETWORK)
    for name, shape in WEIGHTS.items():
        array = (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("f")
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


def built(backend: Tvm, model: Path, workdir: Path) -> Engine:
    """An engine, and a line that says how long it took."""
    workdir.mkdir(exist_ok=True)
    cpu = machine.parse_targets("cpu")[0]
    inputs, outputs = (TensorSpec("x", "float32", (1, 3, 56, 56)),), (TensorSpec("y", "float32", (1, 10)),)
    chosen = discovery.options_of(backend), discovery.toolchain_of(backend)
    begun = time.monotonic()
    engine = backend.build(BuildRequest("0" * 64, "fp32", cpu, "tvm", inputs, outputs, (), *chosen), model, workdir)
    print(f"built in {time.monotonic() - begun:.1f} s; {'; '.join(engine.notes) or 'untuned'}", flush=True)
    return engine


def against(backend: Tvm, engine: Engine, model: Path) -> None:
    """Print how many times onnxruntime's latency the engine takes."""
    opens = lambda: backend.open(engine), lambda: OrtSession(model)
    found = compare_times(run_interleaved(opens, INPUTS, seconds=10.0, seed=0))
    median = next(ratio for ratio in found.ratios if ratio.p == 0.5)
    print(f"  {median.ratio:.2f} times onnxruntime's latency ({median.low:.2f} to {median.high:.2f})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = network(place / "model.onnx")
        against(Tvm(), built(Tvm(), model, place / "untuned"), model)
        tuning = Tvm(tune_minutes=chosen.minutes)
        for turn in range(chosen.turns):
            workdir = place / f"turn{turn}"
            workdir.mkdir()
            if turn:
                shutil.copy(place / f"turn{turn - 1}" / GROWN, workdir / GIVEN)
            against(tuning, built(tuning, model, workdir), model)


if __name__ == "__main__":
    main()
