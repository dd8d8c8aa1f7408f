"""Weight-only int4: weights in blocks of 64 or 128 along the reduction, each with its own scale; the rest is float.

Values are rounded to nearest, and the scale of each block is searched for the least squared error: clipping the largest
value makes the steps of all others finer. Faster where a node waits for memory: small batches, large MatMuls.
TensorRT multiplies in fp16; onnxruntime turns DequantizeLinear and MatMul into MatMulNBits on the CPU.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from enginery.arrays import Array
from enginery.core.reports.quantization import FloatNode
from enginery.core.types import QuantizationScheme
from pipeline.quantization.graph import attribute_of, tidy_from
from pipeline.quantization.insertion_points import Site, find_sites, prepare_model
from pipeline.quantization.notes import QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.insertion import GRIDS, Insertion
from pipeline.quantization.schemes.overrides import OverridePrecision, find_override
from pipeline.quantization.schemes.qdq import carries_qdq, finish_rest

BLOCKS = (128, 64)
# int4 and blocks exist in ONNX from these versions on.
LOWEST_OPSET, LOWEST_IR = 21, 10
LOWEST, HIGHEST = -8, 7
# Scales to try, as shares of the one that reaches the block's largest magnitude at 7.
SHARES = np.linspace(1.0, 0.6, 21)
OP_TYPES = ("Gemm", "MatMul")


def quantize_int4(
    model: ModelProto,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision] | None = None,
    ranges: Ranges | None = None,
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with the weights of its MatMuls and Gemms in int4, the rest in the scheme's float precision.

    ranges: measured tensors, for the cast to fp16 only. Raises ModelError when opset 21 is out of reach.
    """
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    graph = tidy_from(prepare_model(model), LOWEST_OPSET)
    graph.ir_version = max(graph.ir_version, LOWEST_IR)
    sites, kept = find_sites(graph)
    insertion, done, left = Insertion(graph, GRIDS["int8"]), [], list(kept)
    for site in sites:
        dims = insertion.given[site.weight].dims
        depth = dims[1 - site.axis] if len(dims) == 2 else 0
        size = next((size for size in BLOCKS if depth and depth % size == 0), 0)
        reason = find_override(site.node, overrides or {})
        if reason is None and site.op_type not in OP_TYPES:
            reason = "int4 is for the weights of MatMul and Gemm"
        if reason or not size:
            reason = reason or "its depth is no multiple of the block"
            left.append(FloatNode(site.node, site.op_type, reason))
        else:
            _store(insertion, site, size)
            done.append(site.node)
    notes = QuantizationNotes(tuple(done), tuple(left), precision="int4 weights")
    return finish_rest(graph, notes, scheme, overrides or {}, ranges)


def blocks_of(values: Array, block: int) -> tuple[Array, NDArray[np.float32]]:
    """(int4 values, scales) of a weight [depth, channels], in blocks of rows; scales are [depth / block, channels].

    The scale of a block is the one of `SHARES` with the least squared error; a block of zeros gets 1.
    """
    depth, channels = values.shape
    parts = values.astype(np.float32).reshape(depth // block, block, channels)
    full = np.abs(parts).max(axis=1) / HIGHEST
    full = np.where(full > 0, np.maximum(full, np.finfo(np.float32).tiny), 1).astype(np.float32)
    best, error = full, _error(parts, full)
    for share in SHARES[1:]:
        scales = np.maximum(full * np.float32(share), np.finfo(np.float32).tiny)
        found = _error(parts, scales)
        best, error = np.where(found < error, scales, best), np.minimum(found, error)
    return _round(parts, best).reshape(depth, channels).astype(ml_dtypes.int4), best


def _round(parts: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    on_grid: NDArray[np.float32] = np.clip(np.rint(parts / scales[:, None]), LOWEST, HIGHEST)
    return on_grid


def _error(parts: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Squared error of each block in each channel."""
    difference = parts - _round(parts, scales) * scales[:, None]
    total: NDArray[np.float32] = np.square(difference, out=difference).sum(axis=1)
    return total


def _store(insertion: Insertion, site: Site, block: int) -> None:
    """Put the int4 weight, [depth, channels], and its DequantizeLinear in the place of the float one."""
    node = insertion.by_name[site.node]
    values = numpy_helper.to_array(insertion.given[site.weight])
    if site.axis == 0:  # Gemm with transB
        values = values.T
    # onnxruntime fuses no int4 weight with a Gemm that has transB or alpha.
    values = values * np.float32(attribute_of(node, "alpha", 1.0))
    for item in [item for item in node.attribute if item.name in ("alpha", "transB")]:
        node.attribute.remove(item)
    stored, scales = blocks_of(values, block)
    inputs = [insertion.constant(stored, f"{site.weight}_int4"), insertion.constant(scales, f"{site.weight}_scale")]
    result = f"{inputs[0]}_dequantized"
    name = f"DequantizeLinear/{result}"
    insertion.graph.node.append(
        helper.make_node("DequantizeLinear", inputs, [result], name=name, axis=0, block_size=block)
    )
    node.input[1] = result
