"""Trains the example once, and writes its data files from scikit-learn's handwritten digits.

Run `python train.py` in this folder (it needs scikit-learn; a quarter of a minute on one core), and `python train.py
vit` for the vision transformer (a minute). The result is committed. The seed fixes the split and
the training; another machine or version of torch gives weights that differ in the last digits.

Data: the test part of the UCI "Optical Recognition of Handwritten Digits" set, 1797 images of 8x8 with grey values
0..16, as `sklearn.datasets.load_digits` bundles it (UCI Machine Learning Repository, CC BY 4.0).
"""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

HERE = Path(__file__).parent
SEED = 20
SIZES = {"calibration": 128, "golden": 256, "held_out": 256}
EPOCHS, BATCH, LEARNING_RATE = {"model": 40, "vit": 90}, 64, 4e-3

Split = tuple[np.ndarray, np.ndarray]


def splits() -> dict[str, Split]:
    """Images (N, 1, 8, 8) float32 in [0, 1] and labels (N,) int64 of each part; no image is in two parts."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    order = np.random.default_rng(SEED).permutation(len(images))
    starts = np.cumsum([0, *SIZES.values()])
    parts = {name: order[start : start + size] for (name, size), start in zip(SIZES.items(), starts[:-1], strict=True)}
    parts["train"] = order[starts[-1] :]
    return {name: (images[index], labels[index]) for name, index in parts.items()}


def train(model: nn.Module, epochs: int, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train from scratch with AdamW and a one-cycle learning rate."""
    steps = epochs * len(images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        pick = torch.randint(len(images), (BATCH,))
        loss = nn.functional.cross_entropy(model(shifted(images[pick])), labels[pick], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Move the whole batch by at most one pixel each way: augmentation."""
    lower_number, right_number = (int(step) for step in torch.randint(-1, 2, (2,)))
    padded_array = nn.functional.pad(images, (1, 1, 1, 1))
    return padded_array[:, :, 1 + lower_number : 9 + lower_number, 1 + right_number : 9 + right_number]


def accuracy(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of images whose largest logit is their label's."""
    with torch.no_grad():
        guesses = model(torch.from_numpy(images)).argmax(1).numpy()
    return float((guesses == labels).mean())


def main() -> None:
    """Write weights.safetensors, calibration.npz, golden.npz and held_out.npz; or vit.safetensors and the same data."""
    name = "vit" if sys.argv[1:] == ["vit"] else "model"
    parts = splits()
    torch.manual_seed(SEED)
    model = train(import_module(name).build(), EPOCHS[name], *(torch.from_numpy(array) for array in parts["train"]))
    save_file(model.state_dict(), HERE / {"model": "weights.safetensors", "vit": "vit.safetensors"}[name])
    np.savez_compressed(HERE / "calibration.npz", image=parts["calibration"][0])
    for name in ("golden", "held_out"):
        images, labels = parts[name]
        np.savez_compressed(HERE / f"{name}.npz", image=images, label=labels)
    for name, (images, labels) in parts.items():
        print(f"{name}: {len(images)} images, accuracy {accuracy(model, images, labels):.4f}")


if __name__ == "__main__":
    main()
