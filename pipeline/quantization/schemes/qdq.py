"""int8 and fp8 graphs: Q/DQ nodes by calibrated ranges."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto, NodeProto

from builders.onnx_graphs.weights import to_array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.breakdown import FloatNode
from enginesmith.core.types import QuantizationScheme
from pipeline.quantization.graph import attribute_of, finish, tidy_from
from pipeline.quantization.insertion_points import Site, find_joins, find_sites, prepare_model, residuals
from pipeline.quantization.ranges import QuantizationNotes, Ranges
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.first_convolutions import fold_first_convolutions, quantize_before_blocks
from pipeline.quantization.schemes.insertion import (
    GRIDS,
    Insertion,
    has_quantizable_bias,
    weight_scales,
    widened_for_bias,
)
from pipeline.quantization.schemes.overrides import OverridePrecision, find_override, in_fp32

# The places of Q/DQ nodes, by the scheme of the backend.
#
# int8 (TensorRT): symmetric activations, per-channel weights with a Q/DQ pair of their own, float biases, and no Q/DQ
# behind weighted nodes, so that a Relu fuses before the next quantization; the other operand of a residual Add is
# quantized, so that the Add fuses too.
# fp8 (TensorRT, sm_89 and later): the same places; the weights are stored as e4m3, behind one DequantizeLinear.
# uint8 (onnxruntime on x86): asymmetric activations, weights stored as int8, int32 biases (float ones for a backend
# that requires them), and Q/DQ behind each convolution (and its Relu) and behind nodes that join convolutions; without
# these Q/DQ, onnxruntime does not choose its integer kernels.
# Weights use all 8 bits, or -64..64 (`QuantizationScheme.weight_levels`): on x86 without VNNI onnxruntime adds pairs of
# uint8 x int8 products in 16 bits, which larger weights can saturate (its own documentation). There an engine with such
# weights is opened in another way, and slower; docs/concepts/quantization.md#kinds-of-cpu has the price of both.

# Additive attention masks reach -1e4 and far beyond; one step of int8 over such a range is larger than any activation.
LARGEST_REACH = 1e4
# Q/DQ of fp16, and fp8 itself, exist from this opset on; the IR from 9.
LOWEST_OPSET_FP16 = 19
LOWEST_IR_FP8 = 9


def carries_qdq(model: ModelProto) -> bool:
    """Whether the model rounds its operands (trained with quantization, or quantized elsewhere).

    A model with DequantizeLinear alone stores weights in 8 or 4 bits and computes in float: it is no int8 model.
    """
    op_types = {node.op_type for node in model.graph.node}
    return "QuantizeLinear" in op_types or op_types >= {"DequantizeLinear", "DynamicQuantizeLinear"}


def quantize_int8(
    model: ModelProto,
    ranges: Ranges,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision] | None = None,
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with Q/DQ around weighted nodes with a usable range and around nodes that fuse with them; and notes.

    overrides: node name -> precision (`overrides.resolve`); nodes in 'fp32' or 'fp16' are left in float.
    A model that carries Q/DQ is returned unchanged. With `float_precision` fp16 the rest of the graph is cast as well;
    inputs and outputs stay fp32.
    Raises DataError if `ranges` lacks a tensor that a weighted node reads, ModelError if the opset cannot be raised.
    """
    return _quantize(model, ranges, scheme, scheme.activation, overrides or {})


def quantize_fp8(
    model: ModelProto,
    ranges: Ranges,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision] | None = None,
) -> tuple[ModelProto, QuantizationNotes]:
    """`quantize_int8` with e4m3 in place of int8: symmetric, with the largest measured magnitude at 448."""
    return _quantize(model, ranges, scheme, "fp8", overrides or {})


def _quantize(
    model: ModelProto, ranges: Ranges, scheme: QuantizationScheme, grid: str, overrides: Mapping[str, OverridePrecision]
) -> tuple[ModelProto, QuantizationNotes]:
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    graph = prepare_model(model)
    if scheme.float_precision == "fp16" or grid == "fp8":
        graph = tidy_from(graph, LOWEST_OPSET_FP16)
        graph.ir_version = max(graph.ir_version, LOWEST_IR_FP8)
    sites, float_nodes = usable_sites(graph, ranges, grid, overrides)
    notes = QuantizationNotes(
        tuple(site.node for site in sites), float_nodes, precision="fp8" if grid == "fp8" else "int8"
    )
    if grid == "uint8":
        sites, ranges = fold_first_convolutions(graph, sites, ranges)
        extra_nodes = _insert_for_cpu(graph, sites, ranges, scheme, overrides)
        quantize_before_blocks(graph)
    else:
        insertion = Insertion(graph, GRIDS[grid], scheme.weight_levels)
        extra_nodes = _insert_for_gpu(graph, sites, ranges, insertion, overrides)
    return finish_rest(graph, replace(notes, float_nodes=(*notes.float_nodes, *extra_nodes)), scheme, overrides, ranges)


def finish_rest(
    graph: ModelProto,
    notes: QuantizationNotes,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision],
    ranges: Ranges | None,
) -> tuple[ModelProto, QuantizationNotes]:
    """Finish and check a graph that was quantized in place; cast its float nodes to fp16 if the scheme requires it.

    notes: on the quantization.  overrides: node -> precision.  ranges: None if nothing was measured.
    """
    if scheme.float_precision == "fp32":
        return finish(graph), notes
    cast_graph, cast_notes = cast_float(graph, "fp16", keep=in_fp32(overrides), ranges=ranges)
    return cast_graph, replace(notes, cast=cast_notes)


def usable_sites(
    graph: ModelProto, ranges: Ranges, grid: str, overrides: Mapping[str, OverridePrecision]
) -> tuple[tuple[Site, ...], tuple[FloatNode, ...]]:
    """The sites of a prepared model to quantize to a grid of `GRIDS`, and those left in float with the reason.

    Raises DataError if `ranges` lacks a tensor that a site reads or writes.
    """
    sites, unsupported_nodes = find_sites(graph)
    quantizable_sites, float_nodes = [], list(unsupported_nodes)
    for site in sites:
        # On a CPU, a convolution gets Q/DQ behind it, too.
        measured_names = (site.activation, site.result)[: 2 if site.op_type == "Conv" and grid == "uint8" else 1]
        reason = find_override(site.node, overrides)
        if reason is None and grid == "uint8" and site.op_type == "ConvTranspose":
            reason = "onnxruntime has no integer kernel for it"
        if reason := reason or next(filter(None, (degenerate(name, ranges) for name in measured_names)), None):
            float_nodes.append(FloatNode(site.node, site.op_type, reason))
        else:
            quantizable_sites.append(site)
    return tuple(quantizable_sites), tuple(float_nodes)


def degenerate(tensor: str, ranges: Ranges) -> str | None:
    """Why a tensor's range cannot be quantized, or None. Raises DataError if the tensor was not measured."""
    amax = ranges.reach(tensor)
    if amax is None:
        raise DataError(f"the ranges lack tensor {tensor!r}; calibrate with this same model")
    low, high = ranges.tensors[tensor]
    if not math.isfinite(amax):
        return f"tensor {tensor!r} is not finite"
    if amax < float(np.finfo(np.float32).tiny):
        return f"tensor {tensor!r} was zero in every calibration sample"
    if low == high:
        return f"tensor {tensor!r} was {low:g} everywhere in calibration: that says nothing about its range"
    if amax >= LARGEST_REACH:
        return f"tensor {tensor!r} reaches {amax:g}, as a mask does: an int8 step would be {amax / 127:.3g}"
    return None


def _beside(node: NodeProto, tensor: str, ranges: Ranges, overrides: Mapping[str, OverridePrecision]) -> str | None:
    """Why a tensor beside the sites is left in float, or None. Here, a missing range is a reason and no error: without
    Q/DQ, only a fusion is lost."""
    if reason := find_override(node.name, overrides):
        return reason
    return f"tensor {tensor!r} was not measured" if ranges.reach(tensor) is None else degenerate(tensor, ranges)


def _insert_for_gpu(
    model: ModelProto,
    sites: Sequence[Site],
    ranges: Ranges,
    insertion: Insertion,
    overrides: Mapping[str, OverridePrecision],
) -> list[FloatNode]:
    """Insert Q/DQ in place, as TensorRT requires it; return the residual Adds that are left in float."""
    float_nodes = []
    for site in sites:
        insertion.read(site.node, 0, *ranges.tensors[site.activation])
    for residual in residuals(model, [site.node for site in sites if site.op_type == "Conv"]):
        node = insertion.by_name[residual.node]
        if reason := _beside(node, residual.tensor, ranges, overrides):
            float_nodes.append(FloatNode(residual.node, node.op_type, reason))
        else:
            insertion.read(residual.node, residual.operand, *ranges.tensors[residual.tensor])
    is_int8 = insertion.grid.name == "int8"
    for site in sites:
        insertion.weight(site.node, site.axis, weight_scales(insertion, site.node, site.axis), pair=is_int8)
    return float_nodes


def _insert_for_cpu(
    model: ModelProto,
    sites: Sequence[Site],
    ranges: Ranges,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision],
) -> list[FloatNode]:
    """Insert Q/DQ in place, as onnxruntime's x86 kernels require it; return the joins that are left in float."""
    nodes = {node.name: node for node in model.graph.node}
    relus = {node.name for node in model.graph.node if node.op_type == "Relu"}
    insertion, float_nodes = Insertion(model, GRIDS["uint8"], scheme.weight_levels), []

    def write(maker: str, tensor: str, fused_node: str | None, low: float, high: float) -> None:
        if fused_node:
            insertion.fold(fused_node)
        # Behind a Relu, zero must be the grid's lowest number: saturation then replaces the Relu.
        insertion.write(maker, tensor, 0.0 if fused_node in relus else low, high)

    convolutions = [site for site in sites if site.op_type == "Conv"]
    result_ranges = {site.result: ranges.tensors[site.result] for site in convolutions}
    joins = find_joins(model, result_ranges)
    for site in convolutions:
        write(site.node, site.result, site.fused, *result_ranges[site.result])
    for join in joins:
        node, source = nodes[join.node], join.same_as or join.result
        if not all(name in result_ranges for name in node.input):
            continue  # an earlier join was left in float
        if reason := None if join.same_as else _beside(node, source, ranges, overrides):
            float_nodes.append(FloatNode(join.node, node.op_type, reason))
            continue
        result_ranges[join.result] = result_ranges[source] if join.same_as else ranges.tensors[source]
        write(join.node, join.result, join.fused, *result_ranges[join.result])
    for site in sites:
        scale = insertion.read(site.node, 0, *ranges.tensors[site.activation])
        if scheme.quantize_bias:
            _weight_and_bias(insertion, site, scale)
        else:
            insertion.weight(site.node, site.axis, weight_scales(insertion, site.node, site.axis), pair=False)
    return float_nodes


def _weight_and_bias(insertion: Insertion, site: Site, activation_scale: float) -> None:
    """Store a site's weight as int8, and its bias as int32 if the accumulator's grid can hold it."""
    node, scales = insertion.by_name[site.node], weight_scales(insertion, site.node, site.axis)
    alpha = attribute_of(node, "alpha", 1.0)
    if has_quantizable_bias(node, insertion.initializers, len(scales)) and alpha > 0:
        bias = to_array(insertion.initializers[node.input[2]])
        scales = widened_for_bias(scales, bias, activation_scale * alpha)
        accumulator = np.float32(activation_scale * alpha) * scales
        if (accumulator >= np.finfo(np.float32).tiny).all():
            insertion.bias(site.node, accumulator)
    insertion.weight(site.node, site.axis, scales, pair=False)
