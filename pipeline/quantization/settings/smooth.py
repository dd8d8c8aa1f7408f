"""Where factors for an activation's channels can go at no cost at run time: into constants of what makes it.

Behind a LayerNormalization they go into its scale and bias. Behind a projection they go into the columns of its weight
and its bias, through everything that leaves channels apart and only scales with them: a Relu, a bias, Reshape and
Transpose around attention heads, and the product of attention weights and values, which mixes positions only. So the
factors of an attention's result end up in its value projection.

Moving outliers from activations into weights: x W = (x / s)(s W), with a factor for each channel of x.

SmoothQuant (Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
2022): s = reach(x)^a / reach(W)^(1-a), with the strength a chosen per group. The division is folded into constants of
what makes x where `folding` finds some. Elsewhere (a residual connection reads x too; a Gelu makes it) it is a Mul by a
constant vector in front of QuantizeLinear: element-wise, beside a product that does a hundred times the work, and open
to being fused into the kernel that quantizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pipeline.quantization.graph import constants, consumers, sort_nodes, static_shapes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.groups import Floats, SmoothingGroup, laid_out
from pipeline.quantization.statistics.observations import TensorStatistics

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


# Channels and weights that are (nearly) zero would give factors without bound.
LEAST = 1e-5


@dataclass(frozen=True)
class SmoothingPlan:
    """How one group is to be quantized.

    strength: of smoothing, None for none.  clip: share of the range that is kept.  factors: what each channel of the
    activation is divided by.  weights: node -> rounded matrix (in, out), factors included; of a convolution, in its own
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


def factors_of(reach: Floats, weights: Sequence[Floats], strength: float) -> Floats:
    """Factors for the channels of an activation, their geometric mean being 1."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    powers = strength * np.log(np.maximum(reach, LEAST)) - (1 - strength) * np.log(np.maximum(rows, LEAST))
    return np.asarray(np.exp(powers - powers.mean()), np.float32)


def apply_plans(model: ModelProto, plans: Sequence[SmoothingPlan], ranges: Ranges) -> tuple[ModelProto, Ranges]:
    """A prepared model with the plans carried out, in float, and the ranges that quantize it so.

    The weights lie on the levels that int8 will give them; node names stay.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    tensors = dict(ranges.tensors)
    by_name = {node.name: node for node in copy.graph.node}
    for plan in plans:
        read = plan.group.activation
        if plan.factors is not None:
            read = _divide(copy, plan, by_name)
        tensors[read] = (plan.low, plan.high)
        _set_weights(copy.graph, plan, by_name)
    for plan in plans:
        _fold(copy, plan, by_name, tensors)
    sort_nodes(copy.graph)
    return copy, replace(ranges, tensors=tensors)


def folds(model: ModelProto, group: SmoothingGroup) -> bool:
    """Whether factors for this group's activation can be folded into what makes it."""
    return find_fold(model, group) is not None


def _divide(model: ModelProto, plan: SmoothingPlan, by_name: Mapping[str, NodeProto]) -> str:
    """Divide the group's activation by the factors; the name of the tensor that the group reads from now on."""
    group, factors = plan.group, plan.factors
    assert factors is not None  # noqa: S101 - the caller's condition
    if folds(model, group):
        return group.activation
    inverse = _constant(model.graph, f"{group.activation}_factors", 1 / factors)
    result = _fresh(model.graph, f"{group.activation}_smoothed")
    model.graph.node.append(helper.make_node("Mul", [group.activation, inverse], [result], name=result))
    for node in group.nodes:
        by_name[node].input[0] = result
    return result


def _fold(
    model: ModelProto, plan: SmoothingPlan, by_name: Mapping[str, NodeProto], tensors: dict[str, tuple[float, float]]
) -> None:
    """Divide the constants that take the plan's factors, after every plan has set its weights."""
    fold = None if plan.factors is None else find_fold(model, plan.group)
    if fold is None or plan.factors is None:
        return
    given = constants(model.graph)
    for name, index, axis in fold.constants:
        node = by_name[name]
        values = numpy_helper.to_array(given[node.input[index]])
        shape = [-1 if i == axis else 1 for i in range(values.ndim)]
        node.input[index] = _constant(
            model.graph, f"{node.input[index]}_smoothed", values / plan.factors.reshape(shape)
        )
    most = float((1 / plan.factors).max())
    for tensor in fold.tensors:
        if tensor in tensors:
            tensors[tensor] = (tensors[tensor][0] * most, tensors[tensor][1] * most)


def _set_weights(graph: GraphProto, plan: SmoothingPlan, by_name: Mapping[str, NodeProto]) -> None:
    for site in plan.group.sites:
        if site.node in plan.weights:
            values = laid_out(plan.weights[site.node], site)
            by_name[site.node].input[1] = _constant(graph, f"{site.weight}_{site.node}", values)
        if site.node in plan.biases:
            node = by_name[site.node]
            del node.input[2:]
            node.input.append(_constant(graph, f"{site.weight}_{site.node}_bias", plan.biases[site.node]))


def _constant(graph: GraphProto, name: str, values: NDArray[np.floating]) -> str:
    fresh = _fresh(graph, name)
    graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.float32), fresh))
    return fresh


def _fresh(graph: GraphProto, name: str) -> str:
    taken = {item.name for item in graph.initializer} | {name for node in graph.node for name in node.output}
    while name in taken:
        name += "_"
    return name
