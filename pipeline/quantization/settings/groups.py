"""Groups: the nodes that share one quantized activation, which int8 takes together or leaves together.

Query, key and value projections read one tensor: one Q/DQ pair, one fused kernel, one set of smoothing factors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from pipeline.quantization.graph import constants
from pipeline.quantization.insertion_points import Site

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SmoothingGroup:
    """The sites that read `activation`.

    mixes: whether they multiply matrices with the activation's last axis, so that factors for its channels can move
    into the weights; a convolution's cannot here.
    """

    activation: str
    sites: tuple[Site, ...]
    mixes: bool

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(site.node for site in self.sites)


def find_groups(model: ModelProto, sites: Iterable[Site]) -> tuple[SmoothingGroup, ...]:
    """The sites of a prepared model by the activation they read, in the model's order."""
    together: dict[str, list[Site]] = {}
    for site in sites:
        together.setdefault(site.activation, []).append(site)
    flipped = {node.name for node in model.graph.node if _transposes_activation(node)}
    return tuple(
        SmoothingGroup(
            name, tuple(found), all(site.op_type in ("MatMul", "Gemm") and site.node not in flipped for site in found)
        )
        for name, found in together.items()
    )


def matrices(model: ModelProto, groups: Sequence[SmoothingGroup]) -> Mapping[str, Floats]:
    """Node -> weight as (channels in, channels out), for the groups that mix."""
    given = constants(model.graph)
    return {
        site.node: _upright(numpy_helper.to_array(given[site.weight]), site)
        for group in groups
        if group.mixes
        for site in group.sites
    }


def laid_out(matrix: Floats, site: Site) -> Floats:
    """A matrix of `matrices` as the node stores it; what a convolution reads is in its own shape already."""
    if site.op_type == "Conv":
        return matrix
    return np.ascontiguousarray(_upright(matrix, site))


def _upright(weight: Floats, site: Site) -> Floats:
    return weight if site.axis == 1 else weight.T


def _transposes_activation(node: object) -> bool:
    attributes = getattr(node, "attribute", ())
    return any(item.name == "transA" and bool(helper.get_attribute_value(item)) for item in attributes)
