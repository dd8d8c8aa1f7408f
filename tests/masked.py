"""A small decoder as HuggingFace exports it: token ids, a mask over all places, position ids, each layer's cache."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, PLACES = 32, 16, 2, 1, 64
CACHES = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]


class MaskedDecoder(nn.Module):
    """Logits (batch, tokens, vocabulary), and each layer's keys and values (batch, heads, past + tokens, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.reads = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.writes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past0: torch.Tensor,
        past1: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """One step. attention_mask: int64 (batch, past + tokens), 0 for places that nobody sees."""
        past0s = past0, past1
        path, present_names = self.tokens(input_ids) + self.places(position_ids), []
        count, total = input_ids.shape[1], attention_mask.shape[1]
        ahead = torch.arange(total) > torch.arange(total - count, total)[:, None]
        hidden_places = ahead[None, None] | (attention_mask == 0)[:, None, None]
        for layer, (read, write) in enumerate(zip(self.reads, self.writes, strict=True)):
            query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in read(path).chunk(3, -1))
            keys, values = (torch.cat([past0s[2 * layer + index], part], 2) for index, part in enumerate((key, value)))
            scores = query @ keys.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            weights = scores.masked_fill(hidden_places, -1e4).softmax(-1)
            path = path + write((weights @ values).transpose(1, 2).flatten(2))
            present_names += [keys, values]
        return path @ self.tokens.weight.T, *present_names


def make_masked() -> MaskedDecoder:
    torch.manual_seed(0)
    return MaskedDecoder().eval()


def export_masked(path: Path) -> None:
    """The decoder as an ONNX file with the names of inputs, outputs and dims that optimum gives."""
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in CACHES)]
    outputs = ["logits", *(f"present.{name}" for name in CACHES)]
    shape = 2, HEADS, 4, WIDTH // HEADS
    batch, tokens, dim_symbols = (torch.export.Dim(name, min=2, max=32) for name in ("batch", "tokens", "past"))
    mask = {0: batch, 1: torch.export.Dim.AUTO}
    step = {0: batch, 1: tokens}
    shapes = (step, mask, step, *({0: batch, 2: dim_symbols} for _ in CACHES))
    # Tensors of their own: torch.export takes two arguments that are one tensor for one input.
    arguments = (*(torch.ones(2, size, dtype=torch.int64) for size in (3, 7, 3)), *(torch.zeros(shape) for _ in CACHES))
    names = {"input_names": inputs, "output_names": outputs, "dynamic_shapes": shapes}
    with warnings.catch_warnings(action="ignore"):  # torch warns about its own internals
        program = torch.onnx.export(make_masked(), arguments, dynamo=True, verbose=False, **names)
    onnx.save(_named_as_optimum(program.model_proto), path)


def _named_as_optimum(model: onnx.ModelProto) -> onnx.ModelProto:
    names = {"batch": "batch_size", "tokens": "sequence_length", "past": "past_sequence_length"}
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]
            elif value.name == "attention_mask" and axis == 1:
                dim.dim_param = "past_sequence_length + sequence_length"
    return model


def write_masked_data(path: Path, texts: int, seed: int, lengths: tuple[int, ...] = (5, 1, 1, 2, 1)) -> None:
    """Sequences of a prompt and steps of these lengths, a token each row: ids, mask, places, the text and the step."""
    rng, count = np.random.default_rng(seed), sum(lengths)
    arrays: dict[str, Any] = {"input_ids": rng.integers(VOCABULARY, size=(texts * count, 1))}
    arrays["attention_mask"] = np.ones((texts * count, 1), np.int64)
    arrays["position_ids"] = np.tile(np.arange(count), texts)[:, None]
    np.savez(
        path,
        **arrays,
        text=np.arange(texts).repeat(count),
        step=np.tile(np.repeat(range(len(lengths)), lengths), texts),
    )
