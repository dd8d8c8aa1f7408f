"""Takes the two graphs and the tokenizer out of a wheel of traceforge-title-model, and writes the golden data:

    pip download --no-deps traceforge-title-model==0.2.0
    python prepare.py traceforge_title_model-0.2.0-py3-none-any.whl

Needs numpy, onnxruntime and tokenizers.
"""

import sys
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
from writer import MOST_TOKENS, TitleWriter

HERE = Path(__file__).parent
WITHIN = "traceforge_title_model/data/span/"
PLACES, SAMPLES = 64, 16

TASKS = (
    "fix the failing {} test",
    "add a retry to the {}",
    "update the documentation of the {}",
    "investigate why the {} is slow",
    "rename the {} and its callers",
    "remove dead code from the {}",
)
PARTS = ("login", "download client", "cache", "Docker image", "scheduler", "metrics page", "parser", "registry")
ACTIONS = ("read {}.py, ran the tests", "edited {}.py and its tests", "searched for callers, edited {}.py")


def describe(rng: np.random.Generator) -> str:
    """An agent's step as text in the form of the training data: intent, actions, files."""
    part = str(rng.choice(PARTS))
    file = part.replace(" ", "_").lower()
    return (
        f"intent: {rng.choice(TASKS).format(part)} | actions: {rng.choice(ACTIONS).format(file)} | files: src/{file}.py"
    )


def bare(name: str):
    """A function that runs an unchanged graph of the wheel."""
    options = onnxruntime.SessionOptions()
    # Otherwise sums of int8 saturate on CPUs without VNNI, and the titles differ.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(HERE / f"{name}.onnx", options)
    return lambda inputs: session.run(None, dict(inputs))[0]


def main() -> None:
    """Write graphs, tokenizer and golden data beside this file."""
    with zipfile.ZipFile(sys.argv[1]) as archive:
        for name in ("encoder.onnx", "decoder.onnx", "tokenizer.json"):
            (HERE / name).write_bytes(archive.read(WITHIN + name))
    rng, writer = np.random.default_rng(0), TitleWriter(bare("encoder"), bare("decoder"), HERE / "tokenizer.json")
    input_array, mask, title_array = (np.zeros((SAMPLES, size), np.int64) for size in (PLACES, PLACES, MOST_TOKENS))
    for row in range(SAMPLES):
        text = describe(rng)
        tokens, title = writer.encode(text)[:PLACES], writer.tokens(text)[:MOST_TOKENS]
        input_array[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        title_array[row, : len(title)] = title
    arrays = {"encoder.input_ids": input_array, "attention_mask": mask, "decoder.input_ids": title_array}
    next_array = np.pad(title_array[:, 1:], ((0, 0), (0, 1)))
    # A sample has an axis of one row before its places.
    np.savez(HERE / "golden.npz", next=next_array, **{name: array[:, None] for name, array in arrays.items()})


if __name__ == "__main__":
    main()
