"""A small ensemble with functions between its graphs: spots of a picture are found, cut out and named."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import numpy_helper

from tests.ensembles import ENCODER

HEIGHT, WIDTH, SIDE, NAMES = 16, 32, 6, 5
READER: dict[str, Any] = {
    "model": "reader",
    "graphs": {"detector": "detector.yaml", "recogniser": "recogniser.yaml"},
    "functions": {
        "prepare": {
            "function": "reading.py:prepare",
            "inputs": {"image": {"dtype": "uint8", "shape": [HEIGHT, WIDTH]}},
            "outputs": {"x": {"dtype": "float32", "shape": ["rows", 1, HEIGHT, WIDTH]}},
        },
        "crops": {
            "function": "reading.py:crop",
            "inputs": {
                "image": {"dtype": "uint8", "shape": [HEIGHT, WIDTH]},
                "spots": {"dtype": "float32", "shape": ["rows", 1, HEIGHT, WIDTH]},
            },
            "outputs": {
                "x": {"dtype": "float32", "shape": ["rows", 1, SIDE, SIDE]},
                "boxes": {"dtype": "int64", "shape": ["rows", 2]},
            },
        },
        "names": {
            "function": "reading.py:name",
            "inputs": {"logits": {"dtype": "float32", "shape": ["rows", NAMES]}},
            "outputs": {"names": {"dtype": "int64", "shape": ["rows"]}},
        },
    },
    "connections": {
        "prepare.image": "image",
        "detector.x": "prepare.x",
        "crops.image": "image",
        "crops.spots": "detector.spots",
        "recogniser.x": "crops.x",
        "names.logits": "recogniser.logits",
    },
    "golden": {"data": "golden.npz"},
    "calibration": {"data": "calibration.npz"},
}
DETECTOR: dict[str, Any] = {
    **ENCODER,
    "model": "reader-detector",
    "source": {"onnx": "detector.onnx"},
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", 1, HEIGHT, WIDTH]}},
    "outputs": ["spots"],
    "dims": {"batch": {"min": 1, "opt": 1, "max": 4}},
}
RECOGNISER: dict[str, Any] = {
    **DETECTOR,
    "model": "reader-recogniser",
    "source": {"onnx": "recogniser.onnx"},
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", 1, SIDE, SIDE]}},
    "outputs": ["logits"],
    "dims": {"batch": {"min": 1, "opt": 2, "max": 2}},
}
CODE = '''"""Between the graphs."""

import numpy as np

from sizes import SIDE


def prepare(image):
    return {"x": image[None, None].astype(np.float32) / 255}


def crop(image, spots):
    places = np.argwhere(spots[0, 0] > 0.5)
    found = []
    for row, column in places:
        if all(abs(row - r) >= SIDE or abs(column - c) >= SIDE for r, c in found):
            found.append((min(row, 16 - SIDE), min(column, 32 - SIDE)))
    cut = [image[r : r + SIDE, c : c + SIDE] for r, c in found]
    x = np.array(cut, np.float32).reshape(-1, 1, SIDE, SIDE) / 255
    return {"x": x, "boxes": np.array(found, np.int64).reshape(-1, 2)}


def name(logits):
    return {"names": logits.argmax(-1)}
'''
_GRAPHS = {
    "detector": """
        <ir_version: 8, opset_import: ["" : 17]>
        detector (float[batch, 1, 16, 32] x) => (float[batch, 1, 16, 32] spots) {
            raw = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
            spots = Sigmoid (raw)
        }
    """,
    "recogniser": """
        <ir_version: 8, opset_import: ["" : 17]>
        recogniser (float[batch, 1, 6, 6] x) => (float[batch, 5] logits) {
            flat = Flatten (x)
            logits = MatMul (flat, w1)
        }
    """,
}


def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    """Pictures with one to three bright squares each."""
    images = rng.integers(0, 20, (count, HEIGHT, WIDTH))
    for image in images:
        for column in rng.choice([1, 11, 21], rng.integers(1, 4), replace=False):
            row = rng.integers(1, 9)
            image[row : row + 4, column : column + 4] = rng.integers(120, 255, (4, 4))
    return images.astype(np.uint8)


def write_reader(folder: Path, spec: dict[str, Any] = READER, code: str = CODE) -> Path:
    """Graphs, functions, data and specs in a new folder; the path of the ensemble's spec."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    kernel = np.zeros((1, 1, 3, 3), np.float32)
    kernel[0, 0] = 8.0
    weights = {"detector": kernel, "recogniser": rng.normal(size=(36, NAMES)).astype(np.float32)}
    for name, text in _GRAPHS.items():
        model = onnx.parser.parse_model(text)
        model.graph.initializer.append(numpy_helper.from_array(weights[name], "w1"))
        if name == "detector":
            bias = numpy_helper.from_array(np.array([-12.0], np.float32), "b1")
            model.graph.initializer.append(bias)
            model.graph.node[0].input.append("b1")
        onnx.save(model, folder / f"{name}.onnx")
    for name, count in (("calibration", 24), ("golden", 8)):
        np.savez(folder / f"{name}.npz", image=draw(rng, count))
    (folder / "reading.py").write_text(code)
    (folder / "sizes.py").write_text(f"SIDE = {SIDE}\n")
    for name, item in (("detector", DETECTOR), ("recogniser", RECOGNISER), ("reader", spec)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(item, sort_keys=False))
    return folder / "reader.yaml"
