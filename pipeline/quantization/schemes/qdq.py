"""int8 graphs: Q/DQ nodes put by onnxruntime's QDQQuantizer, with our ranges and in the scheme of the backend.

int8 (TensorRT): symmetric activations, per-channel weights with a Q/DQ pair of their own, float biases, and no Q/DQ
behind weighted nodes, so that a Relu or an Add fuses before the next quantization.
uint8 (onnxruntime on x86): asymmetric activations, weights stored as int8, int32 biases, and Q/DQ behind each
convolution (and its Relu), without which its integer kernel is not chosen.
Weights use all 8 bits: on x86 without VNNI onnxruntime adds pairs of uint8 x int8 products in 16 bits, which can
saturate (its own documentation), so an int8 CPU engine holds for hosts like the one it was validated on.

Only the chosen nodes see quantized values. A residual connection that reads the same tensor keeps the exact one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto, TensorProto, shape_inference

from builders.errors import DataError
from builders.types import QuantizationScheme
from pipeline.quantization.calibration.ranges import Ranges
from pipeline.quantization.graphs.graph import finish, raise_opset, tidy
from pipeline.quantization.graphs.sharing import join_readers, own_weights, part_readers
from pipeline.quantization.graphs.sites import Site, find_sites, prepared
from pipeline.quantization.notes import Kept, QuantizationNotes

QDQ_TYPES = ("QuantizeLinear", "DequantizeLinear")
# Additive attention masks reach -1e4 and far beyond; one step of int8 over such a range is larger than any activation.
LARGEST_REACH = 1e4
# Q/DQ of fp16 exists from this opset on.
LOWEST_OPSET_FP16 = 19


def carries_qdq(model: ModelProto) -> bool:
    """Whether the model already holds Q/DQ nodes (trained with quantization, or quantized elsewhere)."""
    return any(node.op_type in QDQ_TYPES for node in model.graph.node)


def quantize_int8(
    model: ModelProto, ranges: Ranges, scheme: QuantizationScheme
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with Q/DQ around every Conv, Gemm and MatMul that has a constant weight and a usable range.

    A model that carries Q/DQ comes back as it is. With `float_precision` fp16 the rest of the graph is cast as well,
    inputs and outputs staying fp32. Raises DataError when `ranges` lacks a tensor, ModelError when the opset is too
    old to be lifted.
    """
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    graph = prepared(model)
    if scheme.float_precision == "fp16":
        graph = tidy(raise_opset(graph, LOWEST_OPSET_FP16))
    sites, kept = _usable(*find_sites(graph), ranges, scheme)
    if sites:
        graph = _insert(graph, sites, ranges, scheme)
    notes = QuantizationNotes(tuple(site.node for site in sites), kept)
    if scheme.float_precision == "fp32":
        return finish(graph), notes
    from pipeline.quantization.schemes.cast import cast_float

    cast, cast_notes = cast_float(graph, "fp16", ranges=ranges)
    return cast, replace(notes, cast=cast_notes)


def _usable(
    sites: Iterable[Site], kept: Iterable[Kept], ranges: Ranges, scheme: QuantizationScheme
) -> tuple[tuple[Site, ...], tuple[Kept, ...]]:
    """Divide the sites into those whose ranges can be quantized, and those that are left in float."""
    usable, left = [], list(kept)
    for site in sites:
        reasons = [_degenerate(name, ranges) for name in _measured(site, scheme)]
        reason = next((reason for reason in reasons if reason), None)
        if reason:
            left.append(Kept(site.node, site.op_type, reason))
        else:
            usable.append(site)
    return tuple(usable), tuple(left)


def _measured(site: Site, scheme: QuantizationScheme) -> tuple[str, ...]:
    """The activations of a site that get Q/DQ: what it reads and, for CPU convolutions, what it writes."""
    writes = site.op_type == "Conv" and scheme.activation == "uint8"
    return (site.activation, site.result) if writes else (site.activation,)


def _degenerate(tensor: str, ranges: Ranges) -> str | None:
    """Why a tensor's range cannot be quantized, or None. Raises DataError when it was not measured."""
    reach = ranges.reach(tensor)
    if reach is None:
        raise DataError(f"ranges hold nothing for tensor {tensor!r}; calibrate this very model")
    if not math.isfinite(reach):
        return f"tensor {tensor!r} is not finite"
    if reach < float(np.finfo(np.float32).tiny):
        return f"tensor {tensor!r} was zero in every calibration sample"
    if reach >= LARGEST_REACH:
        return f"tensor {tensor!r} reaches {reach:g}, as a mask does: an int8 step would be {reach / 127:.3g}"
    return None


def _insert(model: ModelProto, sites: Sequence[Site], ranges: Ranges, scheme: QuantizationScheme) -> ModelProto:
    own_weights(model, sites)
    written = {name for site in sites for name in _measured(site, scheme)[1:]}
    aliases = part_readers(model, sites, written)
    measured = {name: name for site in sites for name in _measured(site, scheme)}
    # onnxruntime looks a convolution's own output up before it folds the Relu behind it away.
    folded = {site.node: site.result for site in sites if site.fused and site.result in measured}
    behind = {node.output[0]: folded[node.name] for node in model.graph.node if node.name in folded}
    chosen = {name: ranges.tensors[source] for name, source in (measured | aliases | behind).items()}
    quantized = _run_quantizer(model, sites, chosen, scheme)
    join_readers(quantized, aliases)
    _check_inserted(quantized, sites)
    return quantized


def _check_inserted(model: ModelProto, sites: Sequence[Site]) -> None:
    """onnxruntime skips what it cannot type with no more than a log line; less than the notes promise is a bug."""
    made = {name: node.op_type for node in model.graph.node for name in node.output}
    by_name = {node.name: node for node in model.graph.node}
    for site in sites:
        if {made.get(name) for name in by_name[site.node].input[:2]} != {"DequantizeLinear"}:
            raise RuntimeError(f"onnxruntime left {site.op_type} {site.node!r} without Q/DQ")


def _run_quantizer(
    model: ModelProto, sites: Sequence[Site], ranges: dict[str, tuple[float, float]], scheme: QuantizationScheme
) -> ModelProto:
    from onnxruntime.quantization.calibrate import TensorData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    symmetric = scheme.activation == "int8"
    fused = [site.fused for site in sites if site.fused and site.op_type == "Conv" and not symmetric]
    described = _described(model)
    quantizer = QDQQuantizer(
        described,
        per_channel=True,
        reduce_range=False,
        weight_qType=TensorProto.INT8,
        activation_qType=TensorProto.INT8 if symmetric else TensorProto.UINT8,
        tensors_range={
            name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in ranges.items()
        },
        nodes_to_quantize=[*(site.node for site in sites), *fused],
        nodes_to_exclude=[],
        op_types_to_quantize=["Conv", "Gemm", "MatMul", "Relu", "Clip"],
        extra_options={
            "ActivationSymmetric": symmetric,
            "AddQDQPairToWeight": symmetric,
            "QuantizeBias": scheme.quantize_bias,
            "OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul", *(["Conv"] if symmetric else [])],
        },
    )
    return _undescribed(quantizer.quantize_model(), model)


def _described(model: ModelProto) -> ModelProto:
    """The model with inferred types, marked so that onnxruntime does not write it to disk to infer them again."""
    inferred = shape_inference.infer_shapes(model)
    inferred.metadata_props.add(key="onnx.infer", value="onnxruntime.quant")
    return inferred


def _undescribed(model: ModelProto, original: ModelProto) -> ModelProto:
    """Undo the mark and the producer's name that onnxruntime sets."""
    del model.metadata_props[:]
    model.metadata_props.extend(original.metadata_props)
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    return model
