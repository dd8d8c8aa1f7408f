"""NVFP4 and MXFP8: floats of 4 and 8 bits in blocks, each with a scale of its own; their arithmetic, and their graphs.

NVFP4 (NVIDIA, "Introducing NVFP4", 2025): 16 numbers of e2m1 share a scale of e4m3, and a tensor has a global scale in
fp32. MXFP8 (OCP, "Microscaling Formats", 2023): 32 numbers of e4m3 share a power of two. Blocks are along the depth of
a product. Scales of activations are computed at run time, from the largest magnitude of each block.

Global scales are powers of two here, so that a scale times a code is exact in fp16 and in fp32. Every runtime then
computes with the same weights, and quantizing weights that are on the grid returns them unchanged.

ONNX has no operators for these blocks, so TensorRT's parser has its own (domain `trt`; TensorRT-RTX 1.7). ONNX Runtime
has no kernels for them, nor for e2m1: `emulate_blocks` returns a graph of standard operators that computes the same
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser
from onnx.inliner import inline_local_functions

from builders.onnx_graphs.bodies import drop_unread, set_items
from builders.onnx_graphs.weights import to_array
from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.breakdown import FloatNode
from enginesmith.core.types import Precision, QuantizationScheme
from pipeline.quantization.graph import attribute_of, element_types, sort_nodes, static_shapes, tidy_from
from pipeline.quantization.insertion_points import Site, find_sites, prepare_model
from pipeline.quantization.ranges import QuantizationNotes, Ranges
from pipeline.quantization.schemes.insertion import GRIDS, Insertion, weight_scales
from pipeline.quantization.schemes.overrides import OverridePrecision, find_override
from pipeline.quantization.schemes.qdq import carries_qdq, degenerate, finish_rest

Floats = NDArray[np.float32]
E2M1, E4M3 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E2M1, LARGEST_E4M3 = np.float32(6), np.float32(448)
# FLOAT4E2M1 exists in ONNX from these versions on.
LOWEST_OPSET, LOWEST_IR = 23, 11
# The global scale of activations leaves room for values this many times as large as in calibration. e4m3 has enough
# scales: between 1 and 64 nothing changed on MiniLM; 0.5 cost 6 dB.
HEADROOM = 4
# The tried scales of a block: steps of e4m3 from the scale that puts the largest magnitude at 6 (four over six of Cook
# et al., "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling", 2025, is one of them); and the
# scales that put it at each smaller code, for weights that are on the grid.
_STEPS, _CODES = range(-2, 7), (3.0, 2.0, 1.5, 1.0, 0.5)
_BIAS = 127  # of an exponent in E8M0


def power_of_two(least_value: float) -> np.float32:
    """The smallest power of two that is no less than a positive number."""
    mantissa, exponent = np.frexp(np.float32(least_value))
    return np.float32(np.ldexp(1.0, int(exponent) - (mantissa == 0.5)))


def round_e2m1(values: NDArray[np.floating]) -> Floats:
    """The values, of any shape, rounded to e2m1, halves to even; 6 is the largest. Faster than `astype(E2M1)`."""
    sizes = np.minimum(np.abs(values), LARGEST_E2M1)
    steps = np.where(sizes < 2, np.float32(0.5), np.where(sizes < 4, np.float32(1), np.float32(2)))
    return np.asarray(np.copysign(np.rint(sizes / steps) * steps, values), np.float32)


def round_e4m3(values: NDArray[np.floating]) -> Floats:
    """The values rounded to e4m3, halves to even; 448 is the largest."""
    bounded_values = np.clip(values, -LARGEST_E4M3, LARGEST_E4M3)
    return np.asarray(bounded_values.astype(E4M3), np.float32)


@dataclass(frozen=True)
class BlockFormat:
    """A format of weights and, with `activations`, of their activations, in blocks. block: numbers in a block; 0 for
    whole channels.  name: of the format.  four_bits: whether its numbers are e2m1; else e4m3."""

    name: str
    block: int
    activations: bool
    four_bits: bool

    def round(self, values: NDArray[np.floating]) -> Floats:
        """Values that were divided by their scales, rounded to the grid of the codes."""
        return round_e2m1(values) if self.four_bits else round_e4m3(values)

    def scales(self, weight: Floats, importance: Floats | None = None) -> Floats:
        """The scale of each block of rows of a weight, [depth / block, channels]. importance: of each row's squared
        error, [depth]. An e4m3 scale is the one with the least error; an E8M0 scale is the smallest without overflow.
        """
        blocks = weight.reshape(-1, self.block or len(weight), weight.shape[-1])
        amax = np.abs(blocks).max(axis=1)
        if not self.block:
            return np.asarray(amax / LARGEST_E4M3, np.float32)
        if not self.four_bits:
            return powers_of(exponents_of(amax))
        importances = None if importance is None else importance.reshape(-1, self.block, 1)
        best_scales: Floats = np.zeros_like(amax)
        least_error = np.full_like(amax, np.inf)
        for scales in _candidates(amax, global_scale(weight)):
            errors = np.square(self.round(blocks / scales[:, None]) * scales[:, None] - blocks)
            error = (errors if importances is None else errors * importances).sum(axis=1)
            best_scales = np.where(error < least_error, scales, best_scales)
            least_error = np.minimum(error, least_error)
        return best_scales

    def encode(self, weight: Floats) -> tuple[Array, Array, np.float32]:
        """(codes, stored scales, global scale) of a weight [depth, channels], in blocks of rows."""
        scales = self.scales(weight)
        ratios = np.asarray(weight / np.repeat(scales, self.block, axis=0), np.float32)
        if not self.four_bits:
            return round_e4m3(ratios).astype(E4M3), (np.frexp(scales)[1] - 1 + _BIAS).astype(np.uint8), np.float32(1)
        tensor_scale = global_scale(weight)
        return round_e2m1(ratios).astype(E2M1), (scales / tensor_scale).astype(E4M3), tensor_scale

    def decode(self, codes: Array, scales: Array, tensor_scale: np.float32) -> Floats:
        """The weight that codes and scales store, in float32. tensor_scale: the scale of all blocks together."""
        full_scales = scales.astype(np.float32) * tensor_scale
        if not self.four_bits:
            full_scales = powers_of(scales.astype(np.int32) - _BIAS)
        return np.asarray(codes.astype(np.float32) * np.repeat(full_scales, self.block, axis=0), np.float32)

    def rounded_activation(self, values: Floats, tensor_scale: np.float32) -> Floats:
        """Values [..., depth] as kernels multiply them: in blocks along the last axis, scaled at run time."""
        blocks = values.reshape(*values.shape[:-1], -1, self.block)
        amax = np.abs(blocks).max(axis=-1, keepdims=True)
        e4m3_scales = round_e4m3(amax / LARGEST_E2M1 / tensor_scale) * tensor_scale
        scales = e4m3_scales if self.four_bits else powers_of(exponents_of(amax))
        ratios = np.asarray(blocks / np.maximum(scales, np.finfo(np.float32).tiny), np.float32)
        return np.asarray(self.round(ratios) * scales, np.float32).reshape(values.shape)


FORMATS: Mapping[Precision, BlockFormat] = {
    "nvfp4": BlockFormat("nvfp4", 16, activations=True, four_bits=True),
    "nvfp4-weights": BlockFormat("nvfp4-weights", 16, activations=False, four_bits=True),
    "mxfp8": BlockFormat("mxfp8", 32, activations=True, four_bits=False),
}

# fp8, for rounding weights in a search; its graphs have QuantizeLinear (`schemes.qdq`). MiniLM on held-out sentences:
# activations in e4m3 alone leave 27.7 dB, weights alone 28.4, both 25.1: 27 dB require products in fp16. In NVFP4,
# activations alone leave 16.9 dB.
FP8 = BlockFormat("fp8", 0, activations=False, four_bits=False)


def exponents_of(reach: Floats) -> NDArray[np.int32]:
    """Exponents of E8M0 with which e4m3 holds magnitudes up to `reach`: the least k with reach <= 448 x 2^k."""
    mantissas, exponents = np.frexp(reach)  # 448 is 0.875 x 2^9
    least_exponents = exponents - 9 + (mantissas > 0.875)
    return np.clip(np.where(reach > 0, least_exponents, -_BIAS), -_BIAS, _BIAS).astype(np.int32)


def powers_of(exponents: NDArray[np.int32]) -> Floats:
    """2 to these exponents."""
    return np.asarray(np.ldexp(np.float32(1), exponents), np.float32)


def global_scale(weight: Floats) -> np.float32:
    """The global scale of an NVFP4 weight, with which blocks may have any code for their largest magnitude."""
    amax = float(np.abs(weight).max(initial=0.0))
    return power_of_two(max(amax / float(LARGEST_E4M3) * 2, 2.0**-126))


def activation_scale(reach: float) -> np.float32:
    """The global scale of an NVFP4 activation. reach: its largest magnitude in calibration."""
    return power_of_two(HEADROOM * reach / float(LARGEST_E2M1 * LARGEST_E4M3))


def _candidates(reach: Floats, tensor_scale: np.float32) -> "list[Floats]":
    first_code = (reach / LARGEST_E2M1 / tensor_scale).astype(E4M3).view(np.uint8).astype(np.int16)
    last_code = np.int16(np.array(LARGEST_E4M3).astype(E4M3).view(np.uint8))
    steps = [np.clip(first_code + step, 1, last_code).astype(np.uint8).view(E4M3) for step in _STEPS]
    steps += [np.maximum(reach / np.float32(code) / tensor_scale, np.float32(2.0**-9)).astype(E4M3) for code in _CODES]
    return [scales.astype(np.float32) * tensor_scale for scales in steps]


def quantize_blocks(
    model: ModelProto,
    precision: Precision,
    scheme: QuantizationScheme,
    overrides: Mapping[str, OverridePrecision],
    ranges: Ranges | None,
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with the MatMuls and Gemms that have constant weights in the format, where possible; and notes.

    If the format has activations and ranges are known, other nodes with weights are in fp8, or in int8 if `overrides`
    says so; the rest is in the scheme's float precision.

    overrides: node -> precision; in NVFP4 also MXFP8.
    Raises DataError if ranges lack a tensor that NVFP4 needs, ModelError if the opset cannot be raised to 23.
    """
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    block_format = FORMATS[precision]
    graph = tidy_from(prepare_model(model), LOWEST_OPSET)
    graph.ir_version = max(graph.ir_version, LOWEST_IR)
    chosen_sites, other_sites, unsupported_nodes = find_block_sites(graph, block_format, overrides, ranges)
    forms = {site.node: _form_of(site, block_format, overrides) for site in chosen_sites}
    eight_bit_nodes, float_nodes = _quantize_rest(other_sites, graph, block_format, overrides, ranges)
    insertion = Insertion(graph, GRIDS["fp8"])
    weights = {site.node: _as_product(site, insertion) for site in chosen_sites}
    wide_sites = [site for site in chosen_sites if forms[site.node] is not block_format]
    wide_nodes = [FloatNode(site.node, site.op_type, "quantization.overrides says mxfp8") for site in wide_sites]
    formats = dict.fromkeys((node.node for node in wide_nodes), "mxfp8")
    formats |= {node.node: _rest_grid(node.node, overrides) for node in eight_bit_nodes}
    narrow_nodes, others = tuple(name for name in weights if name not in formats), (*unsupported_nodes, *float_nodes)
    eight_bits = (*eight_bit_nodes, *wide_nodes)
    notes = QuantizationNotes(narrow_nodes, others, precision=precision, eight_bits=eight_bits, formats=formats)
    written_graph, notes = finish_rest(graph, notes, scheme, overrides, ranges)
    amax_of = {site.node: ranges.reach(site.activation) if ranges else None for site in chosen_sites}
    _Writer(written_graph, forms, amax_of).write(weights)
    return written_graph, notes


def find_block_sites(
    graph: ModelProto, form: BlockFormat, overrides: Mapping[str, OverridePrecision], ranges: Ranges | None
) -> tuple[list[Site], list[tuple[Site, str]], tuple[FloatNode, ...]]:
    """The sites of a prepared model that take the format, or the block format of an override; the other sites, with the
    reason; and nodes that are no sites."""
    sites, unsupported_nodes = find_sites(graph)
    shapes, insertion = static_shapes(graph), Insertion(graph, GRIDS["fp8"])
    reasons = {
        site.node: find_override(site.node, overrides)
        or ("quantization.overrides says int8" if overrides.get(site.node) == "int8" else None)
        or _obstacle(site, _form_of(site, form, overrides), insertion, shapes, ranges)
        for site in sites
    }
    other_sites = [(site, reason) for site in sites if (reason := reasons[site.node])]
    return [site for site in sites if not reasons[site.node]], other_sites, unsupported_nodes


def _form_of(site: Site, form: BlockFormat, overrides: Mapping[str, OverridePrecision]) -> BlockFormat:
    return FORMATS["mxfp8"] if overrides.get(site.node) == "mxfp8" else form


def _obstacle(
    site: Site, form: BlockFormat, insertion: Insertion, shapes: Mapping[str, tuple[int, ...]], ranges: Ranges | None
) -> str | None:
    if site.op_type not in ("Gemm", "MatMul"):
        return f"{form.name} is for MatMul and Gemm"
    if attribute_of(insertion.by_name[site.node], "transA", 0):
        return "its activation is transposed"
    weight = insertion.initializers[site.weight]
    if weight.dims[1 - site.axis] % form.block:
        return f"its depth, {weight.dims[1 - site.axis]}, is not a multiple of the block, {form.block}"
    if form.activations and len(shapes.get(site.activation, ())) not in (2, 3):
        rank = len(shapes[site.activation]) if site.activation in shapes else "unknown"
        return f"its activation has the rank {rank}; TensorRT takes blocks of rank 2 and 3"
    magnitudes = np.abs(to_array(weight))
    if form.four_bits and not 2.0**-10 < float(magnitudes.max()) < 2.0**15:
        return f"its weights reach {float(magnitudes.max()):.3g}, whose scales fp16 does not hold"
    if form.name == "nvfp4":
        if ranges is None:
            raise DataError("nvfp4 needs calibrated ranges, and there are none; add calibration.data")
        return degenerate(site.activation, ranges)
    return None


def _quantize_rest(
    other_sites: Sequence[tuple[Site, str]],
    graph: ModelProto,
    form: BlockFormat,
    overrides: Mapping[str, OverridePrecision],
    ranges: Ranges | None,
) -> tuple[tuple[FloatNode, ...], list[FloatNode]]:
    """The nodes that get Q/DQ in fp8 or int8, in place, and those that stay in float."""
    eight_bit_nodes, float_nodes = list[FloatNode](), list[FloatNode]()
    for grid in ("fp8", "int8"):
        insertion = Insertion(graph, GRIDS[grid])  # the second one knows the names that the first one added
        for site, reason in other_sites:
            node, is_wide = FloatNode(site.node, site.op_type, reason), overrides.get(site.node) in ("fp32", "fp16")
            if _rest_grid(site.node, overrides) != grid:
                continue
            if is_wide or not form.activations or ranges is None or degenerate(site.activation, ranges):
                float_nodes.append(node)
                continue
            insertion.read(site.node, 0, *ranges.tensors[site.activation])
            scales = weight_scales(insertion, site.node, site.axis)
            insertion.weight(site.node, site.axis, scales, pair=grid == "int8")  # as `qdq` writes both
            eight_bit_nodes.append(node)
    return tuple(eight_bit_nodes), float_nodes


def _rest_grid(node: str, overrides: Mapping[str, OverridePrecision]) -> Literal["fp8", "int8"]:
    return "int8" if overrides.get(node) == "int8" else "fp8"


def _as_product(site: Site, insertion: Insertion) -> Floats:
    """Turn a node into a MatMul, with an Add for its bias, in place; return its weight [depth, channels].

    With scales along the channels, or a Gemm, TensorRT-RTX's engines are 1.4 times as large (measured on a layer of
    256 x 128).
    """
    node = insertion.by_name[site.node]
    values = to_array(insertion.initializers[site.weight]).astype(np.float32)
    values = np.ascontiguousarray(values.T if site.axis == 0 else values) * np.float32(attribute_of(node, "alpha", 1.0))
    if node.op_type == "Gemm":
        bias_name, result = (node.input[2] if len(node.input) > 2 else ""), node.output[0]
        node.op_type = "MatMul"
        del node.attribute[:], node.input[2:]
        if bias_name:
            node.output[0] = f"{result}/product"
            name = f"{site.node}/bias"
            insertion.graph.node.append(helper.make_node("Add", [node.output[0], bias_name], [result], name=name))
    node.input[1] = insertion.constant(values, f"{site.weight}_float")
    return values


class _Writer:
    """Puts block formats into a finished graph, in place. forms: by node.  amax: of its activation, if known."""

    def __init__(self, model: ModelProto, forms: Mapping[str, BlockFormat], amax: Mapping[str, float | None]) -> None:
        self.model, self.forms, self.amax = model, forms, amax
        self.types = element_types(model)
        self.dequantized: dict[str, str] = {}
        self.nodes: list[NodeProto] = []

    def write(self, weights: Mapping[str, Floats]) -> None:
        """Connect the nodes with these names to a stored weight [depth, channels] and to dequantized activations."""
        graph = self.model.graph
        for node in graph.node:
            if node.name in weights:
                is_half = self.types[node.input[0]] == TensorProto.FLOAT16
                name, form = f"{node.name}/weight", self.forms[node.name]
                codes, scales, tensor_scale = form.encode(weights[node.name])
                operands = [self._constant(f"{name}_codes", codes), self._constant(f"{name}_scales", scales)]
                node.input[1] = self._dequantize(form, operands, tensor_scale, name, 0, is_half)
                if form.activations:
                    node.input[0] = self._activation(form, node.input[0], self.amax[node.name], is_half)
        graph.node.extend(self.nodes)
        drop_unread(graph)
        sort_nodes(graph)
        if any(node.domain == "trt" for node in self.nodes):
            self.model.opset_import.append(helper.make_opsetid("trt", 1))

    def _activation(self, form: BlockFormat, name: str, reach: float | None, half: bool) -> str:
        if name not in self.dequantized:
            outputs, attrs = [f"{name}/codes", f"{name}/scales"], {"axis": -1, "block_size": form.block}
            tensor_scale = activation_scale(reach or 1)
            if form.four_bits:
                inputs = [name, self._constant(f"{name}/global", np.array(tensor_scale))]
                self._add("TRT_FP4DynamicQuantize", inputs, outputs, scale_type=TensorProto.FLOAT8E4M3FN, **attrs)
            else:
                self._add("TRT_MXFP8DynamicQuantize", [name], outputs, output_dtype=TensorProto.FLOAT8E4M3FN, **attrs)
            self.dequantized[name] = self._dequantize(form, outputs, tensor_scale, f"{name}/blocks", -1, half)
        return self.dequantized[name]

    def _dequantize(
        self, form: BlockFormat, parts: list[str], scale: np.float32, name: str, axis: int, half: bool
    ) -> str:
        """The dequantized tensor of codes and scales."""
        dtype, attrs = TensorProto.FLOAT16 if half else TensorProto.FLOAT, {"axis": axis, "block_size": form.block}
        result_name = f"{name}_dequantized"
        if not form.four_bits:
            self._add("TRT_MXFP8DequantizeLinear", parts, [result_name], output_dtype=dtype, **attrs)
            return result_name
        scales_name = f"{name}_scales_dequantized"
        self._add("DequantizeLinear", [parts[1], self._constant(f"{name}_global", np.array(scale))], [scales_name])
        if half:
            self._add("Cast", [scales_name], [f"{scales_name}_fp16"], to=dtype)
        self._add(
            "DequantizeLinear", [parts[0], f"{scales_name}_fp16" if half else scales_name], [result_name], **attrs
        )
        return result_name

    def _constant(self, name: str, values: Array) -> str:
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(values, order="C"), name))
        return name

    def _add(self, op_type: str, inputs: list[str], outputs: list[str], **attributes: int) -> None:
        domain = "trt" if op_type.startswith("TRT_") else ""
        name = f"{op_type}/{outputs[0]}"
        node = helper.make_node(op_type, inputs, outputs, name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)


# TensorRT's dynamic quantization and the dequantization behind it, in standard operators. split, whole: the shapes of
# blocks and of the tensor.
_TWINS = f"""
<domain: "twin", opset_import: ["": {LOWEST_OPSET}]>
Nvfp4 (x, scale, split, whole) => (y) {{
  blocks = Reshape(x, split)
  sizes = Abs(blocks)
  axis = Constant<value_ints=[-1]>()
  reach = ReduceMax(sizes, axis)
  six = Constant<value_float=6.0>()
  by_six = Div(reach, six)
  over = Div(by_six, scale)
  code = Cast<to=17>(over)
  stored = Cast<to=1>(code)
  scales = Mul(stored, scale)
  least = Constant<value_float=1.1754944e-38>()
  divisors = Max(scales, least)
  raw = Div(sizes, divisors)
  ratio = Min(raw, six)
  half = Constant<value_float=0.5>()
  one = Constant<value_float=1.0>()
  two = Constant<value_float=2.0>()
  four = Constant<value_float=4.0>()
  below_two = Less(ratio, two)
  below_four = Less(ratio, four)
  wide = Where(below_four, one, two)
  steps = Where(below_two, half, wide)
  counts = Div(ratio, steps)
  whole_counts = Round(counts)
  on_grid = Mul(whole_counts, steps)
  signs = Sign(blocks)
  signed = Mul(on_grid, signs)
  result = Mul(signed, scales)
  y = Reshape(result, whole)
}}
"""
_MX_TWIN = f"""
<domain: "twin", opset_import: ["": {LOWEST_OPSET}]>
Mxfp8 (x, powers, split, whole) => (y) {{
  blocks = Reshape(x, split)
  sizes = Abs(blocks)
  axis = Constant<value_ints=[-1]>()
  reach = ReduceMax(sizes, axis)
  largest = Constant<value_float=448.0>()
  over = Div(reach, largest)
  nature = Log(over)
  two = Constant<value_float=0.6931471805599453>()
  binary = Div(nature, two)
  near = Round(binary)
  bottom = Constant<value_float=-127.0>()
  top = Constant<value_float=126.0>()
  bounded = Clip(near, bottom, top)
  bias = Constant<value_float=127.0>()
  place = Add(bounded, bias)
  first = Cast<to=7>(place)
  power = Gather(powers, first)
  holds = Mul(power, largest)
  small = Less(holds, reach)
  one = Constant<value_int=1>()
  above = Add(first, one)
  index = Where(small, above, first)
  scales = Gather(powers, index)
  ratio = Div(blocks, scales)
  codes = Cast<to=17>(ratio)
  stored = Cast<to=1>(codes)
  result = Mul(stored, scales)
  y = Reshape(result, whole)
}}
"""


def needs_blocks_emulated(model: ModelProto) -> bool:
    """Whether a graph has what `emulate_blocks` rewrites."""
    data_types = (tensor.data_type for tensor in model.graph.initializer)
    return TensorProto.FLOAT4E2M1 in data_types or any(entry.domain == "trt" for entry in model.opset_import)


def emulate_blocks(model: ModelProto) -> ModelProto:
    """A graph of standard operators, for ONNX Runtime, that computes the same as a graph of `quantize_blocks`."""
    twin = ModelProto()
    twin.CopyFrom(model)
    _Twin(twin).rewrite()
    return inline_local_functions(twin)


class _Twin:
    """Rewrites a graph in place: stored weights become their values, and dynamic quantization standard operators."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self.shapes = {
            value.name: value.type.tensor_type.shape for value in (*self.graph.value_info, *self.graph.input)
        }

    def rewrite(self) -> None:
        nodes = list[NodeProto]()
        for node in self.graph.node:
            producer = self.makers.get(node.input[0]) if node.op_type.endswith("DequantizeLinear") else None
            if node.domain == "trt" and node.op_type.endswith("DynamicQuantize"):
                continue
            if producer is not None and producer.domain == "trt":
                if node.input[0] == producer.output[0]:  # else these are the scales, which the twin computes itself
                    nodes += self._dynamic(node, producer)
            elif not self._stored(node):
                nodes.append(node)
        live_names = {value.name for value in self.graph.output}
        for node in reversed(nodes):
            if live_names.intersection(node.output):
                live_names.update(node.input)
        set_items(self.graph.node, [node for node in nodes if live_names.intersection(node.output)])
        drop_unread(self.graph)
        sources = (_TWINS, _MX_TWIN) if any(node.domain == "twin" for node in nodes) else ()
        self.model.functions.extend(parser.parse_function(text) for text in sources)
        imports = [entry for entry in self.model.opset_import if entry.domain != "trt"]
        set_items(self.model.opset_import, [*imports, *([helper.make_opsetid("twin", 1)] if sources else [])])

    def _stored(self, node: NodeProto) -> bool:
        """Whether a node dequantizes a stored weight in blocks; if so, add the values as a constant with its result's
        name."""
        codes, block_size = self.initializers.get(node.input[0]), attribute_of(node, "block_size", 0)
        is_fp4 = codes is not None and codes.data_type == TensorProto.FLOAT4E2M1
        if codes is None or not block_size or not (is_fp4 or node.domain == "trt"):
            return False
        block_format = FORMATS["nvfp4" if is_fp4 else "mxfp8"]
        dtype = attribute_of(node, "output_dtype", 0)
        scale = None
        scales_name = node.input[1]
        if is_fp4:
            dtype, producer = TensorProto.FLOAT, self.makers[scales_name]
            if producer.op_type == "Cast":
                dtype, producer = TensorProto.FLOAT16, self.makers[producer.input[0]]
            scales_name, scale = producer.input[0], to_array(self.initializers[producer.input[1]])
        values = block_format.decode(
            to_array(codes), to_array(self.initializers[scales_name]), np.float32(1 if scale is None else scale)
        )
        float_values = values.astype(np.float16 if dtype == TensorProto.FLOAT16 else np.float32)
        self.graph.initializer.append(numpy_helper.from_array(float_values, node.output[0]))
        return True

    def _dynamic(self, node: NodeProto, maker: NodeProto) -> list[NodeProto]:
        """The nodes that replace an activation's dynamic quantization and its dequantization `node`."""
        source, result = maker.input[0], node.output[0]
        block_size = attribute_of(maker, "block_size", 0)
        leading_zeros = [0] * (len(self.shapes[source].dim) - 1)  # 0: unchanged
        split_name = self._constant(f"{result}/split", np.array([*leading_zeros, -1, block_size], np.int64))
        full_shape = self._constant(f"{result}/whole", np.array([*leading_zeros, -1], np.int64))
        is_fp4 = maker.op_type == "TRT_FP4DynamicQuantize"
        powers = powers_of(np.arange(-_BIAS, _BIAS + 1, dtype=np.int32))
        scale = maker.input[1] if is_fp4 else self._constant(f"{result}/powers", powers)
        float_name, blocks_name = f"{result}/fp32", f"{result}/blocks"
        op_type = "Nvfp4" if is_fp4 else "Mxfp8"
        return [  # where `source` is fp32 already, the casts change nothing
            helper.make_node("Cast", [source], [float_name], name=float_name, to=TensorProto.FLOAT),
            helper.make_node(
                op_type, [float_name, scale, split_name, full_shape], [blocks_name], name=blocks_name, domain="twin"
            ),
            helper.make_node("CastLike", [blocks_name, source], [result], name=result),
        ]

    def _constant(self, name: str, values: Array) -> str:
        self.graph.initializer.append(numpy_helper.from_array(values, name))
        return name
