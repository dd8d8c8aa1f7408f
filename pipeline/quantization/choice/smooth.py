"""Moving outliers from activations into weights: x W = (x / s)(s W), with a factor for each channel of x.

SmoothQuant (Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
2022): s = reach(x)^a / reach(W)^(1-a), with the strength a chosen per group. The division is folded into the scale and
bias of the LayerNormalization that makes x, where only the group reads x. Elsewhere (a residual connection reads x
too; a Gelu makes it) it is a Mul by a constant vector in front of QuantizeLinear: element-wise, beside a product that
does a hundred times the work, and open to being fused into the kernel that quantizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from pipeline.quantization.calibration.ranges import Ranges
from pipeline.quantization.choice.groups import Floats, Group, laid_out
from pipeline.quantization.graphs.graph import constants, consumers, sort_nodes

# Channels and weights that are (nearly) zero would give factors without bound.
LEAST = 1e-5


@dataclass(frozen=True)
class Plan:
    """How one group is to be quantized.

    strength: of smoothing, None for none.  clip: share of the range that is kept.  factors: what each channel of the
    activation is divided by.  weights: node -> rounded matrix (in, out), factors included; of a convolution, in its own
    shape.  low, high: range of the smoothed activation.  biases: node -> bias, where it changes.
    """

    group: Group
    strength: float | None
    clip: float
    factors: Floats | None
    weights: Mapping[str, Floats]
    low: float
    high: float
    biases: Mapping[str, Floats] = field(default_factory=dict)


def factors_of(reach: Floats, weights: Sequence[Floats], strength: float) -> Floats:
    """Factors for the channels of an activation, their geometric mean being 1."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    powers = strength * np.log(np.maximum(reach, LEAST)) - (1 - strength) * np.log(np.maximum(rows, LEAST))
    return np.asarray(np.exp(powers - powers.mean()), np.float32)


def applied(model: ModelProto, plans: Sequence[Plan], ranges: Ranges) -> tuple[ModelProto, Ranges]:
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
            read = _divided(copy, plan, by_name)
        tensors[read] = (plan.low, plan.high)
        _set_weights(copy.graph, plan, by_name)
    sort_nodes(copy.graph)
    return copy, replace(ranges, tensors=tensors)


def folds(model: ModelProto, group: Group) -> bool:
    """Whether factors for this group's activation can be folded into what makes it."""
    return _foldable(model, group) is not None


def _divided(model: ModelProto, plan: Plan, by_name: Mapping[str, NodeProto]) -> str:
    """Divide the group's activation by the factors; the name of the tensor that the group reads from now on."""
    group, factors = plan.group, plan.factors
    assert factors is not None  # noqa: S101 - the caller's condition
    maker = _foldable(model, group)
    if maker is not None:
        given = constants(model.graph)
        for index in range(1, len(maker.input)):
            values = numpy_helper.to_array(given[maker.input[index]]) / factors
            maker.input[index] = _constant(model.graph, f"{maker.input[index]}_smoothed", values)
        return group.activation
    inverse = _constant(model.graph, f"{group.activation}_factors", 1 / factors)
    result = _fresh(model.graph, f"{group.activation}_smoothed")
    model.graph.node.append(helper.make_node("Mul", [group.activation, inverse], [result], name=result))
    for node in group.nodes:
        by_name[node].input[0] = result
    return result


def _foldable(model: ModelProto, group: Group) -> NodeProto | None:
    """The node whose constants can take the factors: the group alone reads what it makes."""
    maker = next((node for node in model.graph.node if group.activation in node.output), None)
    outputs = {value.name for value in model.graph.output}
    readers = {node.name for node in consumers(model.graph).get(group.activation, ())}
    if maker is None or group.activation in outputs or not readers <= set(group.nodes):
        return None
    given = constants(model.graph)
    axis = next((item.i for item in maker.attribute if item.name == "axis"), -1)
    vectors = [given.get(name) for name in maker.input[1:]]
    fits = axis == -1 and all(item is not None and len(item.dims) == 1 for item in vectors)
    return maker if fits and maker.op_type == "LayerNormalization" else None


def _set_weights(graph: GraphProto, plan: Plan, by_name: Mapping[str, NodeProto]) -> None:
    for site in plan.group.sites:
        if site.node in plan.weights:
            values = laid_out(plan.weights[site.node], site)
            by_name[site.node].input[1] = _constant(graph, f"{site.weight}_{site.node}", values)
        if site.node in plan.biases:
            node = by_name[site.node]
            del node.input[2:]
            node.input.append(_constant(graph, f"{site.weight}_{site.node}_bias", plan.biases[site.node]))


def _constant(graph: GraphProto, name: str, values: NDArray[np.floating[Any]]) -> str:
    fresh = _fresh(graph, name)
    graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.float32), fresh))
    return fresh


def _fresh(graph: GraphProto, name: str) -> str:
    taken = {item.name for item in graph.initializer} | {name for node in graph.node for name in node.output}
    while name in taken:
        name += "_"
    return name
