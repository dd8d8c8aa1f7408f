"""Which tensors do not fit a 16-bit float, and which nodes must therefore stay in fp32.

Three sources, best first: a measured range; the value of a constant; and, where nothing was measured, propagation: an
additive mask of -1e9 makes the sum it is added to just as large, until an operator that bounds its result ends it.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from builders.onnx_graphs.bodies import list_reads
from enginery.arrays.arrays import Array
from pipeline.graphs.graph import constants
from pipeline.graphs.half_floats import HalfFormat
from pipeline.quantization.ranges import Ranges

# Calibration sees a sample of what the model will meet: a measured range counts as too large from half the limit on.
HEADROOM = 2.0

_REDUCING = {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"}
_ARITHMETIC = {"Abs", "Add", "Max", "Mean", "Min", "Mul", "Neg", "Sub", "Sum", *_REDUCING}
_INDEXING = {"Gather", "GatherElements", "GatherND", "Pad", "Slice", "Split", "Tile", "Where"}
_MOVING = {"Concat", "Expand", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
# Their results are as large as their inputs, or larger.
_PASSING = _ARITHMETIC | _INDEXING | _MOVING | {"Cast", "Dropout", "Identity"}
# Results that leave fp16 for quite ordinary inputs (a square passes it at 256, an exponential at 11.1).
_EXPLOSIVE = {"CumSum", "Exp", "Pow", "ReduceL2", "ReduceProd", "ReduceSumSquare"}


def too_large(model: ModelProto, half: HalfFormat, ranges: Ranges | None) -> dict[str, str]:
    """The tensors of a tidy model that `half` cannot hold, each with the reason."""
    found = dict(_large_constants(model.graph, half))
    for value in model.graph.input:
        if reason := _check_measured(value.name, half, ranges):
            found[value.name] = reason
    for node in model.graph.node:
        for name in node.output:
            reason = _check_measured(name, half, ranges)
            if reason is None:
                reason = _find_inherited(node, found, half)
            if reason:
                found[name] = reason
    return found


def obstacle(node: NodeProto, large: Mapping[str, str]) -> str | None:
    """Why a node must stay in fp32: the first tensor that it reads or writes and that is too large."""
    return next((large[name] for name in (*list_reads(node), *node.output) if name in large), None)


def _large_constants(graph: GraphProto, half: HalfFormat) -> Iterator[tuple[str, str]]:
    for name, item in constants(graph).items():
        if item.data_type == TensorProto.FLOAT:
            reach = _finite_reach(numpy_helper.to_array(item))
            if not np.isfinite(half.narrow(np.array(reach)).astype(np.float32)):
                yield name, f"constant {name!r} reaches {reach:g}, {half.name} ends at {half.largest:g}"


def _finite_reach(values: Array) -> float:
    """Largest finite magnitude; infinities are representable and do not count."""
    magnitudes = np.abs(values)
    return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


def _check_measured(name: str, half: HalfFormat, ranges: Ranges | None) -> str | None:
    """The reason when a measured tensor is too large, '' when it is not, None when it was not measured."""
    reach = ranges.reach(name) if ranges else None
    if reach is None:
        return None
    if reach * HEADROOM <= half.largest:
        return ""
    return f"tensor {name!r} reached {reach:g} in calibration, {half.name} ends at {half.largest:g}"


def _find_inherited(node: NodeProto, found: Mapping[str, str], half: HalfFormat) -> str | None:
    """Why the unmeasured results of a node may be too large."""
    if half.narrow_range and node.op_type in _EXPLOSIVE:
        return f"{node.op_type} {node.name!r} may leave {half.name}, and its range was not measured"
    if node.op_type not in _PASSING:
        return None
    return next((found[name] for name in node.input if name in found), None)
