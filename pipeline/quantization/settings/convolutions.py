"""The settings of convolutions: rounding of their weights, and biases that take back what quantization adds.

The mean that quantizing activation and weight adds to each output channel is subtracted from the bias: bias correction
(Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019) in its empirical form.
What is left to compensate by rounding is then the error about the mean, so the covariance of the patches takes the
place of their second moments; behind a Relu, whose results have large means, the two differ a lot. Neither covariance
nor rounded weight depends on the kind of activation: kinds of int8 with the same levels of weights share them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from builders.onnx_graphs.weights import to_array
from pipeline.quantization.graph import constants, element_types
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.groups import Floats, SmoothingGroup
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
from pipeline.quantization.settings.rounding import LEVELS, compensate
from pipeline.quantization.settings.runs import Run
from pipeline.quantization.settings.smooth import SmoothingPlan
from pipeline.quantization.settings.waists import find_waists


@dataclass(frozen=True)
class FittedKind:
    """A kind of int8 that settings are fitted for. ranges: of activations.  levels: the last one of the weights."""

    groups: Sequence[SmoothingGroup]
    ranges: Ranges
    activation: Literal["int8", "uint8"]
    levels: int = LEVELS

    @property
    def convolving(self) -> list[SmoothingGroup]:
        """The groups of convolutions."""
        return [group for group in self.groups if all(site.op_type == "Conv" for site in group.sites)]

    def range_of(self, tensor: str) -> ActivationRange:
        """How int8 holds an activation."""
        return ActivationRange(self.activation, *self.ranges.tensors[tensor])


@dataclass
class _Fitted:
    """Weights and biases of one kind, by node. nodes: those that it takes."""

    nodes: frozenset[str]
    weights: dict[str, Floats] = field(default_factory=dict)
    biases: dict[str, Floats] = field(default_factory=dict)


def fit_convolutions(
    model: ModelProto, kinds: Sequence[FittedKind], runs: Sequence[Run], check: Callable[[str], None] = lambda _: None
) -> list[dict[str, SmoothingPlan]]:
    """For each kind, plans by activation for the groups of convolutions of a prepared model; their activations keep
    their ranges.

    runs: from which the moments of the patches are taken.  check: called before each layer; what it raises ends this.
    """
    given, nodes = constants(model.graph), {node.name: node for node in model.graph.node}
    sites = {site.node: site for kind in kinds for group in kind.convolving for site in group.sites}
    ranges: dict[str, set[ActivationRange]] = {}
    for kind in kinds:
        for group in kind.convolving:
            ranges.setdefault(group.activation, set()).add(kind.range_of(group.activation))
    fitted = [_Fitted(frozenset(node for group in kind.convolving for node in group.nodes)) for kind in kinds]
    layers = find_layers(model, sites.values(), ranges)
    started, parts, types = StartedRuns(runs), [*batches(layers)], element_types(model)
    waists = find_waists(model, types, types)
    for index, batch in enumerate(parts):
        check("fitting convolutions")
        after = [layer.site.activation for part in parts[index + 1 :] for layer in part]
        found, started = moments_of(model, batch, started, _find_start(model, waists, after))
        for layer in batch:
            check("fitting convolutions")
            _fit_layer(layer, nodes[layer.site.node], given, found.pop(layer.site.node), kinds, fitted)
    return [_plans(kind, done) for kind, done in zip(kinds, fitted, strict=True)]


def _find_start(model: ModelProto, waists: Sequence[tuple[int, str]], tensors: Collection[str]) -> str | None:
    """The last waist of a model that stands before these tensors; None where there is none, or are no tensors."""
    first = min((at for at, node in enumerate(model.graph.node) if not {*node.output}.isdisjoint(tensors)), default=-1)
    return next((name for at, name in reversed(waists) if at <= first), None)


def _plans(kind: FittedKind, fitted: _Fitted) -> dict[str, SmoothingPlan]:
    return {
        group.activation: SmoothingPlan(
            group,
            None,
            1.0,
            None,
            {node: fitted.weights[node] for node in group.nodes},
            *kind.ranges.tensors[group.activation],
            biases={node: fitted.biases[node] for node in group.nodes if node in fitted.biases},
        )
        for group in kind.convolving
    }


def _fit_layer(
    layer: Layer,
    node: NodeProto,
    given: Mapping[str, TensorProto],
    moments: Moments,
    kinds: Sequence[FittedKind],
    fitted: Sequence[_Fitted],
) -> None:
    """Note the weight of one convolution for each kind, and its bias where it has a constant one or none."""
    stored = to_array(given[layer.site.weight])
    matrix, name = as_matrices(stored, layer.window.groups), node.input[2] if len(node.input) > 2 else ""
    computed = bool(name) and name not in given
    bias = to_array(given[name]) if name and not computed else np.zeros(stored.shape[0], np.float32)
    taking = [pair for pair in zip(kinds, fitted, strict=True) if node.name in pair[1].nodes]
    spread, wanted = moments.take_covariance(about_zero=computed), {kind.levels for kind, _ in taking}
    rounded = {
        levels: compensate(matrix, spread if levels == min(wanted) else spread.copy(), levels)
        for levels in sorted(wanted, reverse=True)
    }
    for kind, done in taking:
        done.weights[node.name] = as_weight(rounded[kind.levels], stored.shape)
        if not computed:
            added = _added(matrix, rounded[kind.levels], moments, kind.range_of(layer.site.activation))
            done.biases[node.name] = np.asarray(bias - added, np.float32)


def _added(matrix: Floats, rounded: Floats, moments: Moments, grid: ActivationRange) -> Floats:
    """What quantization adds to each output channel on average, groups one after the other."""
    exact = rounded.astype(np.float64)
    added = np.einsum("gk,gkn->gn", moments.mean, exact - matrix)
    added += np.einsum("gk,gkn->gn", moments.mean_lost(grid), exact)
    return np.asarray(added.reshape(-1), np.float32)
