"""Plans for convolutions: weights rounded with compensation, biases that take back what quantization shifts.

Bias correction: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, in its
empirical form: the mean that quantizing activation and weight adds to each output channel is subtracted from the bias.
What is left to compensate by rounding is then the error about the mean, so the covariance of the patches takes the
place of their second moments; behind a Relu, whose results all have large means, the two differ a lot.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from pipeline.quantization.graph import constants
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.groups import Floats, SmoothingGroup
from pipeline.quantization.settings.moments import Layer, Moments, as_matrices, as_weight, batches, layers, moments_of
from pipeline.quantization.settings.rounding import LEVELS, compensate
from pipeline.quantization.settings.runs import Run
from pipeline.quantization.settings.smooth import SmoothingPlan


def fit_convolutions(
    model: ModelProto,
    groups: Sequence[SmoothingGroup],
    ranges: Ranges,
    activation: Literal["int8", "uint8"],
    runs: Sequence[Run],
    levels: int = LEVELS,
) -> dict[str, SmoothingPlan]:
    """Plans by activation for the groups of convolutions of a prepared model; their activations keep their ranges.

    levels: the last one of the weights.
    """
    given, nodes = constants(model.graph), {node.name: node for node in model.graph.node}
    weights, biases = dict[str, Floats](), dict[str, Floats]()
    convolving = [group for group in groups if all(site.op_type == "Conv" for site in group.sites)]
    for batch in batches(layers(model, (site for group in convolving for site in group.sites), ranges)):
        found = moments_of(model, batch, runs, activation)
        for layer in batch:
            weight, bias = _fit(layer, nodes[layer.site.node], given, found.pop(layer.site.node), levels)
            weights[layer.site.node] = weight
            if bias is not None:
                biases[layer.site.node] = bias
    return {
        group.activation: SmoothingPlan(
            group,
            None,
            1.0,
            None,
            {node: weights[node] for node in group.nodes},
            *ranges.tensors[group.activation],
            biases={node: biases[node] for node in group.nodes if node in biases},
        )
        for group in convolving
    }


def _fit(
    layer: Layer, node: NodeProto, given: dict[str, TensorProto], moments: Moments, levels: int
) -> tuple[Floats, Floats | None]:
    """Weight and bias of one convolution; no bias where it is not a constant."""
    stored = numpy_helper.to_array(given[layer.site.weight])
    matrix = as_matrices(stored, layer.window.groups)
    name = node.input[2] if len(node.input) > 2 else ""
    if name and name not in given:
        return as_weight(compensate(matrix, moments.about_zero, levels), stored.shape), None
    rounded = compensate(matrix, moments.covariance, levels)
    bias = numpy_helper.to_array(given[name]) if name else np.zeros(stored.shape[0], np.float32)
    return as_weight(rounded, stored.shape), np.asarray(bias - shift(matrix, rounded, moments), np.float32)


def shift(matrix: Floats, rounded: Floats, moments: Moments) -> Floats:
    """What quantization adds to each output channel on average, groups one after the other."""
    lost = np.einsum("gk,gkn->gn", moments.mean, rounded.astype(np.float64) - matrix)
    lost += np.einsum("gk,gkn->gn", moments.mean_lost, rounded.astype(np.float64))
    return np.asarray(lost.reshape(-1), np.float32)
