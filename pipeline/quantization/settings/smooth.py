"""Settings of convolutions and matrices: smoothing, bias correction."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from builders.onnx_graphs.weights import from_array, to_array
from pipeline.quantization.graph import (
    attribute_of,
    constants,
    consumers,
    element_types,
    sort_nodes,
    static_shapes,
    unused_name,
)
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.groups import (
    LEVELS,
    Floats,
    Levels,
    SmoothingGroup,
    compensate,
    find_biases,
    find_waists,
    transpose_for,
)
from pipeline.quantization.settings.moments import (
    ActivationRange,
    Layer,
    Moments,
    StartedRuns,
    as_matrices,
    as_weight,
    batches,
    find_layers,
    moments_of,
)
from pipeline.quantization.settings.runs import Run
from pipeline.quantization.statistics.observations import TensorStatistics

# Moves outliers from activations into weights: x W = (x / s)(s W), with a factor for each channel of x.
#
# SmoothQuant (Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
# 2022): s = reach(x)^a / reach(W)^(1-a), with the strength a chosen per group. Where possible the division is folded
# into constants of the producer of x, at no cost at run time: into the scale and bias of a LayerNormalization, or into
# the weight columns and bias of a projection. Operators between it and x may be there if they keep channels separate
# and scale with them: a Relu, a bias, Reshape and Transpose around attention heads, and the product of attention
# weights and values. So the factors of an attention's result are folded into its value projection.
#
# Elsewhere (x is also read by a residual connection, or produced by a Gelu) the division is a Mul by a constant vector
# before QuantizeLinear. It is element-wise, costs about a hundredth of the product, and can be fused into the
# quantizing kernel.

# Values of a that are tried; None: no smoothing.
STRENGTHS: tuple[float | None, ...] = (None, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)

# Operators f with f(x / s) = f(x) / s for every positive s.
_HOMOGENEOUS = ("Relu", "LeakyRelu", "Identity")
# Lower limit of factors: channels and weights near zero would give unbounded ones.
_LEAST = 1e-5

_Step = tuple[str, tuple[int, ...], list[tuple[str, int, int]]]


@dataclass(frozen=True)
class Fold:
    """The constants into which an activation's factors are folded. constants: (node, index of the input, axis of the
    channels).

    tensors: between these constants and the activation; their values are divided, too.
    """

    constants: tuple[tuple[str, int, int], ...]
    tensors: tuple[str, ...] = ()


def find_folds(model: ModelProto, groups: Iterable[SmoothingGroup]) -> dict[str, Fold]:
    """The folds of factors for these groups' activations, by activation. Nothing else may read a tensor that they
    change. Groups that cannot be folded are left out."""
    walk = _FoldingWalk(model)
    return {group.activation: fold for group in groups if (fold := _find_fold(walk, group))}


def _find_fold(walk: "_FoldingWalk", group: SmoothingGroup) -> Fold | None:
    producer = walk.made_by(group.activation, set(group.nodes))
    if producer is None or producer.op_type != "LayerNormalization":
        return _into_projection(group.activation, producer, walk)
    vectors = [walk.initializers.get(name) for name in producer.input[1:]]
    is_last_axis = attribute_of(producer, "axis", -1) == -1
    if not is_last_axis or not all(vector is not None and len(vector.dims) == 1 for vector in vectors):
        return None
    return Fold(tuple((producer.name, index, 0) for index in range(1, len(producer.input))))


class _FoldingWalk:
    """A model, for walks from a tensor to its producers."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.initializers, self.readers, self.shapes = constants(graph), consumers(graph), static_shapes(model)
        self.makers = {name: node for node in graph.node for name in node.output}
        self.outputs = {value.name for value in graph.output}

    def made_by(self, tensor: str, only: set[str]) -> NodeProto | None:
        """The node that computes a tensor; None for inputs and outputs, and if nodes other than `only` read it, too."""
        if tensor in self.outputs or not {node.name for node in self.readers.get(tensor, ())} <= only:
            return None
        return self.makers.get(tensor)


def _into_projection(tensor: str, maker: NodeProto | None, walk: _FoldingWalk) -> Fold | None:
    """The fold into the projection before a tensor, found by following the axes of the activation's channels."""
    rank = len(walk.shapes.get(tensor, ()))
    size = walk.shapes[tensor][-1] if rank else 0
    axes: tuple[int, ...] = (rank - 1,)
    fold_targets: list[tuple[str, int, int]] = []
    passed_tensors: list[str] = []
    while maker is not None and size:
        if projection := _projection(maker, walk, size):
            is_plain = axes == (len(walk.shapes.get(tensor, ())) - 1,)
            return Fold((*fold_targets, *projection), tuple(passed_tensors)) if is_plain else None
        origin = _before(maker, tensor, axes, size, walk)
        if origin is None:
            return None
        tensor, axes, constant = origin
        fold_targets += constant
        passed_tensors.append(tensor)
        maker = walk.made_by(tensor, {maker.name})
    return None


def _projection(node: NodeProto, walk: _FoldingWalk, size: int) -> tuple[tuple[str, int, int], ...] | None:
    """The constants of a MatMul or Gemm whose columns are the channels."""
    weight = walk.initializers.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
    axis = 0 if attribute_of(node, "transB", 0) else 1
    if weight is None or len(weight.dims) != 2 or weight.dims[axis] != size:
        return None
    if len(node.input) < 3 or not node.input[2]:
        return ((node.name, 1, axis),)
    bias = walk.initializers.get(node.input[2])
    return ((node.name, 1, axis), (node.name, 2, 0)) if bias is not None and list(bias.dims) == [size] else None


def _before(node: NodeProto, tensor: str, axes: tuple[int, ...], size: int, walk: _FoldingWalk) -> _Step | None:
    """One step back through the node that computes `tensor`: the tensor before it, its channel axes, and constants that
    also take factors. None if the factors cannot pass."""
    shape = walk.shapes.get(tensor, ())
    if node.op_type in _HOMOGENEOUS:
        return node.input[0], axes, []
    if node.op_type == "Add":
        biases = [walk.initializers.get(name) for name in node.input]
        index = next((i for i, bias in enumerate(biases) if bias is not None and list(bias.dims) == [size]), None)
        if index is None or axes != (len(shape) - 1,):
            return None
        return node.input[1 - index], axes, [(node.name, index, 0)]
    if node.op_type == "Transpose":
        permutation = attribute_of(node, "perm", list[int]())
        return (node.input[0], tuple(permutation[axis] for axis in axes), []) if permutation else None
    if node.op_type == "Reshape":
        # The channels must be the last axes on both sides: then their order in memory is the same.
        input_shape = walk.shapes.get(node.input[0], ())
        count = next((k for k in range(1, len(input_shape) + 1) if prod(input_shape[-k:]) == size), None)
        if count is None or axes != tuple(range(len(shape) - len(axes), len(shape))):
            return None
        return node.input[0], tuple(range(len(input_shape) - count, len(input_shape))), []
    if node.op_type == "MatMul" and len(shape) - 2 not in axes:
        # Attention weights times values: the channels must be whole in the values, and no axis broadcast.
        operand_shape = walk.shapes.get(node.input[1], ())
        is_match = len(operand_shape) == len(shape) and all(operand_shape[axis] == shape[axis] != 0 for axis in axes)
        return (node.input[1], axes, []) if is_match and node.input[0] != node.input[1] else None
    return None


@dataclass(frozen=True)
class SmoothingPlan:
    """The settings for quantizing one group.

    strength: of smoothing; None: no smoothing.  clip: share of the range that is kept.  factors: divisors of the
    activation's channels.  weights: node -> rounded matrix [in, out], factors included; a convolution's keep their
    shape.  low, high: range of the smoothed activation.  biases: node -> new bias of a convolution, if it changes.
    shifts: node -> addend to the bias of a matrix.  seen: statistics of the smoothed activation (the histogram: of some
    rows); None without smoothing.  weight_db: node -> SQNR of its rounded weight against the unrounded one."""

    group: SmoothingGroup
    strength: float | None
    clip: float
    factors: Floats | None
    weights: Mapping[str, Floats]
    low: float
    high: float
    biases: Mapping[str, Floats] = field(default_factory=dict)
    shifts: Mapping[str, Floats] = field(default_factory=dict)
    seen: TensorStatistics | None = None
    weight_db: Mapping[str, float] = field(default_factory=dict)


def factors_of(reach: Floats, weights: Floats, strength: float) -> Floats:
    """Factors [channels] for an activation, their geometric mean being 1.

    reach, weights: largest magnitudes, [channels]: of the activation, and of the weights that it is multiplied by.
    """
    log_factors = strength * np.log(np.maximum(reach, _LEAST)) - (1 - strength) * np.log(np.maximum(weights, _LEAST))
    return np.asarray(np.exp(log_factors - log_factors.mean()), np.float32)


def apply_plans(model: ModelProto, plans: Sequence[SmoothingPlan], ranges: Ranges) -> tuple[ModelProto, Ranges]:
    """A prepared model with the plans applied, in float, and the ranges for quantizing it.

    The weights are on their future int8 levels; node names do not change. If the model's weights are in a file, these
    weights are beside it, until a session has opened the result (`with_weights_outside`).
    """
    editor, tensors = _Editor(model), dict(ranges.tensors)
    smoothed_plans = [plan for plan in plans if plan.factors is not None]
    folds = find_folds(model, (plan.group for plan in smoothed_plans)) if smoothed_plans else {}
    for plan in plans:
        activation_name = plan.group.activation
        if plan.factors is not None and activation_name not in folds:
            activation_name = editor.divide(activation_name, plan.factors, plan.group.nodes)
        tensors[activation_name] = (plan.low, plan.high)
        editor.set_weights(plan)
    bias_inputs = find_biases(model, [plan.group for plan in plans if plan.shifts])
    for plan in plans:
        for node in bias_inputs.keys() & plan.shifts:  # a part of a model may end between a product and its bias
            editor.add(*bias_inputs[node], plan.shifts[node])
    for plan in smoothed_plans:  # after all plans have set their weights
        if (fold := folds.get(plan.group.activation)) and plan.factors is not None:
            editor.fold(fold, plan.factors, tensors)
    sort_nodes(editor.graph)
    return editor.model, replace(ranges, tensors=tensors)


class _Editor:
    """A copy of a model to which plans are applied. taken: names of its constants and tensors."""

    def __init__(self, model: ModelProto) -> None:
        self.model = deepcopy(model)
        self.graph: GraphProto = self.model.graph
        self.nodes = {node.name: node for node in self.graph.node}
        self.initializers = constants(self.graph)
        self.taken = {*self.initializers, *(name for node in self.graph.node for name in node.output)}

    def divide(self, activation: str, factors: Floats, nodes: Sequence[str]) -> str:
        """Put a product with the inverse factors in front of these nodes; return the name that they now read."""
        inverse_name = self._constant(f"{activation}_factors", 1 / factors)
        result = unused_name(f"{activation}_smoothed", self.taken)
        self.graph.node.append(helper.make_node("Mul", [activation, inverse_name], [result], name=result))
        for node in nodes:
            self.nodes[node].input[0] = result
        return result

    def set_weights(self, plan: SmoothingPlan) -> None:
        for site in plan.group.sites:
            node = self.nodes[site.node]
            if site.node in plan.weights:
                values = plan.weights[site.node]
                if site.op_type != "Conv":
                    values = np.ascontiguousarray(transpose_for(site, values))
                node.input[1] = self._constant(f"{site.weight}_{site.node}", values, site.weight)
            if site.node in plan.biases:
                del node.input[2:]
                node.input.append(self._constant(f"{site.weight}_{site.node}_bias", plan.biases[site.node]))

    def add(self, reader: str, index: int, vector: Floats) -> None:
        """Add a vector to a constant that a node reads."""
        node = self.nodes[reader]
        name = node.input[index]
        node.input[index] = self._constant(f"{name}_corrected", to_array(self.initializers[name]) + vector, name)

    def fold(self, fold: Fold, factors: Floats, ranges: dict[str, tuple[float, float]]) -> None:
        """Divide the constants of a fold by the factors, and, in place, the ranges of the tensors between."""
        for name, index, axis in fold.constants:
            node = self.nodes[name]
            values = to_array(self.initializers[node.input[index]])
            scales = np.expand_dims(factors, [dim for dim in range(values.ndim) if dim != axis])
            node.input[index] = self._constant(f"{node.input[index]}_smoothed", values / scales, node.input[index])
        max_scale = float((1 / factors).max())
        for tensor in fold.tensors:
            if tensor in ranges:
                ranges[tensor] = (ranges[tensor][0] * max_scale, ranges[tensor][1] * max_scale)

    def _constant(self, name: str, values: NDArray[np.floating], source: str = "") -> str:
        """Add a constant; return its name. source: the constant that it is computed from; if the source is in a file,
        the new one is in the same folder."""
        new_name = unused_name(name, self.taken)
        tensor = from_array(np.asarray(values, np.float32), new_name, self.initializers.get(source, TensorProto()))
        self.graph.initializer.append(tensor)
        self.initializers[new_name] = self.graph.initializer[-1]
        return new_name


# The settings of convolutions: rounding of their weights, and biases that correct the mean error of quantization.
#
# The mean error of each output channel, from quantizing activation and weight, is subtracted from the bias: bias
# correction (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019) in its
# empirical form. Rounding then compensates only for the error about the mean, so it uses the covariance of the patches
# and not their second moments; behind a Relu, whose results have large means, the two differ a lot. Neither covariance
# nor rounded weight depends on the kind of activation: kinds of int8 with the same levels of weights share them.


@dataclass(frozen=True)
class FittedKind:
    """A kind of int8 for which settings are fitted, or a block format. ranges: of activations.  levels: the last level
    of the weights, or the format.  groups: to be fitted.  activation: type of activations."""

    groups: Sequence[SmoothingGroup]
    ranges: Ranges
    activation: Literal["int8", "uint8"]
    levels: Levels = LEVELS

    @property
    def convolving(self) -> list[SmoothingGroup]:
        """The groups of convolutions whose weights are rounded to integers."""
        if not isinstance(self.levels, int):
            return []
        return [group for group in self.groups if all(site.op_type == "Conv" for site in group.sites)]

    def range_of(self, tensor: str) -> ActivationRange:
        """The int8 form of an activation."""
        return ActivationRange(self.activation, *self.ranges.tensors[tensor])


@dataclass
class _Fitted:
    """Weights and biases of one kind, by node. nodes: that the kind quantizes."""

    nodes: frozenset[str]
    weights: dict[str, Floats] = field(default_factory=dict)
    biases: dict[str, Floats] = field(default_factory=dict)


def fit_convolutions(
    model: ModelProto, kinds: Sequence[FittedKind], runs: Sequence[Run], check: Callable[[str], None] = lambda _: None
) -> list[dict[str, SmoothingPlan]]:
    """For each kind, plans by activation for the groups of convolutions of a prepared model; their activations keep
    their ranges.

    runs: for the moments of the patches.  check: called before each layer; its exception ends the fitting.
    """
    initializers, nodes = constants(model.graph), {node.name: node for node in model.graph.node}
    sites = {site.node: site for kind in kinds for group in kind.convolving for site in group.sites}
    ranges: dict[str, set[ActivationRange]] = {}
    for kind in kinds:
        for group in kind.convolving:
            ranges.setdefault(group.activation, set()).add(kind.range_of(group.activation))
    fits = [_Fitted(frozenset(node for group in kind.convolving for node in group.nodes)) for kind in kinds]
    layers = find_layers(model, sites.values(), ranges)
    started_runs, layer_batches, types = StartedRuns(runs), [*batches(layers)], element_types(model)
    waists = find_waists(model, types, types)
    for index, batch in enumerate(layer_batches):
        check("fitting convolutions")
        later_activations = {
            layer.site.activation for later_batch in layer_batches[index + 1 :] for layer in later_batch
        }
        start = _find_start(model, waists, later_activations)
        layer_moments, started_runs = moments_of(model, batch, started_runs, start)
        for layer in batch:
            check("fitting convolutions")
            _fit_layer(layer, nodes[layer.site.node], initializers, layer_moments.pop(layer.site.node), kinds, fits)
    return [_plans(kind, fit) for kind, fit in zip(kinds, fits, strict=True)]


def _find_start(model: ModelProto, waists: Sequence[tuple[int, str]], tensors: set[str]) -> str | None:
    """The last waist of a model before the first of these tensors; None without such a waist or without tensors."""
    indices = (index for index, node in enumerate(model.graph.node) if not tensors.isdisjoint(node.output))
    first_index = next(indices, -1)
    return next((name for index, name in reversed(waists) if index <= first_index), None)


def _plans(kind: FittedKind, fitted_kind: _Fitted) -> dict[str, SmoothingPlan]:
    return {
        group.activation: SmoothingPlan(
            group,
            None,
            1.0,
            None,
            {node: fitted_kind.weights[node] for node in group.nodes},
            *kind.ranges.tensors[group.activation],
            biases={node: fitted_kind.biases[node] for node in group.nodes if node in fitted_kind.biases},
        )
        for group in kind.convolving
    }


def _fit_layer(
    layer: Layer,
    node: NodeProto,
    initializers: Mapping[str, TensorProto],
    moments: Moments,
    kinds: Sequence[FittedKind],
    fits: Sequence[_Fitted],
) -> None:
    """Store the weight of one convolution for each kind, and its bias if it has a constant one or none."""
    weight = to_array(initializers[layer.site.weight])
    matrix, name = as_matrices(weight, layer.window.groups), node.input[2] if len(node.input) > 2 else ""
    is_computed = bool(name) and name not in initializers
    bias = to_array(initializers[name]) if name and not is_computed else np.zeros(weight.shape[0], np.float32)
    kind_fits = [pair for pair in zip(kinds, fits, strict=True) if node.name in pair[1].nodes]
    covariance = moments.take_covariance(about_zero=is_computed)
    level_counts = {kind.levels for kind, _ in kind_fits if isinstance(kind.levels, int)}  # block formats have none
    rounded_weights: dict[Levels, Floats] = {
        levels: compensate(matrix, covariance if levels == min(level_counts) else covariance.copy(), levels)
        for levels in sorted(level_counts, reverse=True)
    }
    for kind, fit in kind_fits:
        fit.weights[node.name] = as_weight(rounded_weights[kind.levels], weight.shape)
        if not is_computed:  # the mean error of each output channel, group after group
            rounded_weight = rounded_weights[kind.levels].astype(np.float64)
            mean_loss = moments.lost[kind.range_of(layer.site.activation)] / moments.count
            added_bias = np.einsum("gk,gkn->gn", moments.mean, rounded_weight - matrix)
            added_bias += np.einsum("gk,gkn->gn", mean_loss, rounded_weight)
            fit.biases[node.name] = np.asarray(bias - added_bias.reshape(-1).astype(np.float32), np.float32)
