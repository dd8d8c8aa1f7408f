"""A small decoder: token ids in, logits out, with a cache that grows by what it read."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import numpy_helper

from enginesmith.core.types import BuildRequest, ShapeProfile, Target, TensorSpec

VOCABULARY, WIDTH = 12, 8
DECODER: dict[str, Any] = {
    "model": "decoder",
    "source": {"onnx": "model.onnx"},
    "inputs": {
        "ids": {"dtype": "int64", "shape": ["batch", "places"]},
        "past": {"dtype": "float32", "shape": ["batch", "length", WIDTH]},
    },
    "outputs": ["logits", "present"],
    "state": {"past": {"output": "present", "initial": 0}},
    "dims": {
        "batch": {"min": 1, "opt": 2, "max": 3},
        "places": {"min": 1, "opt": 1, "max": 4},
        "length": {"min": 0, "opt": 6, "max": 14},
    },
    "targets": ["cpu"],
    "backends": {"onnxruntime": {}},
    "golden": {"data": "golden.npz", "sequence": "text"},
    "validation": {"latency": "off"},
}
REQUEST = BuildRequest(
    "",
    "fp32",
    Target("cpu"),
    "onnxruntime",
    (TensorSpec("ids", "int64", ("batch", "places")), TensorSpec("past", "float32", ("batch", "length", WIDTH))),
    (TensorSpec("logits", "float32", ("batch", VOCABULARY)), TensorSpec("present", "float32", ("batch", "all", WIDTH))),
    (ShapeProfile((("ids", (1, 1), (2, 1), (3, 4)), ("past", (1, 0, 8), (2, 6, 8), (3, 14, 8)))),),
)
_GRAPH = """
<ir_version: 8, opset_import: ["" : 17]>
decoder (int64[batch, places] ids, float[batch, length, 8] past) => (float[batch, 12] logits, float[batch, all, 8] present) {
    read = Gather (embedding, ids)
    present = Concat <axis = 1> (past, read)
    last_place = Constant <value = int64 {-1}> ()
    last = Gather <axis = 1> (present, last_place)
    mean = ReduceMean <axes = [1], keepdims = 0> (present)
    mixed = Sub (last, mean)
    bent = Tanh (mixed)
    logits = MatMul (bent, head)
}
"""  # noqa: E501 - a line of the grammar


def make_decoder() -> onnx.ModelProto:
    model, rng = onnx.parser.parse_model(_GRAPH), np.random.default_rng(0)
    for name, shape in (("embedding", (VOCABULARY, WIDTH)), ("head", (WIDTH, VOCABULARY))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def write_decoder(folder: Path, spec: dict[str, Any] = DECODER) -> Path:
    """The model, its golden set (3 sequences of 6 tokens) and the spec's file, in a new folder."""
    folder.mkdir(parents=True)
    onnx.save(make_decoder(), folder / "model.onnx")
    ids = np.random.default_rng(1).integers(VOCABULARY, size=(18, 1))
    np.savez(folder / "golden.npz", ids=ids, text=np.arange(18) // 6)
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path
