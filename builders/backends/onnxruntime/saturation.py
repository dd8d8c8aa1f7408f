"""Whether a model's integer sums can saturate on a CPU without VNNI, and how to open it so that none does.

The uint8 x int8 kernels of such CPUs add pairs of products in 16 bits. With factors of 255 and 64 a pair is 32,640,
which 16 bits hold: a file whose int8 weights are all within -64..64 is opened as it is. In others uint8 weights take
the place of int8 ones. ONNX Runtime does that itself where it optimises the graph that it opens
(`cpu_kinds.EXACT_SESSION`); in a graph that must run as it is written, as a reference does, that option has no effect
(seen in 1.31), so that the model is rewritten here.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from google.protobuf.message import Error  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import walk_graphs
from builders.onnx_graphs.outline import load_outline
from builders.onnx_graphs.shards import in_shards, save_graph
from builders.onnx_graphs.weights import embed, from_array, is_external, load_graph, to_array
from enginery.core.errors import ModelError
from enginery.core.hardware.cpu_kinds import EXACT_SESSION
from enginery.core.types import Untyped

# Operator -> (activation's zero point, weight, weight's zero point), as places among its inputs. ConvInteger is none of
# them: ONNX Runtime lets its weight be the first factor, and int8 x uint8 does not saturate.
_PLACES: dict[str, tuple[int, int, int]] = {
    "MatMulInteger": (2, 1, 3),
    "QLinearMatMul": (2, 3, 5),
    "QLinearConv": (2, 3, 5),
    "QGemm": (2, 3, 5),
    "MatMulIntegerToFloat": (4, 1, 5),
    "DynamicQuantizeMatMul": (-1, 1, 3),
}
_SHIFT = 128
HIGHEST = 64  # 2 * 255 * 64 < 2**15
_UNREADABLE = (Error, ValueError, OSError, ModelError)


def exact_source(path: Path, options: Untyped) -> str | bytes:
    """What to open for a file so that no sum saturates: its path, or the bytes of a rewritten model.

    options: of the session; `EXACT_SESSION` is added where it is needed. For a file that cannot be read it is the path,
    and ONNX Runtime raises the reason.
    """
    import onnxruntime as ort

    try:
        model = load_graph(path)
        if not may_saturate(model):
            return str(path)
        options.add_session_config_entry(*EXACT_SESSION)
        # The option changes constants only, and nothing in a graph that runs as it is written.
        as_written = options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if as_written or not all(Rewrite(model).list_constant_factors()):
            return _write_exact(model, path) if Rewrite(model).list_constant_factors() else str(path)
    except _UNREADABLE:  # over 2 GiB, too: then the option is all there is
        options.add_session_config_entry(*EXACT_SESSION)
    return str(path)


def file_may_saturate(path: Path) -> bool:
    """`may_saturate` of a file."""
    return may_saturate(load_outline(path))


def may_saturate(model: ModelProto) -> bool:
    """Whether an int8 tensor of a model holds more than 64 in magnitude, or is made while it runs.

    Of external data int8 tensors alone are read. A tensor of one number, such as a zero point, is in no pair of
    products.
    """
    for graph in walk_graphs(model.graph):
        within = (item.t for node in graph.node for item in node.attribute if item.HasField("t"))
        for tensor in (*graph.initializer, *within):
            if tensor.data_type == TensorProto.INT8 and math.prod(tensor.dims) > 1:
                values = to_array(tensor)
                if values.max() > HIGHEST or values.min() < -HIGHEST:
                    return True
    rewrite = Rewrite(model)
    return rewrite.quantizes_to_int8() or not all(rewrite.list_constant_factors())


def _write_exact(model: ModelProto, path: Path) -> str | bytes:
    """The model of `path` with uint8 in the place of each int8 weight that meets uint8 activations: its bytes, or the
    path of a file beside it where its weights lie in shards.

    Weight and zero point both grow by 128, so that the results are the same. Graphs within nodes stay as they are.
    """
    sharded = in_shards(model)
    for tensor in model.graph.initializer:
        if is_external(tensor) and not sharded:
            embed(tensor)
    Rewrite(model).apply()
    if not sharded:
        return bytes(model.SerializeToString())
    exact = path.with_name(f"exact-{path.name}")
    save_graph(model, exact)
    return str(exact)


class Rewrite:
    """Makes uint8 weights of int8 ones in a model, in place. A tensor that several nodes read is shifted once."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self._constants = {item.name: item for item in model.graph.initializer}
        self._kinds = {name: item.data_type for name, item in self._constants.items()}
        self._kinds |= {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        for node in model.graph.node:
            self._kinds |= self._results(node)
        self._shifted: dict[str, str] = {}

    def list_constant_factors(self) -> list[bool]:
        """Of each node that multiplies uint8 by int8, whether the int8 factor is a constant of the graph."""
        nodes = (node for node in self.graph.node if self.saturates(node))
        return [node.input[_PLACES[node.op_type][1]] in self._constants for node in nodes]

    def saturates(self, node: NodeProto) -> bool:
        """Whether a node multiplies uint8 by int8."""
        places = _PLACES.get(node.op_type)
        if places is None or self._kinds.get(_input(node, places[1])) != TensorProto.INT8:
            return False
        zero = _input(node, places[0])
        kind = self._kinds.get(zero) if zero else self._kinds.get(node.input[0], TensorProto.UINT8)
        return node.op_type == "DynamicQuantizeMatMul" or kind == TensorProto.UINT8

    def quantizes_to_int8(self) -> bool:
        """Whether a node rounds to int8 while the model runs."""
        quantizers = (node for node in self.graph.node if node.op_type == "QuantizeLinear")
        return any(TensorProto.INT8 in self._results(node).values() for node in quantizers)

    def _results(self, node: NodeProto) -> dict[str, int]:
        """Name -> element type of a node's results, where its own fields tell it."""
        if node.op_type == "DynamicQuantizeLinear":
            return dict.fromkeys((node.output[0], node.output[2]), TensorProto.UINT8)
        if node.op_type == "QuantizeLinear":
            return {node.output[0]: self._kinds.get(_input(node, 2), TensorProto.UINT8)}
        found = next((item.i for item in node.attribute if node.op_type == "Cast" and item.name == "to"), None)
        return {} if found is None else {node.output[0]: found}

    def apply(self) -> None:
        """Shift the weight and the zero point of every node that saturates."""
        nodes: list[NodeProto] = []
        for node in self.graph.node:
            if self.saturates(node):
                _, weight, zero = _PLACES[node.op_type]
                node.input.extend([""] * (zero + 1 - len(node.input)))
                nodes += self._shift(node.input[weight])
                nodes += self._shift(node.input[zero] or self._zero())
                node.input[zero] = self._shifted[node.input[zero] or self._zero()]
                node.input[weight] = self._shifted[node.input[weight]]
            nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def _zero(self) -> str:
        name = "no zero point"
        if name not in self._constants:
            self._add(np.zeros((), np.int8), name)
        return name

    def _shift(self, name: str) -> Iterator[NodeProto]:
        """The nodes, if any, that make `name` plus 128 as uint8."""
        if name in self._shifted:
            return
        result = self._shifted[name] = f"{name} as uint8"
        if given := self._constants.get(name):
            values = (to_array(given).astype(np.int16) + _SHIFT).astype(np.uint8)
            self.graph.initializer.append(from_array(values, result, given))
            self._constants[result] = self.graph.initializer[-1]
            return
        wide, moved, amount = (f"{name} {part}" for part in ("widened", "moved", "shift"))
        self._add(np.array(_SHIFT, np.int32), amount)
        yield helper.make_node("Cast", [name], [wide], to=TensorProto.INT32)
        yield helper.make_node("Add", [wide, amount], [moved])
        yield helper.make_node("Cast", [moved], [result], to=TensorProto.UINT8)

    def _add(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", name: str) -> None:
        self.graph.initializer.append(numpy_helper.from_array(values, name))
        self._constants[name] = self.graph.initializer[-1]


def _input(node: NodeProto, place: int) -> str:
    return node.input[place] if 0 <= place < len(node.input) else ""
