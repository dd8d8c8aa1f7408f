"""A small convolutional network for 8x8 grey images of handwritten digits."""

import torch
from torch import nn


def block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    """Convolution 3x3, batch normalisation, ReLU; `stride` divides height and width."""
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


class DigitNet(nn.Module):
    """Image in [0, 1], float32 (batch, 1, 8, 8), to one logit per digit, float32 (batch, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            block(1, width, 1),
            block(width, 2 * width, 2),
            block(2 * width, 2 * width, 1),
            block(2 * width, 4 * width, 2),
        )
        self.classify = nn.Linear(4 * width * 2 * 2, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Classify a batch of images."""
        return self.classify(self.features(image).flatten(1))


def build(width: int = 16) -> nn.Module:
    """The network without its weights; `enginesmith` loads them from the file that the spec names."""
    return DigitNet(width)
