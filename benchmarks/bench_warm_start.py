"""How long a process takes to its first answer, cold and warm: `python -m benchmarks.bench_warm_start`.

Each process starts as a server does: Python, torch, the model, torch.compile, one call. Cold, with an empty folder;
warm out of torch's own portable cache (`torch.compiler.save_cache_artifacts`); and warm out of a compile cache as
`enginesmith.warm_start` loads it. CPU seconds of the process and its children, the least of the rounds; the sides take
turns. The last columns are the same without what importing torch takes, on either side.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROUNDS = 3
SIDES = ("cold", "portable", "enginesmith")


def main() -> None:
    """Measure and print."""
    print("| model | side | CPU s | of cold | s | compiled | CPU s without imports | of cold |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ("conv", "transformer"):
        with tempfile.TemporaryDirectory() as folder:
            least = {side: min(runs, key=lambda run: run["cpu_s"]) for side, runs in rounds(name, Path(folder)).items()}
        cold = least["cold"]
        for side, run in least.items():
            alone, alone_cold = (found["cpu_s"] - found["imports_s"] for found in (run, cold))
            cells = f"{run['cpu_s']:.1f} | {run['cpu_s'] / cold['cpu_s']:.2f} | {run['wall_s']:.1f} | {words(run)}"
            print(f"| {name} | {side} | {cells} | {alone:.1f} | {alone / alone_cold:.2f} |", flush=True)


def words(run: dict[str, Any]) -> str:
    """What a process compiled: '1 graph of Inductor, 11 C++ kernels'."""
    return ", ".join(f"{count} {kind}" for kind, count in run["misses"].items() if count) or "nothing"


def rounds(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each process of each side used. The first cold one leaves both caches."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                command = [sys.executable, "-m", __spec__.name, name, side, str(folder)]
                said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            found[side].append(json.loads(said.splitlines()[-1]))
    return found


def start(name: str, side: str, folder: Path) -> None:
    """One process, to its first answer; what it used is printed as JSON."""
    begun = time.perf_counter()
    import torch
    from enginesmith.compile_caches.probes import record_probes
    from enginesmith.compile_caches.recipe import CacheRecipe, CompileOptions

    from enginesmith.compile_caches.archive import pack
    from enginesmith.compile_caches.warm_start import count_misses, open_cache
    from enginesmith.core.errors import digest_of_file

    imports_s = cpu_seconds()
    build, given = (conv, torch.rand(4, 3, 64, 64)) if name == "conv" else (transformer, torch.ones(4, 32).long())
    model, options, portable, own = build().eval(), CompileOptions(), folder / "portable", folder / "own.cache"
    probes = {} if side == "enginesmith" else record_probes()
    if side == "portable":
        torch.compiler.load_cache_artifacts(portable.read_bytes())
    warm = open_cache(own, digest_of_file(own)) if side == "enginesmith" else None
    call: Callable[..., Any] = warm.compile(model) if warm else options.compile(model)
    call(given)
    used = {"cpu_s": cpu_seconds(), "wall_s": time.perf_counter() - begun, "imports_s": imports_s}
    found = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    misses = warm.misses() if warm else {**count_misses(), "C++ kernels": len([*found.rglob("*.so")])}
    if side == "cold" and not own.exists():
        pack(found, replace(CacheRecipe.of_model(model, options, "cpu"), probes=probes), own)
        saved = torch.compiler.save_cache_artifacts()
        portable.write_bytes(saved[0] if saved else b"")
    print(json.dumps({**used, "misses": misses}))


def cpu_seconds() -> float:
    """User and system time of this process and of the children that it waited for."""
    return sum(os.times()[:4])


def conv() -> "torch.nn.Module":
    """Three convolutions with their normalizations, and a classifier; 24,000 parameters."""
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Module:
        layers = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.SiLU(), nn.MaxPool2d(2)
        return nn.Sequential(*layers)

    body = nn.Sequential(block(3, 16), block(16, 32), block(32, 64))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def transformer() -> "torch.nn.Module":
    """Token ids to logits in four layers of width 128; 1 million parameters."""
    from torch import nn

    layers = [nn.TransformerEncoderLayer(128, 4, 512, activation="gelu", batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(1000, 128), *layers, nn.Linear(128, 100))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()
