"""all-MiniLM-L6-v2, the sentence encoder, written out in plain PyTorch: six BERT layers, masked mean, unit length."""

import math

import torch
from torch import nn

WIDTH, INNER, HEADS, LAYERS = 384, 1536, 12, 6
VOCABULARY, LONGEST = 30522, 512


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection and a LayerNorm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.widen = nn.Linear(WIDTH, INNER)
        self.narrow = nn.Linear(INNER, WIDTH)
        self.output_norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The layer's output, shaped like `hidden`, (batch, sequence, WIDTH). bias: added to the attention scores."""
        hidden = self.attention_norm(hidden + self.project(self.attend(hidden, bias)))
        return self.output_norm(hidden + self.narrow(nn.functional.gelu(self.widen(hidden))))

    def attend(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Multi-head attention: softmax(Q K^T / sqrt(d) + bias) V."""
        query, key, value = (
            linear(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    """Token ids to one vector of unit length per sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Encode sentences.

        input_ids, attention_mask: int64 (batch, sequence); the mask is 1 for tokens and 0 for padding.
        Returns float32 (batch, WIDTH).
        """
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.norm(self.words(input_ids) + self.positions(position) + self.segments.weight[0])
        mask = attention_mask.to(hidden_states.dtype)
        bias = (1 - mask)[:, None, None, :] * torch.finfo(hidden_states.dtype).min
        for layer in self.layers:
            hidden_states = layer(hidden_states, bias)
        weight = mask.unsqueeze(-1)
        mean = (hidden_states * weight).sum(1) / weight.sum(1).clamp(min=1)
        return nn.functional.normalize(mean)


def build() -> nn.Module:
    """The encoder without its weights; `enginesmith` loads them from the file that the spec names."""
    return Encoder()
