"""Trains the example once, and writes its data files from held-out text.

Run `python train.py` in this folder (two minutes on two cores); the result is committed. The seed fixes all but the
last digits, which differ with the machine and with the version of torch.

Text: the topics of Python's own `help()` (`pydoc_data.topics`, PSF licence; those of Python 3.11), 0.4 MB of English.
"""

import math
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from model import CONTEXT, VOCABULARY, build
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
SEED, STEPS, BATCH, LEARNING_RATE = 20, 1000, 10, 3e-3
# Sequences of a file, and the steps of each.
SIZES = {"calibration": (4, 64), "golden": (4, 64), "held_out": (48, CONTEXT)}
# Bytes that the first step of each of the first sequences reads; later steps, and other sequences, read one by one.
PROMPTS = (37, 37, 20, 5)


def splits() -> tuple[np.ndarray, np.ndarray]:
    """The bytes (uint8) to train on, and those held out: whole topics, whose paragraphs are left out of the first."""
    held_out = {name for name in topics if zlib.crc32(name.encode()) % 12 == 1}
    held_paragraphs = paragraphs(held_out, set())
    return as_bytes(paragraphs(set(topics) - held_out, set(held_paragraphs))), as_bytes(held_paragraphs)


def paragraphs(names: set[str], without: set[str]) -> list[str]:
    """The paragraphs of topics, each once, in order."""
    parts = (part for name in sorted(names) for part in topics[name].split("\n\n"))
    return [part for part in dict.fromkeys(parts) if part not in without]


def as_bytes(parts: list[str]) -> np.ndarray:
    """Paragraphs as one text's bytes."""
    return np.frombuffer("\n\n".join(parts).encode(), np.uint8)


def train(text: torch.Tensor) -> nn.Module:
    """Train from scratch with AdamW and a one-cycle learning rate."""
    torch.manual_seed(SEED)
    model = build().train()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        loss = nats_per_byte(model, text[starts + torch.arange(CONTEXT + 1)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.3f} nats a byte", flush=True)
    return model.half().float().eval()  # rounded like the stored weights


def nats_per_byte(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each byte of rows (batch, length) but the first, given those before it."""
    logits, _ = model.read(rows[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1))


def cut(text: np.ndarray, count: int, steps: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Sequences in the form of the spec's data files: for each byte the next one, its sequence, and the step that
    reads it."""
    starts = rng.choice(len(text) // (steps + 1), count, replace=False) * (steps + 1)
    rows = text[starts[:, None] + np.arange(steps + 1)].astype(np.int64)
    prompts = np.array([*PROMPTS, *[1] * count])[:count, None]
    step = np.maximum(np.arange(steps) - prompts + 1, 0)
    samples = {"ids": rows[:, :-1].reshape(-1, 1), "next": rows[:, 1:].reshape(-1)}
    return {**samples, "text": np.arange(count).repeat(steps), "step": step.reshape(-1)}


def main() -> None:
    """Write weights.safetensors, calibration.npz, golden.npz and held_out.npz."""
    text, held_out = splits()
    model = train(torch.from_numpy(text.astype(np.int64)))
    save_file({name: value.half() for name, value in model.state_dict().items()}, HERE / "weights.safetensors")
    rng = np.random.default_rng(SEED)
    for (name, size), part in zip(SIZES.items(), np.array_split(held_out, len(SIZES)), strict=True):
        arrays = cut(part, *size, rng)
        for other_name in {"calibration": ["next"], "held_out": ["step"]}.get(name, []):
            del arrays[other_name]
        np.savez_compressed(HERE / f"{name}.npz", **arrays)
    rows = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(held_out, CONTEXT + 1)[::CONTEXT].astype(np.int64))
    with torch.no_grad():
        loss = nats_per_byte(model, rows)
    print(f"{len(text)} bytes trained on; {len(held_out)} held out, {loss:.3f} nats a byte")


if __name__ == "__main__":
    main()
