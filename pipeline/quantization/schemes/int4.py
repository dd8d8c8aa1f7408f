"""Weight-only int4: weights in blocks of 64 or 128 along the reduction, each with its own scale; the rest is float.

Round to nearest, with the scale of each block searched for the least squared error: clipping the largest of a block
makes the steps of all others finer. For what waits for memory rather than arithmetic: small batches, large MatMuls.
TensorRT multiplies in fp16; onnxruntime turns DequantizeLinear and MatMul into MatMulNBits on the CPU.
"""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from enginery.arrays import Array
from enginery.core.reports.quantization import FloatNode
from enginery.core.types import QuantizationScheme
from pipeline.quantization.graph import constants, finish, tidy_from
from pipeline.quantization.insertion_points import Site, find_sites, prepare_model
from pipeline.quantization.notes import QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.insertion import GRIDS, Insertion
from pipeline.quantization.schemes.overrides import OverridePrecision, in_fp32
from pipeline.quantization.schemes.qdq import carries_qdq

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
    chosen = overrides or {}
    graph = tidy_from(prepare_model(model), LOWEST_OPSET)
    graph.ir_version = max(graph.ir_version, LOWEST_IR)
    sites, kept = find_sites(graph)
    insertion, done, left = Insertion(graph, GRIDS["int8"]), [], list(kept)
    for site in sites:
        size = _block(site, graph)
        reason = _obstacle(site, size, chosen)
        if reason:
            left.append(FloatNode(site.node, site.op_type, reason))
        else:
            _store(insertion, site, size)
            done.append(site.node)
    notes = QuantizationNotes(tuple(done), tuple(left), precision="int4 weights")
    if scheme.float_precision == "fp32":
        return finish(graph), notes
    cast, cast_notes = cast_float(graph, "fp16", keep=in_fp32(chosen), ranges=ranges)
    return cast, replace(notes, cast=cast_notes)


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


def _block(site: Site, model: ModelProto) -> int:
    """Elements that share a scale: the largest of `BLOCKS` that divides the weight's depth; 0 when none does."""
    dims = constants(model.graph)[site.weight].dims
    depth = dims[1 - site.axis] if len(dims) == 2 else 0
    return next((size for size in BLOCKS if depth and depth % size == 0), 0)


def _obstacle(site: Site, block: int, overrides: Mapping[str, OverridePrecision]) -> str | None:
    if overrides.get(site.node, "int8") != "int8":
        return f"quantization.overrides says {overrides[site.node]}"
    if site.op_type not in OP_TYPES:
        return "int4 is for the weights of MatMul and Gemm"
    return None if block else "its depth is no multiple of the block"


def _store(insertion: Insertion, site: Site, block: int) -> None:
    """Put the int4 weight, [depth, channels], and its DequantizeLinear in the place of the float one."""
    node = insertion.by_name[site.node]
    values = numpy_helper.to_array(insertion.given[site.weight])
    if site.axis == 0:  # Gemm with transB
        values = values.T
    values = values * _plain(node)
    stored, scales = blocks_of(values, block)
    inputs = [insertion.constant(stored, f"{site.weight}_int4"), insertion.constant(scales, f"{site.weight}_scale")]
    result = f"{inputs[0]}_dequantized"
    name = f"DequantizeLinear/{result}"
    insertion.graph.node.append(
        helper.make_node("DequantizeLinear", inputs, [result], name=name, axis=0, block_size=block)
    )
    node.input[1] = result


def _plain(node: NodeProto) -> np.float32:
    """Clear a Gemm's transB and alpha, with which onnxruntime fuses no int4 weight; gives alpha, for the weight."""
    alpha = np.float32(1)
    for item in list(node.attribute):
        if item.name in ("alpha", "transB"):
            alpha = np.float32(item.f) if item.name == "alpha" else alpha
            node.attribute.remove(item)
    return alpha
