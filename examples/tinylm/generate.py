"""Writes text with a pulled engine, byte by byte: `python generate.py "The value of"`, after `enginery build`.

Sampling is here, and not in the graph: what the engine gives are logits. A context that is full begins anew with its
later half.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import onnxruntime as ort

import enginery

Choice: TypeAlias = Callable[[np.ndarray], int]
CONTEXT = 128  # dims.past.max of tinylm.yaml, and the byte that is read


def pull(registry: str, precision: str, dest: str) -> enginery.Streams:
    """A stream over the newest engine of a precision for this machine's CPU."""
    pulled = enginery.pull("tinylm:candidate", registry=registry, target="cpu", precision=precision, dest=dest)
    session = ort.InferenceSession(str(pulled.path))
    names = [output.name for output in session.get_outputs()]
    return enginery.Streams.described(
        lambda given: dict(zip(names, session.run(names, given), strict=True)), pulled.description
    )


def generate(streams: enginery.Streams, prompt: bytes, choose: Choice) -> Iterator[int]:
    """The bytes after a prompt, without end. choose: a byte from its logits [256]."""
    streams.reset()
    read: list[int] = []
    unread = list(prompt or b"\n")[-CONTEXT:]
    while True:
        for byte in unread:
            logits = streams.run({"ids": np.array([[byte]])})["logits"][0]
        read += unread
        unread = [choose(logits)]
        yield unread[0]
        if len(read) == CONTEXT:
            streams.reset()
            read, unread = [], [*read[CONTEXT // 2 :], *unread]


def sampler(seed: int = 0, temperature: float = 1.0, top_k: int = 256, top_p: float = 1.0) -> Choice:
    """Draws a byte from logits [256], by a seed: of the top_k likeliest, of these the fewest that have the share top_p
    (Holtzman et al., "The curious case of neural text degeneration", 2019). temperature 0: the likeliest, always."""
    rng = np.random.default_rng(seed)

    def choose(logits: np.ndarray) -> int:
        order = np.argsort(-logits, kind="stable")[: max(top_k, 1)]
        if not temperature:
            return int(order[0])
        scaled = logits[order].astype(np.float64) / temperature
        chances = np.exp(scaled - scaled[0])
        chances /= chances.sum()
        chances *= np.cumsum(chances) - chances < top_p  # those before it do not have the share yet
        return int(rng.choice(order, p=chances / chances.sum()))

    return choose


def main() -> None:
    """Pull, and print a prompt with what follows it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--registry", default="registry")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--count", type=int, default=200, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest byte")
    parser.add_argument("--top-k", type=int, default=256)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        streams = pull(asked.registry, asked.precision, folder)
    choose = sampler(asked.seed, asked.temperature, asked.top_k, asked.top_p)
    prompt = asked.prompt.encode()
    written = bytes(islice(generate(streams, prompt, choose), asked.count))
    print((prompt + written).decode(errors="replace"))


if __name__ == "__main__":
    main()
