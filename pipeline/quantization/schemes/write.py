"""Writes a model in any precision; weight-only and dynamic schemes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from builders.onnx_graphs.quantized_states import quantize_states
from builders.onnx_graphs.weights import to_array
from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.breakdown import FloatNode
from enginesmith.core.types import Precision, QuantizationScheme, QuantizedState
from pipeline.quantization.graph import attribute_of, finish, tidy_from
from pipeline.quantization.insertion_points import Site, count_integer_nodes, find_sites, prepare_model
from pipeline.quantization.ranges import CastNotes, QuantizationNotes, Ranges
from pipeline.quantization.schemes.block_floats import FORMATS, emulate_blocks, quantize_blocks
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.insertion import GRIDS, Insertion, weight_scales
from pipeline.quantization.schemes.overrides import Override, OverridePrecision, find_override, in_fp32, resolve
from pipeline.quantization.schemes.qdq import LARGEST_REACH, carries_qdq, finish_rest, quantize_fp8, quantize_int8

# Schemes that need no calibration, for the weighted MatMuls and Gemms: int8 scaled at run time, and int4 weights.
#
# int8-dynamic quantizes activations while the model runs, by the range in each run: an outlier affects only its own
# run. In exchange, each activation is read twice, and a result depends on the other samples of its batch. onnxruntime
# fuses the pattern into one kernel (DynamicQuantizeMatMul). Its ConvInteger is slower than a float convolution
# (measured by its authors and by us), so convolutions stay in float.
#
# int4 stores weights only, in blocks of 64 or 128 along the reduction, each with its own scale; the rest is float.
# Values are rounded to nearest, and the scale of each block is searched for the least squared error: clipping the
# largest value makes the steps of all others finer. Faster where a node waits for memory: small batches, large MatMuls.
# TensorRT multiplies in fp16; onnxruntime turns DequantizeLinear and MatMul into MatMulNBits on the CPU.

OP_TYPES = ("Gemm", "MatMul")
# int4: the sizes of a block, and its levels; int4 and blocks exist in ONNX from these versions on.
BLOCKS = (128, 64)
LOWEST, HIGHEST = -8, 7
LOWEST_OPSET, LOWEST_IR = 21, 10
# Scales to try, as shares of the one that reaches the block's largest magnitude at 7.
SHARES = np.linspace(1.0, 0.6, 21)
# Values of a weight that are searched together, so that they stay in a core's cache (512 KiB): 7 to 10 times as fast.
_AT_ONCE = 1 << 17


def quantize_dynamic(
    model: ModelProto,
    overrides: Mapping[str, OverridePrecision] | None = None,
    ranges: Ranges | None = None,
    levels: int = 127,
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with its weighted MatMuls and Gemms in integers, scaled at run time; and notes.

    ranges: if given, nodes whose activations are as large as a mask stay in float.
    levels: the largest magnitude of the int8 weights.
    overrides: node -> precision.
    """
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    graph = prepare_model(model)
    sites, unsupported_nodes = find_sites(graph)
    rewrite, nodes, float_nodes = _DynamicRewrite(graph, levels), [], list(unsupported_nodes)
    for site in sites:
        if reason := _obstacle(site, rewrite, overrides or {}, ranges):
            float_nodes.append(FloatNode(site.node, site.op_type, reason))
        else:
            rewrite.replace(site)
            nodes.append(site.node)
    if not nodes and count_integer_nodes(model):
        return model, QuantizationNotes(passed_through=True)
    return finish(graph), QuantizationNotes(tuple(nodes), tuple(float_nodes), precision="int8, scaled at run time")


def _obstacle(
    site: Site, rewrite: "_DynamicRewrite", overrides: Mapping[str, OverridePrecision], ranges: Ranges | None
) -> str | None:
    if reason := find_override(site.node, overrides):
        return reason
    if site.op_type not in OP_TYPES:
        return "run-time scales are for MatMul and Gemm"
    if attribute_of(rewrite.insertion.by_name[site.node], "transA", 0):
        return "its activation is transposed"
    amax = ranges.reach(site.activation) if ranges else None
    if amax is not None and amax >= LARGEST_REACH:
        return f"tensor {site.activation!r} reaches {amax:g}, as a mask does"
    return None


class _DynamicRewrite:
    """Replaces sites by integer arithmetic; each activation is quantized once for all its readers."""

    def __init__(self, model: ModelProto, levels: int) -> None:
        self.graph = model.graph
        self.insertion = Insertion(model, GRIDS["int8"], levels)
        self._quantized: set[str] = set()

    def replace(self, site: Site) -> None:
        """x W (+ b) becomes (quantized x) (int8 W) times both scales (+ b)."""
        insertion, node = self.insertion, self.insertion.by_name[site.node]
        scales = weight_scales(insertion, site.node, site.axis)
        values = insertion.weight_grid.rounded(to_array(insertion.initializers[site.weight]), scales, site.axis)
        alpha = np.float32(attribute_of(node, "alpha", 1.0))
        weight_name = insertion.constant(values.T if site.axis == 0 else values, f"{site.weight}_int8")
        weight_zero = insertion.constant(np.zeros(scales.shape, np.int8), f"{site.weight}_zero_point")
        factors = insertion.constant(scales * alpha, f"{site.weight}_scale")
        quantized_name, scale, zero = self._quantize(site.activation)
        product = self._add("MatMulInteger", [quantized_name, weight_name, zero, weight_zero], site.node)
        float_product = self._add("Cast", [product], site.node, to=TensorProto.FLOAT)
        scale_product = self._add("Mul", [scale, factors], f"{site.node}/scales")
        bias_name = node.input[2] if len(node.input) > 2 else ""
        result = node.output[0]
        self.graph.node.remove(insertion.by_name.pop(site.node))
        scaled_name = self._add("Mul", [float_product, scale_product], site.node, result="" if bias_name else result)
        if bias_name:
            self._add("Add", [scaled_name, bias_name], site.node, result=result)

    def _quantize(self, tensor: str) -> list[str]:
        """Names of the quantized activation, its scale and its zero point."""
        names = [f"{tensor}/{suffix}" for suffix in ("quantized", "scale", "zero_point")]
        if tensor not in self._quantized:
            node = helper.make_node("DynamicQuantizeLinear", [tensor], names, name=f"DynamicQuantizeLinear/{tensor}")
            self.graph.node.append(node)
            self._quantized.add(tensor)
        return names

    def _add(self, op_type: str, inputs: list[str], stem: str, result: str = "", **attributes: Any) -> str:
        output = result or f"{stem}/{op_type}"
        self.graph.node.append(helper.make_node(op_type, inputs, [output], name=f"{stem}/{op_type}", **attributes))
        return output


def quantize_int4(
    model: ModelProto,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision] | None = None,
    ranges: Ranges | None = None,
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with the weights of its MatMuls and Gemms in int4, the rest in the scheme's float precision; and notes.

    ranges: measured tensors, for the cast to fp16 only.
    overrides: node -> precision.
    Raises ModelError if the opset cannot be raised to 21.
    """
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    graph = tidy_from(prepare_model(model), LOWEST_OPSET)
    graph.ir_version = max(graph.ir_version, LOWEST_IR)
    sites, unsupported_nodes = find_sites(graph)
    insertion, written_nodes, float_nodes = Insertion(graph, GRIDS["int8"]), [], list(unsupported_nodes)
    for site in sites:
        dims = insertion.initializers[site.weight].dims
        depth = dims[1 - site.axis] if len(dims) == 2 else 0
        size = next((size for size in BLOCKS if depth and depth % size == 0), 0)
        reason = find_override(site.node, overrides or {})
        if reason is None and site.op_type not in OP_TYPES:
            reason = "int4 is for the weights of MatMul and Gemm"
        if reason or not size:
            reason = reason or "its depth is not a multiple of the block"
            float_nodes.append(FloatNode(site.node, site.op_type, reason))
        else:
            _store(insertion, site, size)
            written_nodes.append(site.node)
    notes = QuantizationNotes(tuple(written_nodes), tuple(float_nodes), precision="int4 weights")
    return finish_rest(graph, notes, scheme, overrides or {}, ranges)


def blocks_of(values: Array, block: int) -> tuple[Array, NDArray[np.float32]]:
    """(int4 values [depth, channels], float32 scales [depth / block, channels]) of a weight, in blocks of rows.

    The scale of a block is the one of `SHARES` with the least squared error; a block of zeros gets 1.
    """
    depth, channels = values.shape
    codes = np.empty((depth, channels), ml_dtypes.int4)
    scales = np.empty((depth // block, channels), np.float32)
    for block_index, row in enumerate(range(0, depth, block)):
        for column in range(0, channels, _AT_ONCE // block):
            slices = slice(row, row + block), slice(column, column + _AT_ONCE // block)
            codes[slices], scales[block_index, slices[1]] = _quantize_block(
                np.ascontiguousarray(values[slices], np.float32)
            )
    return codes, scales


def _quantize_block(part: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Values of a block [rows, channels] on the grid, and its scales [channels]."""
    full_scales = np.abs(part).max(axis=0) / HIGHEST
    full_scales = np.where(full_scales > 0, np.maximum(full_scales, np.finfo(np.float32).tiny), 1).astype(np.float32)
    best_scales, error = full_scales, _error(part, full_scales)
    for share in SHARES[1:]:
        scales = np.maximum(full_scales * np.float32(share), np.finfo(np.float32).tiny)
        block_error = _error(part, scales)
        best_scales, error = np.where(block_error < error, scales, best_scales), np.minimum(block_error, error)
    return _round(part, best_scales), best_scales


def _round(part: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled_values = part / scales
    np.rint(scaled_values, out=scaled_values)
    return np.clip(scaled_values, LOWEST, HIGHEST, out=scaled_values)


def _error(part: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    difference = _round(part, scales)
    difference *= scales
    np.subtract(part, difference, out=difference)
    total: NDArray[np.float32] = np.square(difference, out=difference).sum(axis=0)
    return total


def _store(insertion: Insertion, site: Site, block: int) -> None:
    """Replace a float weight by an int4 weight, [depth, channels], and its DequantizeLinear."""
    node = insertion.by_name[site.node]
    values = to_array(insertion.initializers[site.weight])
    if site.axis == 0:  # Gemm with transB
        values = values.T
    # onnxruntime fuses no int4 weight with a Gemm that has transB or alpha.
    if (alpha := np.float32(attribute_of(node, "alpha", 1.0))) != 1:
        values = values * alpha
    for attribute in [attribute for attribute in node.attribute if attribute.name in ("alpha", "transB")]:
        node.attribute.remove(attribute)
    codes, scales = blocks_of(values, block)
    inputs = [insertion.constant(codes, f"{site.weight}_int4"), insertion.constant(scales, f"{site.weight}_scale")]
    result_name = f"{inputs[0]}_dequantized"
    name = f"DequantizeLinear/{result_name}"
    insertion.graph.node.append(
        helper.make_node("DequantizeLinear", inputs, [result_name], name=name, axis=0, block_size=block)
    )
    node.input[1] = result_name


def write(
    model: ModelProto,
    precision: Precision,
    scheme: QuantizationScheme | None = None,
    ranges: Ranges | None = None,
    overrides: Sequence[Override] = (),
    float_nodes: Mapping[str, str] | None = None,
    states: Sequence[QuantizedState] = (),
    formats: Mapping[str, Precision] | None = None,
    *,
    keep_io: bool = True,
) -> tuple[ModelProto, QuantizationNotes | CastNotes]:
    """The model in a precision other than fp32, and notes on changed and unchanged nodes.

    scheme: the backend's, for the quantized precisions.  ranges: required for int8 and fp8; in other precisions, they
    show which tensors are too large.  float_nodes: node -> reason; nodes that a search leaves in float, or a cast in
    fp32; in block formats with activations, these nodes are in fp8, or in their format in `formats`.
    keep_io: whether fp16 and bf16 graphs keep fp32 inputs and outputs.  states: rounded at the inputs and outputs of
    the graph.
    overrides: the spec's, by node or operator type.
    Raises DataError if ranges are missing, InputError for an override that matches no node, ModelError for a graph that
    cannot be written in this precision.
    """
    node_precisions = resolve(prepare_model(model), overrides) if overrides else {}
    block_format, reasons = FORMATS.get(precision), float_nodes or {}
    float_precision: OverridePrecision = "fp8" if block_format and block_format.activations else "fp16"
    searched_precisions = {
        **node_precisions,
        **dict.fromkeys(reasons, float_precision),
        **cast("Mapping[str, OverridePrecision]", formats or {}),
    }
    notes: QuantizationNotes | CastNotes
    if precision == "fp16" or precision == "bf16":
        fp32_nodes = {**reasons, **in_fp32(node_precisions)}
        variant_model, notes = cast_float(model, precision, keep_io=keep_io, keep=fp32_nodes, ranges=ranges)
    elif scheme is None:
        raise ValueError(f"{precision} is written in a backend's scheme; none was given")
    elif precision == "int8-dynamic":
        variant_model, notes = quantize_dynamic(model, node_precisions, ranges, scheme.weight_levels)
    elif precision == "int4":
        variant_model, notes = quantize_int4(model, scheme, node_precisions, ranges)
    elif block_format:
        variant_model, notes = quantize_blocks(model, precision, scheme, searched_precisions, ranges)
        notes = _with_reasons(notes, reasons)
    elif ranges is None:
        raise DataError(f"{precision} needs calibrated ranges, and there are none; add calibration.data")
    else:
        quantize = quantize_fp8 if precision == "fp8" else quantize_int8
        variant_model, notes = quantize(model, ranges, scheme, searched_precisions)
        notes = _with_reasons(notes, reasons)
    quantize_states(variant_model, states)
    return variant_model, notes


def write_searched(
    model: ModelProto,
    precision: Precision,
    scheme: QuantizationScheme,
    ranges: Ranges,
    overrides: Mapping[str, OverridePrecision],
) -> ModelProto:
    """The graph of a prepared model in a searched precision, in a form that ONNX Runtime runs."""
    if precision in FORMATS:
        return emulate_blocks(quantize_blocks(model, precision, scheme, overrides, ranges)[0])
    quantize = quantize_fp8 if precision == "fp8" else quantize_int8
    return quantize(model, ranges, scheme, overrides)[0]


def _with_reasons(notes: QuantizationNotes, reasons: Mapping[str, str]) -> QuantizationNotes:
    float_nodes, eight_bit_nodes = (
        tuple(replace(node, reason=reasons.get(node.node, node.reason)) for node in nodes)
        for nodes in (notes.float_nodes, notes.eight_bits)
    )
    return replace(notes, float_nodes=float_nodes, eight_bits=eight_bit_nodes)
