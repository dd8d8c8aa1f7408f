"""Integer sums that saturate on a CPU without VNNI, and graphs rewritten to have none, in any session.

The uint8 x int8 kernels of such CPUs add pairs of products in 16 bits. With factors of 255 and 64 a pair is 32,640,
which 16 bits hold: int8 weights within -64..64 stay. Others become uint8, which ONNX Runtime multiplies exactly on
every CPU, more slowly: weight and zero point both grow by 128, so that the results are the same. An engine for such a
CPU is rewritten in its file; a reference graph, which runs as it is written, in memory.

ONNX Runtime's session option `session.x64quantprecision` does something similar when a file is opened. It is not used:
a session without it computes wrong numbers, it fails for a weight that two nodes share ("Attempt to replace the
existing tensor", 1.31), skips factors that are computed at run time, and does nothing in a graph that runs as it is
written.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from google.protobuf.message import Error  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from builders.onnx_graphs.bodies import list_bodies, list_reads, set_items, walk_graphs, walk_nodes
from builders.onnx_graphs.outline import in_shards, load_outline, save_graph, write_graph
from builders.onnx_graphs.weights import embed, from_array, is_external, load_graph, to_array
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError
from enginesmith.core.text import pluralize

# Operator -> places of the factor that ONNX Runtime multiplies first and of its zero point (None: it is uint8), and of
# each factor that it multiplies that by. The first factor of ConvInteger is its weight. Seen with 1.31 on AVX2: uint8
# first and int8 second saturates; the other three pairings do not, nor do depthwise convolutions.
_Place = tuple[int, int]
_FACTORS: Mapping[str, tuple[_Place | None, tuple[_Place, ...]]] = {
    "MatMulInteger": ((0, 2), ((1, 3),)),
    "ConvInteger": ((1, 3), ((0, 2),)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QGemm"), ((0, 2), ((3, 5),))),
    "MatMulIntegerToFloat": ((0, 4), ((1, 5),)),
    "DynamicQuantizeMatMul": (None, ((1, 3),)),
    "DynamicQuantizeLSTM": (None, ((1, 9), (2, 11))),
    "QAttention": ((0, 6), ((1, 7),)),
}
# Readers of a dequantized weight that may be fused with it into an integer operator when the file is opened.
_FUSED = ("Conv", "Gemm", "MatMul")
# Operators whose first result has the type of their first input.
_MOVING = frozenset(
    ("Concat", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
)
_SHIFT = 128
HIGHEST = 64  # 2 * 255 * 64 < 2**15
_UNREADABLE = (Error, ValueError, OSError, ModelError)


def exact_source(path: Path) -> str | bytes:
    """The path or the bytes of a model that computes the same as the file `path`, and in which no sum saturates: `path`
    if none can, else a rewritten model: its bytes, or a file beside `path` if its weights lie in shards. `path` if the
    file cannot be read: ONNX Runtime then raises the reason."""
    try:
        if not file_may_saturate(path):
            return str(path)
        model = load_graph(path)
        if not in_shards(model):
            for tensor in model.graph.initializer:
                if is_external(tensor):
                    embed(tensor)
            make_exact(model)
            return bytes(model.SerializeToString())
        make_exact(model)
        exact_path = path.with_name(f"exact-{path.name}")
        save_graph(model, exact_path)
        return str(exact_path)
    except _UNREADABLE:
        return str(path)


def rewrite_exact(path: Path) -> tuple[str, ...]:
    """Rewrite an engine's file, in place, so that no sum saturates on any CPU; returns a note if that changed it."""
    model = load_graph(path)
    count = make_exact(model)
    if not count:
        return ()
    write_graph(model, path)
    products = pluralize(count, "product takes an int8 factor", "products take an int8 factor")
    return (f"{products} beyond -64..64, or made at run time, as uint8: exact without VNNI in any session, but slower",)


def file_may_saturate(path: Path) -> bool:
    """Whether an integer sum may saturate on a CPU without VNNI. Reads only the int8 tensors of external data."""
    return next(_find_saturating(_Scope.of(load_outline(path).graph)), None) is not None


def make_exact(model: ModelProto) -> int:
    """Turn int8 factors that are beyond -64..64, or computed at run time, into uint8, in place, in all graphs of a
    model; returns how many times nodes read one. A constant that several nodes read, in any of the graphs, is shifted
    once."""
    scope = _Scope.of(model.graph)
    saturating_count = len(list(_find_saturating(scope)))
    if saturating_count:
        _Rewrite(model).apply(scope)
    return saturating_count


@dataclass
class _Scope:
    """The names that a graph sees. names, constants, kinds: its own; kinds are ONNX's element types.

    makers: tensor -> the node that computes it.  shifted: name -> the name of the same tensor plus 128, as uint8.
    """

    graph: GraphProto
    outer: "_Scope | None" = None
    names: set[str] = field(default_factory=set)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    makers: dict[str, NodeProto] = field(default_factory=dict)
    shifted: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: GraphProto, outer_scope: "_Scope | None" = None) -> "_Scope":
        """The scope of a graph within another one's."""
        scope = cls(graph, outer_scope, constants={tensor.name: tensor for tensor in graph.initializer})
        scope.makers = {name: node for node in graph.node for name in node.output}
        scope.names = {*scope.constants, *scope.makers, *(value.name for value in graph.input)}
        values = (*graph.value_info, *graph.output, *graph.input)
        scope.kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        scope.kinds |= {name: tensor.data_type for name, tensor in scope.constants.items()}
        for node in graph.node:
            scope.kinds |= scope._results(node)
        return scope

    def owner(self, name: str) -> "_Scope":
        """The scope that defines a name: this one, or one around it."""
        return self if self.outer is None or name in self.names else self.outer.owner(name)

    def kind(self, name: str) -> int:
        """The element type of a tensor; 0 where it is not known."""
        return self.owner(name).kinds.get(name, 0) if name else 0

    def constant(self, name: str) -> TensorProto | None:
        """The constant with this name; None for values computed at run time."""
        return self.owner(name).constants.get(name)

    def find_shifted(self, name: str) -> str | None:
        """The name of the tensor plus 128, in this graph or one around it."""
        return self.shifted.get(name) or (self.outer.find_shifted(name) if self.outer else None)

    def _results(self, node: NodeProto) -> dict[str, int]:
        """Name -> element type of a node's results, if its own fields and inputs determine it."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "DynamicQuantizeLinear":
            return dict.fromkeys((node.output[0], node.output[2]), TensorProto.UINT8)
        if node.op_type == "QuantizeLinear":
            output_type = attributes["output_dtype"].i if "output_dtype" in attributes else 0
            return {node.output[0]: self.kind(_input(node, 2)) or output_type or TensorProto.UINT8}
        if node.op_type == "Cast":
            return {node.output[0]: attributes["to"].i}
        if node.op_type == "Constant" and "value" in attributes:
            return {node.output[0]: attributes["value"].t.data_type}
        kind = self.kind(_input(node, 0)) if node.op_type in _MOVING else 0
        return {node.output[0]: kind} if kind else {}


def _find_saturating(scope: _Scope) -> Iterator[tuple[NodeProto, _Place]]:
    """Each node whose sums may saturate, in a graph and its inner graphs, with the input places of such a factor."""
    fused_names = _list_fused(scope)
    for node in scope.graph.node:
        for body in list_bodies(node):
            yield from _find_saturating(_Scope.of(body, scope))
        yield from ((node, index_pair) for index_pair in _list_places(node, scope, fused_names))


def _list_places(node: NodeProto, scope: _Scope, fused_names: Collection[str]) -> list[_Place]:
    """Places of a node's int8 factors and their zero points that meet uint8 and are beyond 64 or made at run time."""
    first_places, other_places = (
        (None, ((0, 2),)) if node.op_type == "DequantizeLinear" else _FACTORS.get(node.op_type, (None, ()))
    )
    if node.op_type == "DequantizeLinear" and node.output[0] not in fused_names:
        return []
    kinds = [scope.kind(_input(node, index)) for index in first_places or ()]
    if any(kinds) and TensorProto.UINT8 not in kinds:
        return []
    return [
        (factor_index, zero_index)
        for factor_index, zero_index in other_places
        if TensorProto.INT8 in (scope.kind(_input(node, factor_index)), scope.kind(_input(node, zero_index)))
        and not _is_small(scope.constant(node.input[factor_index]))
    ]


def _is_small(tensor: TensorProto | None) -> bool:
    """Whether a factor is a constant of one value or none, or within -64..64."""
    if tensor is None:
        return False
    values = to_array(tensor)
    return values.size <= 1 or bool(values.max() <= HIGHEST and values.min() >= -HIGHEST)


def _list_fused(scope: _Scope) -> set[str]:
    """The dequantized weights of a graph that meet a dequantized uint8 activation, which ONNX Runtime may fuse."""
    fused_inputs = set[str]()
    for node in scope.graph.node:
        producer = scope.makers.get(node.input[0]) if node.op_type in _FUSED else None
        if producer is not None and producer.op_type == "DequantizeLinear":
            kinds = [scope.kind(_input(producer, index)) for index in (0, 2)]
            fused_inputs |= {node.input[1]} if TensorProto.UINT8 in kinds else set()
    return fused_inputs


class _Rewrite:
    """Replaces int8 factors by uint8 ones, in place."""

    def __init__(self, model: ModelProto) -> None:
        self._taken = {name for node in walk_nodes(model.graph) for name in (*node.input, *node.output)}
        self._taken |= {tensor.name for graph in walk_graphs(model.graph) for tensor in graph.initializer}

    def apply(self, scope: _Scope) -> None:
        """Rewrite a graph and the graphs in its nodes, and remove unused constants."""
        nodes, fused_names = list[NodeProto](), _list_fused(scope)
        for node in scope.graph.node:
            for body in list_bodies(node):
                self.apply(_Scope.of(body, scope))
            for factor_index, zero_index in _list_places(node, scope, fused_names):
                node.input.extend([""] * (zero_index + 1 - len(node.input)))
                node.input[zero_index] = self._shift(
                    node.input[zero_index] or self._add_zero(node, scope), scope, nodes
                )
                node.input[factor_index] = self._shift(node.input[factor_index], scope, nodes)
            nodes.append(node)
        set_items(scope.graph.node, nodes)
        operand_names = {name for node in scope.graph.node for name in list_reads(node)}
        operand_names |= {value.name for value in scope.graph.output}
        unread_names = scope.shifted.keys() - operand_names
        set_items(scope.graph.initializer, (t for t in scope.graph.initializer if t.name not in unread_names))

    def _add_zero(self, node: NodeProto, scope: _Scope) -> str:
        """A zero point for a node without one; that of a DequantizeLinear has the shape of its scales."""
        scales = scope.constant(node.input[1]) if node.op_type == "DequantizeLinear" else None
        return self._add(np.zeros(tuple(scales.dims) if scales else (), np.int8), "no zero point", scope)

    def _shift(self, name: str, scope: _Scope, nodes: list[NodeProto]) -> str:
        """The name of `name` plus 128, as uint8: a new constant for a constant, else the result of new `nodes`."""
        if uint8_name := scope.find_shifted(name):
            return uint8_name
        owner = scope.owner(name)
        if (constant := owner.constants.get(name)) is not None:
            values = (to_array(constant).astype(np.int16) + _SHIFT).astype(np.uint8)
            owner.shifted[name] = self._add(values, f"{name} as uint8", owner, constant)
            return owner.shifted[name]
        wide_name, sum_name, result = (self._name(f"{name} {suffix}") for suffix in ("widened", "moved", "as uint8"))
        shift_name = self._add(np.array(_SHIFT, np.int32), f"{name} shift", scope)
        nodes.append(helper.make_node("Cast", [name], [wide_name], to=TensorProto.INT32))
        nodes.append(helper.make_node("Add", [wide_name, shift_name], [sum_name]))
        nodes.append(helper.make_node("Cast", [sum_name], [result], to=TensorProto.UINT8))
        scope.shifted[name] = result
        return result

    def _add(self, values: Array, name: str, scope: _Scope, like: TensorProto | None = None) -> str:
        """The name of a new constant of a graph. like: a tensor; if it is external, the values may go to a new file."""
        tensor = from_array(values, self._name(name), like or TensorProto())
        scope.graph.initializer.append(tensor)
        scope.names.add(tensor.name)
        scope.constants[tensor.name], scope.kinds[tensor.name] = tensor, tensor.data_type
        return str(tensor.name)

    def _name(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _input(node: NodeProto, place: int) -> str:
    return node.input[place] if 0 <= place < len(node.input) else ""
