"""Multiplications with weights: how many of them a quantized graph does in integers (or in fp8)."""

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, TensorProto

from pipeline.graphs.graph import constants
from pipeline.quantization.insertion.insertion_points import OP_TYPES
from pipeline.quantization.statistics.observations import Observations
from validation.latency.roofline.macs import per_value


def weighted_macs(model: ModelProto, seen: Observations) -> dict[str, int]:
    """Multiplications by a constant weight over all calibration samples, by node of a prepared model.

    Counted from the values that calibration saw come out of each node (in, for a transposed convolution): every one
    took one multiplication for each weight of its channel. Nodes whose values were not counted are left out.
    """
    given = constants(model.graph)
    found = {}
    for node in model.graph.node:
        weight = given.get(node.input[1]) if node.op_type in OP_TYPES and len(node.input) > 1 else None
        counted = seen.tensors.get(_count(node)) if weight is not None else None
        if weight is not None and counted is not None:
            found[node.name] = counted.elements * _per_value(node, weight)
    return found


def share(macs: Mapping[str, int], nodes: Collection[str]) -> float | None:
    """The share that these nodes do; None where nothing was counted."""
    total = sum(macs.values())
    return sum(macs.get(name, 0) for name in nodes) / total if total else None


def _count(node: NodeProto) -> str:
    return str(node.input[0] if node.op_type == "ConvTranspose" else node.output[0])


def _per_value(node: NodeProto, weight: TensorProto) -> int:
    transposed = any(item.name == "transB" and item.i for item in node.attribute)
    return per_value(node.op_type, [int(size) for size in weight.dims], transposed)
