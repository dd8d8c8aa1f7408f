"""int8-dynamic: int8 weights, and activations quantized while the model runs, by the range that each run shows.

It needs no calibration, and an outlier costs only the run that has it. In exchange each activation is read twice, and
a result depends on what shares its batch. onnxruntime fuses the pattern into one kernel (DynamicQuantizeMatMul). Only
MatMul and Gemm: its ConvInteger is slower than a float convolution (measured by its authors and by us).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from enginery.core.reports.quantization import FloatNode
from pipeline.quantization.graph import attribute_of, finish
from pipeline.quantization.insertion_points import Site, find_sites, prepare_model
from pipeline.quantization.notes import QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.insertion import GRIDS, Insertion, weight_scales
from pipeline.quantization.schemes.overrides import OverridePrecision, find_override
from pipeline.quantization.schemes.qdq import LARGEST_REACH, carries_qdq

OP_TYPES = ("Gemm", "MatMul")


def quantize_dynamic(
    model: ModelProto,
    overrides: Mapping[str, OverridePrecision] | None = None,
    ranges: Ranges | None = None,
    levels: int = 127,
) -> tuple[ModelProto, QuantizationNotes]:
    """The model with its weighted MatMuls and Gemms in integers, scaled at run time.

    ranges: where they are at hand, activations that reach as far as a mask leave their node in float.
    levels: the largest magnitude of the int8 weights.
    """
    if carries_qdq(model):
        return model, QuantizationNotes(passed_through=True)
    graph = prepare_model(model)
    sites, kept = find_sites(graph)
    rewrite, done, left = _DynamicRewrite(graph, levels), [], list(kept)
    for site in sites:
        if reason := _obstacle(site, rewrite, overrides or {}, ranges):
            left.append(FloatNode(site.node, site.op_type, reason))
        else:
            rewrite.replace(site)
            done.append(site.node)
    return finish(graph), QuantizationNotes(tuple(done), tuple(left), precision="int8, scaled at run time")


def _obstacle(
    site: Site, rewrite: "_DynamicRewrite", overrides: Mapping[str, OverridePrecision], ranges: Ranges | None
) -> str | None:
    if reason := find_override(site.node, overrides):
        return reason
    if site.op_type not in OP_TYPES:
        return "run-time scales are for MatMul and Gemm"
    if attribute_of(rewrite.insertion.by_name[site.node], "transA", 0):
        return "its activation is transposed"
    reach = ranges.reach(site.activation) if ranges else None
    if reach is not None and reach >= LARGEST_REACH:
        return f"tensor {site.activation!r} reaches {reach:g}, as a mask does"
    return None


class _DynamicRewrite:
    """Replaces sites by integer arithmetic; each activation is quantized once for all that read it."""

    def __init__(self, model: ModelProto, levels: int) -> None:
        self.graph = model.graph
        self.insertion = Insertion(model, GRIDS["int8"], levels)
        self._quantized: dict[str, list[str]] = {}

    def replace(self, site: Site) -> None:
        """x W (+ b) becomes (quantized x) (int8 W) times both scales (+ b)."""
        node = self.insertion.by_name[site.node]
        quantized, scale, zero = self._activation(site.activation)
        weight, weight_zero, factors = self._weight(site)
        product = self._add("MatMulInteger", [quantized, weight, zero, weight_zero], site.node)
        floats = self._add("Cast", [product], site.node, to=TensorProto.FLOAT)
        both = self._add("Mul", [scale, factors], f"{site.node}/scales")
        bias = node.input[2] if len(node.input) > 2 else ""
        result = node.output[0]
        self.graph.node.remove(self.insertion.by_name.pop(site.node))
        scaled = self._add("Mul", [floats, both], site.node, result="" if bias else result)
        if bias:
            self._add("Add", [scaled, bias], site.node, result=result)

    def _activation(self, tensor: str) -> list[str]:
        if tensor not in self._quantized:
            names = [f"{tensor}/{part}" for part in ("quantized", "scale", "zero_point")]
            self.graph.node.append(
                helper.make_node("DynamicQuantizeLinear", [tensor], names, name=f"DynamicQuantizeLinear/{tensor}")
            )
            self._quantized[tensor] = names
        return self._quantized[tensor]

    def _weight(self, site: Site) -> tuple[str, str, str]:
        """Names of the int8 weight [depth, channels], its zero point, and its scales times Gemm's alpha."""
        insertion, node = self.insertion, self.insertion.by_name[site.node]
        scales = weight_scales(insertion, site.node, site.axis)
        float_values = numpy_helper.to_array(insertion.given[site.weight])
        values = insertion.weight_grid.rounded(float_values, scales, site.axis)
        alpha = attribute_of(node, "alpha", 1.0)
        return (
            insertion.constant(values.T if site.axis == 0 else values, f"{site.weight}_int8"),
            insertion.constant(np.zeros(scales.shape, np.int8), f"{site.weight}_zero_point"),
            insertion.constant(scales * np.float32(alpha), f"{site.weight}_scale"),
        )

    def _add(self, op_type: str, inputs: list[str], stem: str, result: str = "", **attributes: Any) -> str:
        output = result or f"{stem}/{op_type}"
        self.graph.node.append(helper.make_node(op_type, inputs, [output], name=f"{stem}/{op_type}", **attributes))
        return output
