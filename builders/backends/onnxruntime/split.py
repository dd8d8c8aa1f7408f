"""Large integer convolutions in parts that fit a core's L2 cache.

ONNX Runtime's integer convolution goes over all weights for every few rows of its result. Weights larger than the L2
cache come from the next level each time, which then is what limits it: on ResNet-18 the last three convolutions (512
by 512 channels, 3x3, 2.4 MB) took 0.96 ms each, at 58 % of the rate of those before them. Cut by output channels, each
part's weights stay in L2 over all rows, and the results are put together as bytes: the whole net gains 7 % with one
image and 6 % with eight. The numbers are the same to the bit.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

# Measured with 1.31 on a CPU with 1 MiB of L2 to a core, ResNet-18: parts of 64, 128 and 192 channels (0.3 to 0.9 MB)
# are equally fast, parts of 1.2 MB gain half as much. Convolutions below `SPLIT_BYTES` gain nothing.
SPLIT_BYTES = 1_000_000
PART_BYTES = 600_000
# The kernel computes so many output channels at a time.
CHANNELS = 64
_WEIGHT, _PER_CHANNEL = 3, (3, 4, 5, 8)  # weight; weight, its scales and zero points, bias


def split_convolutions(path: Path) -> int:
    """Split those of an optimized model on disk; gives how many."""
    model = onnx.load(path)
    split = split_in_place(model)
    if split:
        onnx.save(model, path)
    return split


def split_in_place(model: ModelProto) -> int:
    """The same on a model in memory."""
    given = {item.name: item for item in model.graph.initializer}
    nodes, split = list[NodeProto](), 0
    for node in model.graph.node:
        width = _width(node, given)
        if width:
            nodes += _parts(model, node, width, given)
            split += 1
        else:
            nodes.append(node)
    if split:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        _drop_unread(model)
    return split


def _width(node: NodeProto, given: Mapping[str, TensorProto]) -> int:
    """Output channels of a part; 0 for a node that stays whole."""
    if node.op_type != "QLinearConv" or node.domain not in ("", "ai.onnx"):
        return 0
    weight = given.get(node.input[_WEIGHT])
    whole = all(given.get(name) for index, name in enumerate(node.input) if index in _PER_CHANNEL and name)
    groups = next((item.i for item in node.attribute if item.name == "group"), 1)
    if weight is None or not whole or groups != 1 or math.prod(weight.dims[2:]) == 1:
        return 0
    channels, depth = weight.dims[0], math.prod(weight.dims[1:])
    width = max(CHANNELS, PART_BYTES // depth // CHANNELS * CHANNELS)
    return width if channels * depth > SPLIT_BYTES and width < channels else 0


def _parts(model: ModelProto, node: NodeProto, width: int, given: Mapping[str, TensorProto]) -> list[NodeProto]:
    channels = given[node.input[_WEIGHT]].dims[0]
    parts = []
    for start in range(0, channels, width):
        part = NodeProto()
        part.CopyFrom(node)
        part.name, part.output[0] = (f"{name}/{start}" for name in (node.name, node.output[0]))
        for index in _PER_CHANNEL:
            if index < len(node.input) and node.input[index]:
                values = numpy_helper.to_array(given[node.input[index]])
                if values.ndim and len(values) == channels:
                    name = f"{node.input[index]}/{node.name}/{start}"
                    part.input[index] = _constant(model, name, values[start : start + width])
        parts.append(part)
    results = [part.output[0] for part in parts]
    return [*parts, helper.make_node("Concat", results, [node.output[0]], name=f"{node.name}/concat", axis=1)]


def _constant(model: ModelProto, name: str, values: "NDArray[np.generic]") -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
    return name


def _drop_unread(model: ModelProto) -> None:
    """Constants that no node reads any more. Where a node has a body, which could read them, all stay."""
    read = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    bodies = any(item.type == onnx.AttributeProto.GRAPH for node in model.graph.node for item in node.attribute)
    unread = [] if bodies else [item for item in model.graph.initializer if item.name not in read]
    for item in unread:
        model.graph.initializer.remove(item)
