"""Groups: the nodes that share one quantized activation, which int8 takes together or leaves together.

Query, key and value projections read one tensor: one Q/DQ pair, one fused kernel, one set of smoothing factors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from pipeline.quantization.graph import attribute_of, constants
from pipeline.quantization.insertion_points import Site

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SmoothingGroup:
    """The sites that read `activation`.

    mixes: whether all of them multiply matrices with the activation's last axis, so that factors for its channels can
    move into the weights. Factors for what a convolution reads are not implemented.
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
    flipped = {node.name for node in model.graph.node if attribute_of(node, "transA", 0)}
    together: dict[str, list[Site]] = {}
    for site in sites:
        together.setdefault(site.activation, []).append(site)
    return tuple(
        SmoothingGroup(
            name, tuple(found), all(site.op_type in ("MatMul", "Gemm") and site.node not in flipped for site in found)
        )
        for name, found in together.items()
    )


def matrices(model: ModelProto, groups: Sequence[SmoothingGroup]) -> Mapping[str, Floats]:
    """Node name -> weight as [channels in, channels out], for the groups that mix."""
    given = constants(model.graph)
    sites = [site for group in groups if group.mixes for site in group.sites]
    return {site.node: transpose_for(site, numpy_helper.to_array(given[site.weight])) for site in sites}


def transpose_for(site: Site, weight: Floats) -> Floats:
    """A weight as its node stores it, as [channels in, channels out]; and such a matrix as the node stores it."""
    return weight.T if site.axis == 0 else weight
