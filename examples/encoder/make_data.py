"""Makes the example's weights and data, once; the result is committed.

The weights are random (a fixed seed; nothing was trained), so the vectors mean nothing: the example is about shapes,
attention, masks and LayerNorm. The text is real: phrases of the project's LICENSE, as bytes, padded to 64, with the
lengths and masks that real text has.
"""

import re
from pathlib import Path

import numpy as np
import torch
from model import PADDING, build
from safetensors.torch import save_file

HERE = Path(__file__).parent
SEED = 7
LENGTH = 64
SIZES = {"calibration": 64, "golden": 48}


def phrases() -> list[bytes]:
    """Distinct pieces of text between punctuation marks, cut at LENGTH bytes, in random order."""
    text = " ".join((HERE.parents[1] / "LICENSE").read_text().split())
    pieces = sorted({piece.strip().encode()[:LENGTH] for piece in re.split(r"[.,;:()]", text) if piece.strip()})
    return [pieces[index] for index in np.random.default_rng(SEED).permutation(len(pieces))]


def encoded(texts: list[bytes]) -> dict[str, np.ndarray]:
    """The arrays input_ids and attention_mask of texts, int64 (len(texts), LENGTH)."""
    ids = np.full((len(texts), LENGTH), PADDING, np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8).astype(np.int64) + 1
    return {"input_ids": ids, "attention_mask": (ids != PADDING).astype(np.int64)}


def main() -> None:
    """Write weights.safetensors, calibration.npz and golden.npz."""
    torch.manual_seed(SEED)
    save_file(build().state_dict(), HERE / "weights.safetensors")
    texts = phrases()
    for name, size in SIZES.items():
        part, texts = texts[:size], texts[size:]
        np.savez_compressed(HERE / f"{name}.npz", **encoded(part))
        print(f"{name}: {len(part)} phrases, {sum(map(len, part)) / len(part):.1f} tokens on average")


if __name__ == "__main__":
    main()
