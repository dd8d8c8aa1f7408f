"""Moves outliers from activations into weights: x W = (x / s)(s W), with a factor for each channel of x.

SmoothQuant (Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
2022): s = reach(x)^a / reach(W)^(1-a), with the strength a chosen per group. Where possible the division is folded into
constants of what makes x, at no cost at run time: behind a LayerNormalization into its scale and bias; behind a
projection into the columns of its weight and its bias, through everything that leaves channels apart and only scales
with them: a Relu, a bias, Reshape and Transpose around attention heads, and the product of attention weights and
values, which mixes positions only. So the factors of an attention's result end up in its value projection.

Elsewhere (a residual connection reads x too; a Gelu makes it) the division is a Mul by a constant vector in front of
QuantizeLinear: element-wise, beside a product that does a hundred times the work, and open to being fused into the
kernel that quantizes.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pipeline.quantization.graph import attribute_of, constants, consumers, sort_nodes, static_shapes, unused_name
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.groups import Floats, SmoothingGroup, transpose_for
from pipeline.quantization.statistics.observations import TensorStatistics

# f(x / s) = f(x) / s for every positive s.
_HOMOGENEOUS = ("Relu", "LeakyRelu", "Identity")
# Channels and weights that are (nearly) zero would give factors without bound.
_LEAST = 1e-5

_Step = tuple[str, tuple[int, ...], list[tuple[str, int, int]]]


@dataclass(frozen=True)
class Fold:
    """constants: those that take the factors: (node, index of the input, axis of the channels).

    tensors: those between them and the activation, whose values are divided too.
    """

    constants: tuple[tuple[str, int, int], ...]
    tensors: tuple[str, ...] = ()


def find_fold(model: ModelProto, group: SmoothingGroup) -> Fold | None:
    """How factors for the group's activation can be folded, or None: nothing else may read what they change."""
    walk = _FoldingWalk.of(model)
    maker = walk.made_by(group.activation, set(group.nodes))
    if maker is None or maker.op_type != "LayerNormalization":
        return _into_projection(group.activation, maker, walk)
    vectors = [walk.given.get(name) for name in maker.input[1:]]
    last = attribute_of(maker, "axis", -1) == -1
    if not last or not all(item is not None and len(item.dims) == 1 for item in vectors):
        return None
    return Fold(tuple((maker.name, index, 0) for index in range(1, len(maker.input))))


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
        """The node that makes a tensor; None where it is an input, or others than the nodes `only` read it too."""
        if tensor in self.outputs or not {node.name for node in self.readers.get(tensor, ())} <= only:
            return None
        return self.makers.get(tensor)


def _into_projection(tensor: str, maker: NodeProto | None, walk: _FoldingWalk) -> Fold | None:
    """Go back from a tensor to a projection, keeping track of the axes that the activation's channels lie on."""
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
    axis = 0 if attribute_of(node, "transB", 0) else 1
    if weight is None or len(weight.dims) != 2 or weight.dims[axis] != size:
        return None
    if len(node.input) < 3 or not node.input[2]:
        return ((node.name, 1, axis),)
    bias = walk.given.get(node.input[2])
    return ((node.name, 1, axis), (node.name, 2, 0)) if bias is not None and list(bias.dims) == [size] else None


def _before(node: NodeProto, tensor: str, axes: tuple[int, ...], size: int, walk: _FoldingWalk) -> _Step | None:
    """One step back through the node that makes `tensor`: the tensor to go on from, its channel axes, and the constants
    that take factors too. None where the factors cannot pass."""
    shape = walk.shapes.get(tensor, ())
    if node.op_type in _HOMOGENEOUS:
        return node.input[0], axes, []
    if node.op_type == "Add":
        biases = [walk.given.get(name) for name in node.input]
        index = next((i for i, bias in enumerate(biases) if bias is not None and list(bias.dims) == [size]), None)
        if index is None or axes != (len(shape) - 1,):
            return None
        return node.input[1 - index], axes, [(node.name, index, 0)]
    if node.op_type == "Transpose":
        order = attribute_of(node, "perm", list[int]())
        return (node.input[0], tuple(order[axis] for axis in axes), []) if order else None
    if node.op_type == "Reshape":
        # The channels must be the last axes on both sides: then their order in memory is the same.
        before = walk.shapes.get(node.input[0], ())
        count = next((k for k in range(1, len(before) + 1) if prod(before[-k:]) == size), None)
        if count is None or axes != tuple(range(len(shape) - len(axes), len(shape))):
            return None
        return node.input[0], tuple(range(len(before) - count, len(before))), []
    if node.op_type == "MatMul" and len(shape) - 2 not in axes:
        # Attention weights times values: the channels must be whole in the values, and no axis broadcast.
        values = walk.shapes.get(node.input[1], ())
        fits = len(values) == len(shape) and all(values[axis] == shape[axis] != 0 for axis in axes)
        return (node.input[1], axes, []) if fits and node.input[0] != node.input[1] else None
    return None


@dataclass(frozen=True)
class SmoothingPlan:
    """How one group is to be quantized.

    strength: of smoothing, None for none.  clip: share of the range that is kept.  factors: what each channel of the
    activation is divided by.  weights: node -> rounded matrix [in, out], factors included; of a convolution, in its own
    shape.  low, high: range of the smoothed activation.  biases: node -> bias, where it changes.
    seen: what the smoothed activation held, its histogram being of some rows; None without smoothing.
    weight_db: node -> SQNR of its rounded weight, against the one before rounding.
    """

    group: SmoothingGroup
    strength: float | None
    clip: float
    factors: Floats | None
    weights: Mapping[str, Floats]
    low: float
    high: float
    biases: Mapping[str, Floats] = field(default_factory=dict)
    seen: TensorStatistics | None = None
    weight_db: Mapping[str, float] = field(default_factory=dict)


def factors_of(reach: Floats, weights: Floats, strength: float) -> Floats:
    """Factors [channels] for an activation, their geometric mean being 1.

    reach, weights: largest magnitudes, [channels]: of the activation, and of the weights that it is multiplied by.
    """
    powers = strength * np.log(np.maximum(reach, _LEAST)) - (1 - strength) * np.log(np.maximum(weights, _LEAST))
    return np.asarray(np.exp(powers - powers.mean()), np.float32)


def apply_plans(model: ModelProto, plans: Sequence[SmoothingPlan], ranges: Ranges) -> tuple[ModelProto, Ranges]:
    """A prepared model with the plans carried out, in float, and the ranges that quantize it so.

    The weights lie on the levels that int8 will give them; node names stay.
    """
    copy = deepcopy(model)
    tensors = dict(ranges.tensors)
    by_name = {node.name: node for node in copy.graph.node}
    for plan in plans:
        read = plan.group.activation
        if plan.factors is not None and not folds(copy, plan.group):
            inverse = _constant(copy.graph, f"{read}_factors", 1 / plan.factors)
            result = unused_name(f"{read}_smoothed", _names(copy.graph))
            copy.graph.node.append(helper.make_node("Mul", [read, inverse], [result], name=result))
            read = result
            for node in plan.group.nodes:
                by_name[node].input[0] = read
        tensors[read] = (plan.low, plan.high)
        _set_weights(copy.graph, plan, by_name)
    for plan in plans:  # once all of them have set their weights
        _fold(copy, plan, by_name, tensors)
    sort_nodes(copy.graph)
    return copy, replace(ranges, tensors=tensors)


def folds(model: ModelProto, group: SmoothingGroup) -> bool:
    """Whether factors for this group's activation can be folded into what makes it."""
    return find_fold(model, group) is not None


def _fold(
    model: ModelProto, plan: SmoothingPlan, by_name: Mapping[str, NodeProto], tensors: dict[str, tuple[float, float]]
) -> None:
    """In place: divide the constants that take the plan's factors, and the ranges of the tensors between."""
    fold = None if plan.factors is None else find_fold(model, plan.group)
    if fold is None or plan.factors is None:
        return
    given = constants(model.graph)
    for name, index, axis in fold.constants:
        node = by_name[name]
        values = numpy_helper.to_array(given[node.input[index]])
        factors = np.expand_dims(plan.factors, [other for other in range(values.ndim) if other != axis])
        node.input[index] = _constant(model.graph, f"{node.input[index]}_smoothed", values / factors)
    most = float((1 / plan.factors).max())
    for tensor in fold.tensors:
        if tensor in tensors:
            tensors[tensor] = (tensors[tensor][0] * most, tensors[tensor][1] * most)


def _set_weights(graph: GraphProto, plan: SmoothingPlan, by_name: Mapping[str, NodeProto]) -> None:
    for site in plan.group.sites:
        if site.node in plan.weights:
            values = plan.weights[site.node]
            if site.op_type != "Conv":
                values = np.ascontiguousarray(transpose_for(site, values))
            by_name[site.node].input[1] = _constant(graph, f"{site.weight}_{site.node}", values)
        if site.node in plan.biases:
            node = by_name[site.node]
            del node.input[2:]
            node.input.append(_constant(graph, f"{site.weight}_{site.node}_bias", plan.biases[site.node]))


def _constant(graph: GraphProto, name: str, values: NDArray[np.floating]) -> str:
    fresh = unused_name(name, _names(graph))
    graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.float32), fresh))
    return fresh


def _names(graph: GraphProto) -> set[str]:
    return {item.name for item in graph.initializer} | {name for node in graph.node for name in node.output}
