"""A tiny transformer encoder over bytes, with the parts of a sentence-embedding model."""

import math

import torch
from torch import nn

PADDING = 0
VOCABULARY = 257  # the 256 bytes, each plus one, and padding
LONGEST = 128


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The layer's output, shaped like `hidden`, (batch, sequence, width). bias: added to the attention scores."""
        hidden = hidden + self.attend(self.attention_norm(hidden), bias)
        return hidden + self.feed_forward(hidden)

    def attend(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Multi-head attention, written out: softmax(Q K^T / sqrt(d) + bias) V."""
        query, key, value = (self.split(part) for part in self.query_key_value(hidden).chunk(3, dim=-1))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
        return self.project((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        """Reshape (batch, sequence, width) to (batch, heads, sequence, width / heads)."""
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Encoder(nn.Module):
    """Token ids to one vector per token and one per sentence."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode sentences.

        input_ids, attention_mask: int64 (batch, sequence); the mask is 1 for tokens and 0 for padding.
        Returns `last_hidden_state`, float32 (batch, sequence, width), and `embedding`, float32 (batch, width): the mean
        over the tokens.
        """
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        norm = self.tokens(input_ids) + self.positions(position)
        mask = attention_mask.to(norm.dtype)
        bias = (1 - mask)[:, None, None, :] * torch.finfo(norm.dtype).min
        for layer in self.layers:
            norm = layer(norm, bias)
        norm = self.norm(norm)
        weight = mask.unsqueeze(-1)
        return {"last_hidden_state": norm, "embedding": (norm * weight).sum(1) / weight.sum(1).clamp(min=1)}


def build(width: int = 64, heads: int = 4, layers: int = 2) -> nn.Module:
    """The encoder without its weights; `enginesmith` loads them from the file that the spec names."""
    return Encoder(width, heads, layers)
