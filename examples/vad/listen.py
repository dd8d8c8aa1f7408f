"""Prints where a voice is heard: `python listen.py FILE.wav` (16 kHz, mono, 16 bits), after `enginesmith build`.

Without a file it listens to the clips of golden.npz, all at once: each is a stream, a row of the batch.
"""

import argparse
import wave
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import enginesmith

FRAME, FRAME_S = 320, 0.02


def frames_of(path: Path | None) -> np.ndarray:
    """Sounds (streams, frames, 320) float32 in [-1, 1]."""
    if path is None:
        with np.load(Path(__file__).with_name("golden.npz")) as arrays:
            return np.stack([arrays["sound"][arrays["clip"] == clip] for clip in np.unique(arrays["clip"])])
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (16_000, 1, 2):
            raise SystemExit(f"{path} is not of 16 kHz, mono, 16 bits")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples[: len(samples) // FRAME * FRAME].reshape(1, -1, FRAME).astype(np.float32) / 32768


def listen(sounds: np.ndarray, streams: enginesmith.Streams) -> np.ndarray:
    """Whether a voice is heard, bool (streams, frames). One call per frame; `streams` carries the states."""
    logits = (streams.run({"sound": sounds[:, frame]})["logits"] for frame in range(sounds.shape[1]))
    return np.stack([answer.argmax(-1) == 1 for answer in logits], 1)


def spans(heard: np.ndarray) -> Iterator[str]:
    """Yield '0.42 to 1.30 s' for each run of true frames. heard: bool (frames)."""
    edges = np.flatnonzero(np.diff(heard, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2):
        yield f"{begin * FRAME_S:.2f} to {end * FRAME_S:.2f} s"


def main() -> None:
    """Pull an engine for the CPU, listen, and print the spans of each stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--registry", default="registry")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    with TemporaryDirectory() as dest:
        pulled_engine = enginesmith.pull(
            "vad", registry=options.registry, target="cpu", precision=options.precision, dest=dest
        )
        streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled_engine), pulled_engine.description)
        for row, frame in enumerate(listen(frames_of(options.file), streams)):
            print(f"stream {row}: {', '.join(spans(frame)) or 'no voice'}")


if __name__ == "__main__":
    main()
