"""A small decoder whose cache has a fixed size: each row writes its keys behind those that it wrote before."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

VOCABULARY, WIDTH, PLACES = 24, 8, 16
FIXED: dict[str, Any] = {
    "model": "fixed",
    "source": {"torch": "fixed_cache.py:make_fixed"},
    "inputs": {
        "ids": {"dtype": "int64", "shape": ["batch", "tokens"]},
        "cache": {"dtype": "float32", "shape": ["batch", PLACES, WIDTH]},
        "length": {"dtype": "int64", "shape": ["batch"]},
    },
    "outputs": ["logits", "cache_out", "length_out"],
    "state": {
        "cache": {"output": "cache_out", "initial": 0, "places": {"axis": 1, "at": "length", "count": "tokens"}},
        "length": {"output": "length_out", "initial": 0},
    },
    "dims": {"batch": {"min": 1, "opt": 1, "max": 3}, "tokens": {"min": 1, "opt": 1, "max": 6}},
    "precisions": ["fp32", "int8"],
    "targets": ["cpu"],
    "backends": {"onnxruntime": {}},
    "calibration": {"data": "calibration.npz", "sequence": "text", "steps": {"tokens": "step"}},
    "golden": {"data": "golden.npz", "sequence": "text", "steps": {"tokens": "step"}},
    "validation": {"latency": "off"},
}


class FixedDecoder(nn.Module):
    """Logits (batch, tokens, vocabulary), the cache, and how many places of it are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, cache: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step. length: int64 (batch), places that are filled. Behind the end the last place is written again:
        sizes and values are tried independently."""
        hidden_tokens = self.tokens(ids)
        places = (length[:, None] + torch.arange(ids.shape[1])).clamp(max=PLACES - 1)
        cache = cache.scatter(1, places[..., None].expand_as(hidden_tokens), self.key(hidden_tokens))
        scores = self.query(hidden_tokens) @ cache.transpose(1, 2)
        is_later = torch.arange(PLACES) > places[..., None]
        loaded_softmax = scores.masked_fill(is_later, -1e4).softmax(-1) @ cache
        return (hidden_tokens + loaded_softmax) @ self.tokens.weight.T, cache, length + ids.shape[1]


def make_fixed() -> nn.Module:
    torch.manual_seed(0)
    return FixedDecoder().eval()


def write_fixed(folder: Path, lengths: tuple[int, ...] = (5, 1, 1, 2, 1), spec: dict[str, Any] = FIXED) -> Path:
    """This file, data (texts of a prompt and steps of these lengths) and the spec's file, in a new folder."""
    folder.mkdir(parents=True)
    shutil.copy(__file__, folder)
    rng, count = np.random.default_rng(0), sum(lengths)
    for name, texts in (("calibration", 8), ("golden", 3)):
        step = np.tile(np.repeat(range(len(lengths)), lengths), texts)
        ids = rng.integers(VOCABULARY, size=(texts * count, 1))
        np.savez(folder / f"{name}.npz", ids=ids, text=np.arange(texts).repeat(count), step=step)
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path
