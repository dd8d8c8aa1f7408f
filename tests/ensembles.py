"""A small ensemble on disk: an encoder and a decoder written by hand, their specs, and data of the whole."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import numpy_helper

ENCODER: dict[str, Any] = {
    "model": "pair-encoder",
    "source": {"onnx": "encoder.onnx"},
    "inputs": {
        "x": {"dtype": "float32", "shape": ["batch", 6, 8]},
        "attention": {"dtype": "float32", "shape": ["batch", 6]},
    },
    "outputs": ["hidden"],
    "dims": {"batch": {"min": 1, "opt": 4, "max": 8}},
    "precisions": ["fp32", "int8"],
    "targets": ["cpu"],
    "backends": {"onnxruntime": {}},
    "validation": {"latency": "off", "calls": "off"},
}
DECODER: dict[str, Any] = {
    **ENCODER,
    "model": "pair-decoder",
    "source": {"onnx": "decoder.onnx"},
    "inputs": {
        "y": {"dtype": "float32", "shape": ["batch", 8]},
        "memory": {"dtype": "float32", "shape": ["batch", 6, 16]},
        "mask": {"dtype": "float32", "shape": ["batch", 6]},
    },
    "outputs": ["logits"],
}
PAIR: dict[str, Any] = {
    "model": "pair",
    "graphs": {"encoder": "encoder.yaml", "decoder": "decoder.yaml"},
    "connections": {"decoder.memory": "encoder.hidden", "encoder.attention": "mask", "decoder.mask": "mask"},
    "golden": {"data": "golden.npz"},
    "calibration": {"data": "calibration.npz"},
}
_ENCODER = """
    <ir_version: 8, opset_import: ["" : 17]>
    encoder (float[batch, 6, 8] x, float[batch, 6] attention) => (float[batch, 6, 16] hidden) {
        mixed = MatMul(x, w1)
        active = Relu(mixed)
        axis = Constant <value = int64[1] {2}> ()
        column = Unsqueeze(attention, axis)
        hidden = Mul(active, column)
    }
"""
_DECODER = """
    <ir_version: 8, opset_import: ["" : 17]>
    decoder (float[batch, 8] y, float[batch, 6, 16] memory, float[batch, 6] mask) => (float[batch, 10] logits) {
        axis = Constant <value = int64[1] {1}> ()
        row = Unsqueeze(mask, axis)
        summed = MatMul(row, memory)
        flat = Squeeze(summed, axis)
        query = MatMul(y, w1)
        both = Add(flat, query)
        active = Relu(both)
        logits = MatMul(active, w2)
    }
"""
_GRAPHS = {"encoder": (_ENCODER, [(8, 16)]), "decoder": (_DECODER, [(8, 16), (16, 10)])}


def write_graphs(folder: Path, graphs: Mapping[str, tuple[str, list[tuple[int, int]]]]) -> np.random.Generator:
    """Graphs as text, by their names, with random weights of these shapes in a new folder; what drew the weights."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, (text, shapes) in graphs.items():
        save_graph(folder / f"{name}.onnx", text, shapes, rng)
    return rng


def write_ensemble(
    folder: Path, pair: dict[str, Any] = PAIR, encoder: dict[str, Any] = ENCODER, decoder: dict[str, Any] = DECODER
) -> Path:
    """The two graphs, data of the whole and three specs in a new folder; the path of the ensemble's spec."""
    rng = write_graphs(folder, _GRAPHS)
    for name, count in (("calibration", 48), ("golden", 12)):
        np.savez(folder / f"{name}.npz", **draw(rng, count))
    for name, spec in (("encoder", encoder), ("decoder", decoder), ("pair", pair)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return folder / "pair.yaml"


def save_graph(
    path: Path, text: str, shapes: Sequence[tuple[int, ...]], rng: np.random.Generator, scale: float = 1.0
) -> None:
    """The graph with weights w1, w2, ... of these shapes. scale: of a weight, times the root of its first size."""
    model = onnx.parser.parse_model(text)
    for index, shape in enumerate(shapes, 1):
        drawn_array = rng.normal(size=shape, scale=scale * shape[0] ** -0.5).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(drawn_array, f"w{index}"))
    onnx.save(model, path)


def draw(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    mask = (np.arange(6) < rng.integers(2, 7, size=(count, 1))).astype(np.float32)
    x, y = rng.normal(size=(count, 6, 8)), rng.normal(size=(count, 8))
    return {"encoder.x": x.astype(np.float32), "decoder.y": y.astype(np.float32), "mask": mask}


def change(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path of keys with '/'; None removes the key."""
    changed_spec = copy.deepcopy(spec)
    *parent_names, last_part = path.split("/")
    place = changed_spec
    for name in parent_names:
        place = place.setdefault(name, {})
    place.pop(last_part, None)
    return changed_spec if value is None else (place.update({last_part: value}) or changed_spec)


def rewrite(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / "changed.yaml"
    path.write_text(json.dumps(spec).replace('"model"', '\n"model"').replace('"graphs"', '\n"graphs"'))
    return path
