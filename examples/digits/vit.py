"""A small vision transformer for the same digits: 16 patches of 2x2, and three layers of attention.

The inner size of its products, except the patches' own, is a multiple of 32, as NVFP4 and MXFP8 require.
"""

import torch
from torch import nn

PATCH, WIDTH, HEADS, LAYERS = 2, 64, 4, 3


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a LayerNorm and inside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_widening = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's output, shaped like `tokens`, (batch, patches, WIDTH)."""
        normal = self.before_attention(tokens)
        query, key, value = (
            linear(normal).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        tokens = tokens + self.project((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return tokens + self.narrow(nn.functional.gelu(self.widen(self.before_widening(tokens))))


class VisionTransformer(nn.Module):
    """Image in [0, 1], float32 (batch, 1, 8, 8), to one logit per digit, float32 (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) / 8)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.classify = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Classify a batch of images."""
        patches = image.reshape(-1, 4, PATCH, 4, PATCH).transpose(2, 3).reshape(-1, 16, PATCH * PATCH)
        return self.classify(self.norm(self.layers(self.embed(patches) + self.positions)).mean(1))


def build() -> nn.Module:
    """The network without its weights."""
    return VisionTransformer()
