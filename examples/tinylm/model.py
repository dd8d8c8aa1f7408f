"""A small decoder over one or more bytes per call; its caches are outputs, and inputs of the next call."""

import math

import torch
from torch import nn

VOCABULARY = 256  # the bytes
LAYERS = 3  # each with a cache, which the spec names
CONTEXT = 128  # bytes of a training sequence
PLACES = 192  # positions that a byte may have: after 127 in the caches, one of 64 that are read

Turn = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Self-attention over a cache, and a feed-forward network, each after a LayerNorm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, hidden: torch.Tensor, turn: Turn, past: torch.Tensor, later: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden` is (batch, sequence, width); `past` and the returned cache (batch, heads, places, 2 width / heads):
        keys and values side by side; `later` (sequence, places) is true for bytes that a byte does not see."""
        query, key, value = (
            self.split(part) for part in self.query_key_value(self.attention_norm(hidden)).chunk(3, -1)
        )
        cache = torch.cat([past, torch.cat([rotate(key, turn), value], -1)], 2)
        keys, values = cache.chunk(2, -1)
        scores = rotate(query, turn) @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(later, -1e4)
        hidden = hidden + self.project((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(hidden), cache

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        """Reshape (batch, sequence, width) to (batch, heads, sequence, width / heads)."""
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def rotate(vectors: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021): the two halves of the last axis, as x and y, by angles."""
    x, y = vectors.chunk(2, -1)
    cosine, sine = turn
    return torch.cat([x * cosine - y * sine, x * sine + y * cosine], -1)


class Decoder(nn.Module):
    """Bytes to the logits of the next byte. A byte's position is the number of bytes before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.empty = (heads, 0, 2 * width // heads)  # a cache's shape, after the batch
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        half_width = width // heads // 2
        angles = torch.outer(torch.arange(PLACES), 1000.0 ** -(torch.arange(half_width) / half_width))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(
        self, ids: torch.Tensor, past0: torch.Tensor, past1: torch.Tensor, past2: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run one step. ids: int64 (batch, tokens).  past: a cache for each block. Returns logits (batch, tokens, 256)
        and the caches."""
        logits, caches = self.read(ids, (past0, past1, past2))
        return logits, *caches

    def read(
        self, ids: torch.Tensor, past: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits (batch, sequence, 256) after each of several bytes (batch, sequence), and the caches."""
        past = past or (self.norm.weight.new_zeros(len(ids), *self.empty),) * len(self.blocks)
        begin, end, caches = past[0].shape[2], past[0].shape[2] + ids.shape[1], []
        turn = self.cosines[begin:end], self.sines[begin:end]
        is_later = torch.arange(end) > torch.arange(begin, end)[:, None]
        hidden_states = self.bytes(ids)
        for block, cache in zip(self.blocks, past, strict=True):
            hidden_states, cache = block(hidden_states, turn, cache, is_later)
            caches.append(cache)
        return nn.functional.linear(self.norm(hidden_states), self.bytes.weight), caches


def build(width: int = 128, heads: int = 4) -> nn.Module:
    """The decoder without its weights; `enginesmith` loads them from the file that the spec names."""
    return Decoder(width, heads).eval()
