"""Graphs that are made here: decision trees grown on scikit-learn's digits, and torch modules with seeded weights.

    python -m benchmarks.zoo.trees forest|boosted OUT
    python -m benchmarks.zoo.trees '{"torch": "timm:create_model", ...}' OUT

No package is known that ships trees under a free licence, and these architectures without weights. skl2onnx and
torch.onnx write them, out of the environment of `peers`.
"""

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sklearn.datasets import load_digits
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier

GROWN = {
    "forest": RandomForestClassifier(n_estimators=60, max_depth=10, random_state=0, n_jobs=1),
    "boosted": GradientBoostingClassifier(n_estimators=30, random_state=0),
}


def write_trees(kind: str, path: Path) -> None:
    """Grow trees on every other digit and write them."""
    from skl2onnx import to_onnx

    digits = load_digits()
    trees = GROWN[kind].fit(digits.data[::2].astype("f4"), digits.target[::2])
    model = to_onnx(
        trees, digits.data[:1].astype("f4"), options={"zipmap": False}, target_opset={"": 17, "ai.onnx.ml": 3}
    )
    path.write_bytes(model.SerializeToString(deterministic=True))


def write_module(row: Mapping[str, Any], path: Path) -> None:
    """Write a module with weights of seed 0 and a dynamic batch. row: of graphs.yaml: what makes it (torch), with which
    arguments (settings), of which class of configurations (config), and the shapes of its inputs (takes)."""
    import torch

    operators = torch.library.Library("torchvision", "DEF")  # torchvision's own do not load beside torch for CPUs
    for operator in ("nms", "qnms"):
        operators.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    place, _, name = row["torch"].partition(":")
    source, settings = import_module(place), row.get("settings", {})
    torch.manual_seed(0)
    if "config" in row:
        module = getattr(source, name)(getattr(source, row["config"])(**settings, return_dict=False))
    else:
        module = getattr(source, name)(**settings)
    for parameter in module.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a head that begins at zero answers every input alike
            torch.nn.init.normal_(parameter, std=0.02)
    arrays = {
        key: torch.ones(shape, dtype=torch.long) if "ids" in key else torch.randn(shape)
        for key, shape in row["takes"].items()
    }
    axes = {key: {0: "batch"} for key in arrays}
    arguments = (arrays,) if "config" in row else tuple(arrays.values())  # transformers takes them by name
    torch.onnx.export(module.eval(), arguments, path, input_names=list(axes), dynamic_axes=axes, dynamo=False)


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        write_module(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        write_trees(sys.argv[1], Path(sys.argv[2]))
