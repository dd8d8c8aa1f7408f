"""What `Streams` adds to a step of a model with state: `python -m benchmarks.bench_streams`.

Both sides run onnxruntime's own call on one graph; one of them hands the state on by hand. A recurrent net, and
attention over a cache that grows over 12 steps and begins anew. They take turns in blocks of steps; CPU time, the least
of the rounds, and the difference.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from builders.reference import open_interpreter
from enginery.core.state import State
from enginery.core.types import Tensors
from enginery.streams import Streams
from pipeline.spec.model import ModelSpec, load_spec
from tests.stateful import CACHED, RECURRENT, write_stateful

STEPS, BLOCKS, ROUNDS = 12, 100, 25


def main() -> None:
    """Measure and print."""
    print("| model | rows | by hand, µs a step | Streams, µs a step | adds, µs |\n|---|---|---|---|---|")
    for given in (RECURRENT, CACHED):
        with tempfile.TemporaryDirectory() as folder:
            spec = load_spec(write_stateful(Path(folder) / "project", given))
            for rows in (1, 8):
                print(f"| {spec.model} | {rows} | {cells(spec, rows)} |", flush=True)


def cells(spec: ModelSpec, rows: int) -> str:
    """The figures of one row."""
    session = open_interpreter(spec.file("model.onnx"), "the model", threads=1)
    names = [output.name for output in session.get_outputs()]
    (state,) = spec.states()
    shape = {"h": (1, rows, 16), "past": (rows, 0, 8)}[state.input]
    first, inputs = np.zeros(shape, np.float32), {"x": np.ones((rows, *spec.inputs["x"].shape[1:]), np.float32)}

    def run(fed: Tensors) -> Tensors:
        return dict(zip(names, session.run(names, fed), strict=True))

    streams = Streams(run, spec.tensors(), spec.states(), {dim.name: (dim.min, dim.max) for dim in spec.named_dims()})
    sides = partial(by_hand, run, inputs, state, first), partial(by_streams, streams, inputs)
    least = [min(times) for times in zip(*([micros(side) for side in sides] for _ in range(ROUNDS)), strict=True)]
    return f"{least[0]:.1f} | {least[1]:.1f} | {least[1] - least[0]:.1f}"


def by_hand(run: Callable[[Tensors], Tensors], inputs: Tensors, state: State, held: np.ndarray) -> None:
    """A sequence whose state this code hands on."""
    for _ in range(STEPS):
        held = run({**inputs, state.input: held})[state.output]


def by_streams(streams: Streams, inputs: Tensors) -> None:
    """The same sequence by `Streams`."""
    streams.reset()
    for _ in range(STEPS):
        streams.run(inputs)


def micros(sequence: Callable[[], object]) -> float:
    """CPU time of one step, in microseconds."""
    begun = time.process_time()
    for _ in range(BLOCKS):
        sequence()
    return (time.process_time() - begun) / (BLOCKS * STEPS) * 1e6


if __name__ == "__main__":
    main()
