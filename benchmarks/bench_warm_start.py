"""How long a process takes to its first answer with torch.compile, cold and out of a compile cache:
`python -m benchmarks.bench_warm_start [MODEL ...]`.

`measure_start` starts the processes as a server starts: Python, torch, the model, torch.compile, one call. CPU seconds
of the process and its children; the least of the rounds on either side.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.compile_caches.loading import measure_start

if TYPE_CHECKING:
    import torch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["conv", "transformer"], help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| model | cold CPU s | warm CPU s | of cold | cold s | warm s | compiled again |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "net.cache"
            runs = [measure_start(f"{__spec__.name}:{name}", cache) for _ in range(options.rounds)]
        cold_s, warm_s = min(run.cold_cpu_s for run in runs), min(run.warm_cpu_s for run in runs)
        clock = f"{min(run.cold_s for run in runs):.1f} | {min(run.warm_s for run in runs):.1f}"
        again = max(run.compiled_again for run in runs)
        print(f"| {name} | {cold_s:.1f} | {warm_s:.1f} | {warm_s / cold_s:.2f} | {clock} | {again} |", flush=True)


def conv() -> tuple[Callable[..., "torch.Tensor"], tuple["torch.Tensor"]]:
    """Three convolutions with their normalizations, and a classifier; 24,000 parameters."""
    import torch
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Module:
        layers = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.SiLU(), nn.MaxPool2d(2)
        return nn.Sequential(*layers)

    body = nn.Sequential(block(3, 16), block(16, 32), block(32, 64))
    net = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return torch.compile(net.eval()), (torch.rand(4, 3, 64, 64),)


def transformer() -> tuple[Callable[..., "torch.Tensor"], tuple["torch.Tensor"]]:
    """Token ids to logits in four layers of width 128; 1 million parameters."""
    import torch
    from torch import nn

    layers = [nn.TransformerEncoderLayer(128, 4, 512, activation="gelu", batch_first=True) for _ in range(4)]
    net = nn.Sequential(nn.Embedding(1000, 128), *layers, nn.Linear(128, 100))
    return torch.compile(net.eval()), (torch.ones(4, 32).long(),)


if __name__ == "__main__":
    main()
