"""A small ensemble with state on disk: an encoder, and a decoder with a cache that grows, called token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.ensembles import ENCODER as PLAIN
from tests.ensembles import write_graphs

ENCODER: dict[str, Any] = {
    **PLAIN,
    "model": "told-encoder",
    "inputs": {"source": {"dtype": "float32", "shape": ["batch", 4, 8]}},
    "dims": {"batch": {"min": 1, "opt": 4, "max": 4}},
}
DECODER: dict[str, Any] = {
    **ENCODER,
    "model": "told-decoder",
    "source": {"onnx": "decoder.onnx"},
    "inputs": {
        "x": {"dtype": "float32", "shape": ["batch", "tokens", 8]},
        "memory": {"dtype": "float32", "shape": ["batch", 4, 8]},
        "past": {"dtype": "float32", "shape": ["batch", "length", 8]},
    },
    "outputs": ["y", "present"],
    "state": {"past": {"output": "present", "initial": 0}},
    "dims": {**ENCODER["dims"], "tokens": {"min": 1, "opt": 1, "max": 3}, "length": {"min": 0, "opt": 4, "max": 8}},
}
DATA: dict[str, Any] = {"sequence": "text", "steps": {"decoder.tokens": "step"}}
TOLD: dict[str, Any] = {
    "model": "told",
    "graphs": {"encoder": "encoder.yaml", "decoder": "decoder.yaml"},
    "connections": {"decoder.memory": "encoder.hidden"},
    "golden": {"data": "golden.npz", **DATA},
    "calibration": {"data": "calibration.npz", **DATA},
}
_ENCODER = """
    <ir_version: 8, opset_import: ["" : 17]>
    encoder (float[batch, 4, 8] source) => (float[batch, 4, 8] hidden) {
        mixed = MatMul(source, w1)
        hidden = Tanh(mixed)
    }
"""
_DECODER = """
    <ir_version: 8, opset_import: ["" : 17]>
    decoder (float[batch, tokens, 8] x, float[batch, 4, 8] memory, float[batch, length, 8] past)
        => (float[batch, tokens, 6] y, float[batch, all, 8] present) {
        key = MatMul(x, w1)
        present = Concat <axis = 1> (past, key)
        query = MatMul(x, w2)
        turned = Transpose <perm = [0, 2, 1]> (present)
        scores = MatMul(query, turned)
        weights = Softmax <axis = -1> (scores)
        own = MatMul(weights, present)
        across = Transpose <perm = [0, 2, 1]> (memory)
        told = MatMul(own, across)
        shares = Softmax <axis = -1> (told)
        seen = MatMul(shares, memory)
        both = Add(own, seen)
        y = MatMul(both, w3)
    }
"""
_GRAPHS = {"encoder": (_ENCODER, [(8, 8)]), "decoder": (_DECODER, [(8, 8), (8, 8), (8, 6)])}
# Of each text: tokens, and in which step each is read.
STEPS = [0, 0, 0, 1, 2, 3, 4, 5]


def write_stateful_ensemble(
    folder: Path, parts: dict[str, Any] = TOLD, encoder: dict[str, Any] = ENCODER, decoder: dict[str, Any] = DECODER
) -> Path:
    """Graphs, data of the whole (texts of 8 tokens), three specs in a new folder; the path of the ensemble's spec."""
    rng = write_graphs(folder, _GRAPHS)
    for name, texts in (("calibration", 10), ("golden", 4)):
        np.savez(folder / f"{name}.npz", **draw(rng, texts))
    for name, spec in (("encoder", encoder), ("decoder", decoder), ("told", parts)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return folder / "told.yaml"


def draw(rng: np.random.Generator, texts: int) -> dict[str, np.ndarray]:
    source = np.repeat(rng.normal(size=(texts, 4, 8)), len(STEPS), 0)
    x = rng.normal(size=(texts * len(STEPS), 1, 8))
    return {
        "encoder.source": source.astype(np.float32),
        "decoder.x": x.astype(np.float32),
        "text": np.repeat(np.arange(texts), len(STEPS)),
        "step": np.tile(STEPS, texts),
    }
