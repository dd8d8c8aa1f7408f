"""A synthetic transformer of any size: an ONNX file whose random weights are written beside it in blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.weights import LEAST_BYTES, set_place

TOKENS = 16
_WEIGHTS = "model.onnx.data"
_BLOCK = 1 << 20


def layers_for(size_bytes: int, width: int) -> int:
    """Layers of that width that take about so many bytes: each has 12 width^2 float32 weights."""
    return max(1, round(size_bytes / (48 * width * width)))


def write_model(folder: Path, layers: int, width: int, seed: int = 0) -> Path:
    """Write `model.onnx` and its weights into `folder`; the model's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _WEIGHTS).open("wb") as stream:
        build = _Transformer(width, stream, np.random.default_rng(seed))
        value = "x"
        for index in range(layers):
            value = build.add_layer(value, f"layer{index:03d}")
        build.add("LayerNormalization", [value, *build.norm("last", width)], "y")
    shape = ["batch", TOKENS, width]
    end_value_infos = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name in ("x", "y")]
    graph = helper.make_graph(build.nodes, "transformer", *end_value_infos, build.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def change_weight(model: Path, value: float = 1.0) -> None:
    """Change one number in the middle of a model's weights."""
    weights = model.with_name(_WEIGHTS)
    with weights.open("r+b") as stream:
        stream.seek(weights.stat().st_size // 2 // 4 * 4)
        stream.write(np.float32(value).tobytes())


@dataclass
class _Transformer:
    """Nodes and weights so far. stream: where large weights go."""

    width: int
    stream: BinaryIO
    generator: np.random.Generator
    nodes: list[NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def norm(self, name: str, width: int) -> tuple[str, str]:
        return self.constant(f"{name}/gamma", np.ones(width)), self.constant(f"{name}/beta", np.zeros(width))

    def weight(self, name: str, rows: int, columns: int) -> str:
        """Standard normal numbers over the square root of `rows`."""
        tensor, left_rows, offset = (
            TensorProto(name=name, data_type=1, dims=[rows, columns]),
            rows * columns,
            self.stream.tell(),
        )
        if 4 * left_rows < LEAST_BYTES:
            return self.constant(name, self.generator.standard_normal((rows, columns)) * rows**-0.5)
        set_place(tensor, _WEIGHTS, offset, 4 * left_rows)
        while left_rows:
            drawn_array = self.generator.standard_normal(min(left_rows, _BLOCK), np.float32) * np.float32(rows**-0.5)
            self.stream.write(drawn_array.tobytes())
            left_rows -= len(drawn_array)
        self.weights.append(tensor)
        return name

    def add_layer(self, value: str, name: str) -> str:
        """Attention of one head, then two products, each with its normalization and residual."""
        width = self.width
        norm_value = self.add("LayerNormalization", [value, *self.norm(f"{name}/norm1", width)], f"{name}/normed1")
        query, key, of = (
            self.add("MatMul", [norm_value, self.weight(f"{name}/{part}", width, width)], f"{name}/{part}_out")
            for part in ("query", "key", "value")
        )
        turned_key = self.add("Transpose", [key], f"{name}/turned", perm=[0, 2, 1])
        scores = self.add("MatMul", [query, turned_key], f"{name}/scores")
        scale = self.constant(f"{name}/scale", np.full((), width**-0.5))
        scaled_scores = self.add("Mul", [scores, scale], f"{name}/scaled")
        shares = self.add("Softmax", [scaled_scores], f"{name}/shares", axis=-1)
        mixed_values = self.add("MatMul", [shares, of], f"{name}/mixed")
        out_value = self.add("MatMul", [mixed_values, self.weight(f"{name}/out", width, width)], f"{name}/attention")
        value = self.add("Add", [value, out_value], f"{name}/residual1")
        norm_value = self.add("LayerNormalization", [value, *self.norm(f"{name}/norm2", width)], f"{name}/normed2")
        wide_value = self.add("MatMul", [norm_value, self.weight(f"{name}/up", width, 4 * width)], f"{name}/wide")
        biased = self.add("Add", [wide_value, self.constant(f"{name}/bias", np.zeros(4 * width))], f"{name}/biased")
        active_value = self.add("Relu", [biased], f"{name}/active")
        narrow = self.add("MatMul", [active_value, self.weight(f"{name}/down", 4 * width, width)], f"{name}/narrow")
        return self.add("Add", [value, narrow], f"{name}/residual2")
