"""Moving outliers from activations into weights: x W = (x / s)(s W), with a factor for each channel of x.

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
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from pipeline.graphs.graph import constants, sort_nodes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.folding import find_fold
from pipeline.quantization.settings.groups import Floats, SmoothingGroup, laid_out
from pipeline.quantization.statistics.observations import TensorStatistics

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
