"""What `Streams` and `Generator` add to a step of a model with state: `python -m benchmarks.bench_streams`.

Both sides run onnxruntime's own call on one graph; one of them hands the state on by hand. A recurrent net, and
attention over a cache that grows over 12 steps and begins anew. They take turns in blocks of steps; CPU time, the least
of the rounds, and the difference. A decoder, too: by hand its caches and its greedy token are handed on, and
`Generator` answers a prompt; drawn tokens cost what makes their numbers.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from builders.reference import open_interpreter
from enginesmith.core.state import State
from enginesmith.core.types import Tensors
from enginesmith.generation import GREEDY, Decoder, Generator, Prompt, SamplingSettings
from enginesmith.streams import Streams
from pipeline.spec.model import ModelSpec, load_spec
from tests.decoding import REQUEST, VOCABULARY, WIDTH, make_decoder
from tests.stateful import CACHED, RECURRENT, write_stateful

STEPS, BLOCKS, ROUNDS = 12, 100, 25
# Tokens of an answer.
ANSWER = 48


def main() -> None:
    """Measure and print."""
    print("| model | rows | by hand, µs a step | Streams, µs a step | adds, µs |\n|---|---|---|---|---|")
    for family in (RECURRENT, CACHED):
        with tempfile.TemporaryDirectory() as folder:
            spec = load_spec(write_stateful(Path(folder) / "project", family))
            for rows in (1, 8):
                print(f"| {spec.model} | {rows} | {cells(spec, rows)} |", flush=True)

    for settings in (GREEDY, SamplingSettings(0.8, 5, 0.9, 1.1)):
        for rows in (1, 8):
            print(f"| decoder, {settings} | {rows} | {decoder_cells(settings, rows)} |", flush=True)


def decoder_cells(settings: SamplingSettings, rows: int) -> str:
    """The figures of one row, of a decoder."""
    session = open_interpreter(make_decoder().SerializeToString(), "the decoder", threads=1)
    names = [output.name for output in session.get_outputs()]

    def run(fed: Tensors) -> Tensors:
        return dict(zip(names, session.run(names, fed), strict=True))

    end_fields, ids = {"length": (0, ANSWER)}, REQUEST.inputs[0]
    decoder = Decoder(REQUEST.inputs, (State("past", "present"),), end_fields, ids, "logits", VOCABULARY, rows, 1)
    generator, prompts = Generator(run, decoder), [Prompt([1], settings, ANSWER, seed) for seed in range(rows)]
    first_fields = {"past": np.zeros((rows, 0, WIDTH), np.float32), "ids": np.ones((rows, 1), int)}
    return figures((partial(decode_by_hand, run, first_fields), partial(generator.generate, prompts)), ANSWER)


def decode_by_hand(run: Callable[[Tensors], Tensors], held: Tensors) -> None:
    """A sequence whose caches and tokens this code hands on."""
    for _ in range(ANSWER):
        answer = run(held)
        held = {"past": answer["present"], "ids": np.asarray(answer["logits"]).argmax(-1)[:, None]}


def figures(sides: Sequence[Callable[[], object]], steps: int) -> str:
    """CPU time of a step of both sides, and the difference. steps: of a call of each."""
    min_times = [
        min(times) for times in zip(*([micros(side, steps) for side in sides] for _ in range(ROUNDS)), strict=True)
    ]
    return f"{min_times[0]:.1f} | {min_times[1]:.1f} | {min_times[1] - min_times[0]:.1f}"


def cells(spec: ModelSpec, rows: int) -> str:
    """The figures of one row."""
    session = open_interpreter(spec.file("model.onnx"), "the model", threads=1)
    names = [output.name for output in session.get_outputs()]
    (state,) = spec.states()
    shape = {"h": (1, rows, 16), "past": (rows, 0, 8)}[state.input]
    first_array, inputs = np.zeros(shape, np.float32), {"x": np.ones((rows, *spec.inputs["x"].shape[1:]), np.float32)}

    def run(fed: Tensors) -> Tensors:
        return dict(zip(names, session.run(names, fed), strict=True))

    streams = Streams(run, spec.tensors(), spec.states(), {dim.name: (dim.min, dim.max) for dim in spec.named_dims()})
    return figures((partial(by_hand, run, inputs, state, first_array), partial(by_streams, streams, inputs)), STEPS)


def by_hand(run: Callable[[Tensors], Tensors], inputs: Tensors, state: State, held: np.ndarray) -> None:
    """A sequence whose state this code hands on."""
    for _ in range(STEPS):
        held = run({**inputs, state.input: held})[state.output]


def by_streams(streams: Streams, inputs: Tensors) -> None:
    """The same sequence by `Streams`."""
    streams.reset()
    for _ in range(STEPS):
        streams.run(inputs)


def micros(sequence: Callable[[], object], steps: int) -> float:
    """CPU time of one step, in microseconds."""
    start_s = time.process_time()
    for _ in range(BLOCKS * STEPS // steps):
        sequence()
    return (time.process_time() - start_s) / (BLOCKS * STEPS // steps * steps) * 1e6


if __name__ == "__main__":
    main()
