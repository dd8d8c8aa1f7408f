"""Two small models with state: a recurrent one, and attention over a cache that grows."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.ensembles import save_graph

RECURRENT: dict[str, Any] = {
    "model": "recurrent",
    "source": {"onnx": "model.onnx"},
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", 8]}, "h": {"dtype": "float32", "shape": [1, "batch", 16]}},
    "outputs": ["y", "hn"],
    "state": {"h": {"output": "hn", "initial": 0}},
    "dims": {"batch": {"min": 1, "opt": 4, "max": 8}},
    "precisions": ["fp32", "int8"],
    "targets": ["cpu"],
    "backends": {"onnxruntime": {}},
    "calibration": {"data": "calibration.npz", "sequence": "clip"},
    "golden": {"data": "golden.npz", "sequence": "clip"},
    "validation": {"latency": "off"},
}
CACHED: dict[str, Any] = {
    **RECURRENT,
    "model": "cached",
    "inputs": {
        "x": {"dtype": "float32", "shape": ["batch", 1, 8]},
        "past": {"dtype": "float32", "shape": ["batch", "length", 8]},
    },
    "outputs": ["y", "present"],
    "state": {"past": {"output": "present", "initial": 0}},
    "dims": {"batch": {"min": 1, "opt": 4, "max": 8}, "length": {"min": 0, "opt": 6, "max": 12}},
}
_GRAPHS = {
    "recurrent": """
        <ir_version: 8, opset_import: ["" : 17]>
        recurrent (float[batch, 8] x, float[1, batch, 16] h) => (float[batch, 4] y, float[1, batch, 16] hn) {
            from_x = MatMul(x, w1)
            from_h = MatMul(h, w2)
            sum = Add(from_x, from_h)
            hn = Tanh(sum)
            axis = Constant <value = int64[1] {0}> ()
            last = Squeeze(hn, axis)
            y = MatMul(last, w3)
        }
    """,
    "cached": """
        <ir_version: 8, opset_import: ["" : 17]>
        cached (float[batch, 1, 8] x, float[batch, length, 8] past)
            => (float[batch, 1, 4] y, float[batch, all, 8] present) {
            key = MatMul(x, w1)
            present = Concat <axis = 1> (past, key)
            query = MatMul(x, w2)
            turned = Transpose <perm = [0, 2, 1]> (present)
            scores = MatMul(query, turned)
            weights = Softmax <axis = -1> (scores)
            seen = MatMul(weights, present)
            y = MatMul(seen, w3)
        }
    """,
}
_SHAPES = {"recurrent": ((8, 16), (16, 16), (16, 4)), "cached": ((8, 8), (8, 8), (8, 4))}


def write_stateful(folder: Path, spec: dict[str, Any]) -> Path:
    """The model of a spec, its data (sequences of 12 steps) and the spec's file, in a new folder."""
    folder.mkdir(parents=True)
    name, rng = spec["model"], np.random.default_rng(0)
    save_graph(folder / "model.onnx", _GRAPHS[name], _SHAPES[name], rng, 0.7)
    for data, count in (("calibration", 96), ("golden", 36)):
        x = rng.normal(size=(count, *spec["inputs"]["x"]["shape"][1:])).astype(np.float32)
        np.savez(folder / f"{data}.npz", x=x, clip=np.arange(count) // 12)
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path
