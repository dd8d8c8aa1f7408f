"""A small voice detector for 20 ms of sound per call; its two states are outputs and the next call's inputs."""

import math

import torch
from torch import nn

RATE = 16_000  # samples per second
FRAME = 320  # samples of a call: 20 ms
WINDOW, HOP = 256, 160  # samples of a spectrum, and between two spectra: a call computes two
TAIL = WINDOW - HOP  # samples that the next call reads again
BANDS, WIDTH = 32, 48


class Detector(nn.Module):
    """Computes the logits of silence and voice from log spectra, by a linear layer and a gated recurrent unit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", waves(), persistent=False)
        self.register_buffer("bands", triangles(), persistent=False)
        self.features = nn.Sequential(nn.Linear(2 * BANDS, WIDTH), nn.ReLU())
        self.memory = nn.GRUCell(WIDTH, WIDTH)
        self.decide = nn.Linear(WIDTH, 2)

    def forward(
        self, sound: torch.Tensor, tail: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """sound: (batch, 320) in [-1, 1].  tail: (batch, 96), the end of the last call's sound.  memory: (batch, 48).

        Returns logits (batch, 2) of silence and voice, and the next call's tail and memory."""
        joined_sound = torch.cat([tail, sound], 1)
        memory = self.memory(self.features(self.spectra(joined_sound).flatten(1)), memory)
        return self.decide(memory), joined_sound[:, FRAME:], memory

    def spectra(self, heard: torch.Tensor) -> torch.Tensor:
        """Logarithms (batch, windows, 32) of the power in each band, of samples (batch, 96 + 160 * windows)."""
        real_part, imaginary_part = nn.functional.conv1d(heard[:, None], self.waves, stride=HOP).chunk(2, 1)
        return torch.log((real_part * real_part + imaginary_part * imaginary_part).transpose(1, 2) @ self.bands + 1e-3)


def waves() -> torch.Tensor:
    """Cosines and sines of 62.5 Hz to 8 kHz under a Hann window, (256, 1, 256): the kernels of a Fourier transform."""
    angles = 2 * math.pi * torch.outer(torch.arange(1, WINDOW // 2 + 1), torch.arange(WINDOW)) / WINDOW
    return (torch.cat([angles.cos(), angles.sin()]) * torch.hann_window(WINDOW))[:, None]


def triangles() -> torch.Tensor:
    """Weights (128, 32) of the frequencies in each band; bands lie evenly on the mel scale (O'Shaughnessy, 1987)."""
    mel = 2595 * torch.log10(1 + torch.arange(1, WINDOW // 2 + 1) * RATE / WINDOW / 700)
    centres = torch.linspace(float(mel[0]), float(mel[-1]), BANDS + 2)[1:-1]
    return (1 - (mel[:, None] - centres).abs() / (centres[1] - centres[0])).clamp(min=0)


def build() -> nn.Module:
    """The detector without its trained weights; `enginesmith` loads them from the file that the spec names."""
    return Detector().eval()
