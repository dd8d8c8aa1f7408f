"""Where factors for an activation's channels can go at no cost at run time: into constants of what makes it.

Behind a LayerNormalization they go into its scale and bias. Behind a projection they go into the columns of its weight
and its bias, through everything that leaves channels apart and only scales with them: a Relu, a bias, Reshape and
Transpose around attention heads, and the product of attention weights and values, which mixes positions only. So the
factors of an attention's result end up in its value projection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from pipeline.graphs.graph import constants, consumers, static_shapes
from pipeline.quantization.settings.groups import SmoothingGroup

# f(x / s) = f(x) / s for every positive s.
_HOMOGENEOUS = ("Relu", "LeakyRelu", "Identity")


@dataclass(frozen=True)
class Fold:
    """Constants that take the factors: (node, position of the input, axis of the channels).

    tensors: those between them and the activation, whose values are divided too.
    """

    constants: tuple[tuple[str, int, int], ...]
    tensors: tuple[str, ...] = ()


def find_fold(model: ModelProto, group: SmoothingGroup) -> Fold | None:
    """How factors for the group's activation can be folded, or None: the group alone must read what they change."""
    walk = _FoldingWalk.of(model)
    maker = walk.made_by(group.activation, set(group.nodes))
    if maker is None:
        return None
    if maker.op_type == "LayerNormalization":
        return _into_normalization(maker, walk)
    return _into_projection(group.activation, maker, walk)


@dataclass
class _FoldingWalk:
    """A model, for going from a tensor to what made it."""

    given: Mapping[str, TensorProto]
    makers: Mapping[str, NodeProto]
    readers: Mapping[str, list[NodeProto]]
    outputs: set[str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: ModelProto) -> "_FoldingWalk":
        graph = model.graph
        makers = {name: node for node in graph.node for name in node.output}
        return cls(constants(graph), makers, consumers(graph), {v.name for v in graph.output}, static_shapes(model))

    def made_by(self, tensor: str, only: set[str]) -> NodeProto | None:
        """The node that makes a tensor which nobody but these nodes reads."""
        if tensor in self.outputs or not {node.name for node in self.readers.get(tensor, ())} <= only:
            return None
        return self.makers.get(tensor)


def _into_normalization(maker: NodeProto, walk: _FoldingWalk) -> Fold | None:
    axis = next((item.i for item in maker.attribute if item.name == "axis"), -1)
    vectors = [walk.given.get(name) for name in maker.input[1:]]
    if axis != -1 or not all(item is not None and len(item.dims) == 1 for item in vectors):
        return None
    return Fold(tuple((maker.name, index, 0) for index in range(1, len(maker.input))))


def _into_projection(tensor: str, maker: NodeProto | None, walk: _FoldingWalk) -> Fold | None:
    """Go back from a tensor to a projection; axes: those that the channels of the activation lie on, in order."""
    rank = len(walk.shapes.get(tensor, ()))
    size = walk.shapes[tensor][-1] if rank else 0
    axes: tuple[int, ...] = (rank - 1,)
    found: list[tuple[str, int, int]] = []
    passed: list[str] = []
    while maker is not None and size:
        if ends := _projection(maker, walk, size):
            plain = axes == (len(walk.shapes.get(tensor, ())) - 1,)
            return Fold((*found, *ends), tuple(passed)) if plain else None
        step = _before(maker, tensor, axes, size, walk)
        if step is None:
            return None
        tensor, axes, constant = step
        found += constant
        passed.append(tensor)
        maker = walk.made_by(tensor, {maker.name})
    return None


def _projection(node: NodeProto, walk: _FoldingWalk, size: int) -> tuple[tuple[str, int, int], ...] | None:
    """The constants of a MatMul or Gemm whose columns are the channels."""
    weight = walk.given.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
    flipped = any(item.name == "transB" and helper.get_attribute_value(item) for item in node.attribute)
    axis = 0 if flipped else 1
    if weight is None or len(weight.dims) != 2 or weight.dims[axis] != size:
        return None
    if len(node.input) < 3 or not node.input[2]:
        return ((node.name, 1, axis),)
    bias = walk.given.get(node.input[2])
    return ((node.name, 1, axis), (node.name, 2, 0)) if bias is not None and list(bias.dims) == [size] else None


_Step = tuple[str, tuple[int, ...], list[tuple[str, int, int]]]


def _before(node: NodeProto, tensor: str, axes: tuple[int, ...], size: int, walk: _FoldingWalk) -> _Step | None:
    """One step back through a node: the tensor to go on from, its channel axes, constants that take factors too."""
    shape = walk.shapes.get(tensor, ())
    if node.op_type in _HOMOGENEOUS:
        return node.input[0], axes, []
    if node.op_type == "Add":
        return _before_bias(node, axes == (len(shape) - 1,), axes, size, walk)
    if node.op_type == "Transpose":
        order = next((tuple(item.ints) for item in node.attribute if item.name == "perm"), ())
        return (node.input[0], tuple(order[axis] for axis in axes), []) if order else None
    if node.op_type == "Reshape":
        return _before_reshape(node, axes, shape, size, walk)
    if node.op_type == "MatMul" and len(shape) - 2 not in axes:
        return _before_product(node, axes, shape, walk)
    return None


def _before_bias(node: NodeProto, last: bool, axes: tuple[int, ...], size: int, walk: _FoldingWalk) -> _Step | None:
    for index in (0, 1):
        bias = walk.given.get(node.input[index])
        if last and bias is not None and list(bias.dims) == [size]:
            return node.input[1 - index], axes, [(node.name, index, 0)]
    return None


def _before_reshape(
    node: NodeProto, axes: tuple[int, ...], shape: tuple[int, ...], size: int, walk: _FoldingWalk
) -> _Step | None:
    """The channels must be the last axes on both sides: then their order in memory is the same."""
    before = walk.shapes.get(node.input[0], ())
    count = next((k for k in range(1, len(before) + 1) if int(np.prod(before[-k:])) == size), None)
    if count is None or axes != tuple(range(len(shape) - len(axes), len(shape))):
        return None
    return node.input[0], tuple(range(len(before) - count, len(before))), []


def _before_product(node: NodeProto, axes: tuple[int, ...], shape: tuple[int, ...], walk: _FoldingWalk) -> _Step | None:
    """Through attention weights times values: the channels must be whole in the values, and no axis broadcast."""
    values = walk.shapes.get(node.input[1], ())
    fits = len(values) == len(shape) and all(values[axis] == shape[axis] != 0 for axis in axes)
    return (node.input[1], axes, []) if fits and node.input[0] != node.input[1] else None
