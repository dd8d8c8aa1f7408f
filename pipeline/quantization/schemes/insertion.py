"""Q/DQ nodes: the grids that they round to, and `Insertion`, which puts them into a graph.

Each reader of a tensor is rewired separately, so nodes that are not quantized still read the exact values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from builders.onnx_graphs.weights import find_external, from_array, to_array
from enginesmith.arrays import Array
from pipeline.quantization.graph import constants, unused_name

# Scales below the smallest normal float32 become zero in kernels that flush subnormal numbers.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """A number format. highest: the largest number used; the lowest is -highest on a symmetric grid, else 0."""

    name: str
    element_type: int
    dtype: np.dtype
    highest: float
    symmetric: bool = True

    def scale(self, low: float, high: float) -> tuple[float, int]:
        """(scale, zero point) of one tensor for the range low..high; zero is always exactly on the grid."""
        if self.symmetric:
            return max(max(abs(low), abs(high)) / self.highest, SMALLEST_SCALE), 0
        low, high = min(low, 0.0), max(high, 0.0)
        scale = max((high - low) / self.highest, SMALLEST_SCALE)
        return scale, int(np.clip(round(-low / scale), 0, self.highest))

    def scales(self, values: Array, axis: int) -> NDArray[np.float32]:
        """Symmetric scales [channels] for values with channels along `axis`: the largest magnitude of each becomes
        `highest`; 0 for a channel of zeros."""
        other_axes = tuple(i for i in range(values.ndim) if i != axis)
        amax = np.abs(values.astype(np.float64)).max(axis=other_axes)
        scales: NDArray[np.float32] = np.maximum(amax / self.highest, SMALLEST_SCALE * (amax > 0)).astype(np.float32)
        return scales

    def rounded(self, values: Array, scales: Array, axis: int) -> Array:
        """The values divided by scales [channels] along `axis`, in the grid's dtype; to nearest even, as in ONNX."""
        shape = [-1 if i == axis else 1 for i in range(values.ndim)]
        scaled_values = values.astype(np.float64) / scales.astype(np.float64).reshape(shape)
        if self.dtype.kind == "i":
            scaled_values = np.rint(scaled_values)
        return np.clip(scaled_values, -self.highest, self.highest).astype(np.float32).astype(self.dtype)


GRIDS: Mapping[str, Grid] = {
    "int8": Grid("int8", TensorProto.INT8, np.dtype(np.int8), 127),
    "uint8": Grid("uint8", TensorProto.UINT8, np.dtype(np.uint8), 255, symmetric=False),
    # e4m3 without infinities: 448 is the largest number.
    "fp8": Grid("fp8", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), 448),
}


class Insertion:
    """Adds Q/DQ to a tidy graph in place; the nodes must be sorted afterwards (`graph.finish`).

    grid: of activations.  levels: the largest magnitude of int8 weights.  scales: of the tensors that have a pair.
    Each tensor gets one pair for all nodes that read it.
    """

    def __init__(self, model: ModelProto, grid: Grid, levels: int = 127) -> None:
        self.graph: GraphProto = model.graph
        self.grid = grid
        self.weight_grid = grid if grid.name == "fp8" else replace(GRIDS["int8"], highest=levels)
        self.initializers = constants(model.graph)
        self._outside = find_external(model.graph)
        self.by_name = {node.name: node for node in model.graph.node}
        self.scales: dict[str, float] = {}
        self._pairs: dict[str, str] = {}
        self._stored: dict[tuple[str, ...], str] = {}
        self._taken = {name for node in model.graph.node for name in (node.name, *node.input, *node.output)}
        self._taken |= self.initializers.keys()

    def read(self, node: str, index: int, low: float, high: float) -> float:
        """Let input `index` of a node read its tensor through a pair for the range low..high; returns the scale."""
        reader = self.by_name[node]
        tensor = reader.input[index]
        if tensor not in self.scales:
            self._pairs[tensor] = self._pair(tensor, unused_name(f"{tensor}_dequantized", self._taken), low, high)
        reader.input[index] = self._pairs.get(tensor, tensor)
        return self.scales[tensor]

    def write(self, maker: str, tensor: str, low: float, high: float) -> None:
        """Put a pair behind a tensor, for all its readers: the pair's result gets the tensor's name.

        maker: the node whose kernel writes the tensor: its producer, or the node before a removed Relu (`fold`).
        """
        exact_name = unused_name(f"{tensor}_exact", self._taken)
        self.by_name[maker].output[0] = exact_name
        self._pair(exact_name, tensor, low, high)
        self.scales[tensor] = self.scales.pop(exact_name)

    def fold(self, node: str) -> None:
        """Remove a node that saturation replaces; `write` must then be called for its output."""
        self.graph.node.remove(self.by_name.pop(node))

    def weight(self, node_name: str, axis: int, scales: NDArray[np.float32], pair: bool) -> None:
        """Quantize a node's constant weight with scales [channels] along `axis`.

        pair: keep the float weight and put QuantizeLinear and DequantizeLinear behind it; else store it quantized.
        """
        reader, grid = self.by_name[node_name], self.weight_grid
        name, key = reader.input[1], (reader.input[1], str(axis), str(pair), scales.tobytes().hex())
        if key not in self._stored:
            scale_name = self.constant(scales, f"{name}_scale")
            zero = self.constant(np.zeros(scales.shape, grid.dtype), f"{name}_zero_point")
            values = to_array(self.initializers[name])
            source = name if pair else self.constant(grid.rounded(values, scales, axis), f"{name}_{grid.name}")
            if pair:
                source = self._add("QuantizeLinear", [name, scale_name, zero], f"{name}_quantized", axis=axis)
            self._stored[key] = self._add(
                "DequantizeLinear", [source, scale_name, zero], f"{name}_dequantized", axis=axis
            )
        reader.input[1] = self._stored[key]

    def bias(self, node: str, scales: NDArray[np.float32]) -> None:
        """Store a node's constant bias as int32. scales: [channels], of the accumulator (activation times weight)."""
        reader = self.by_name[node]
        values = to_array(self.initializers[reader.input[2]]).astype(np.float64)
        limits = np.iinfo(np.int32)
        codes = np.clip(np.rint(values / scales.astype(np.float64)), limits.min, limits.max).astype(np.int32)
        inputs = [self.constant(codes, f"{reader.input[2]}_int32"), self.constant(scales, f"{reader.input[2]}_scale")]
        inputs.append(self.constant(np.zeros(scales.shape, np.int32), f"{reader.input[2]}_zero_point"))
        reader.input[2] = self._add("DequantizeLinear", inputs, f"{reader.input[2]}_dequantized", axis=0)

    def constant(self, values: Array, name: str) -> str:
        """Add an initializer with this name or, if it is taken, a similar one; return the name."""
        new_name = unused_name(name, self._taken)
        self.graph.initializer.append(from_array(np.asarray(values, order="C"), new_name, self._outside))
        return new_name

    def _pair(self, tensor: str, result: str, low: float, high: float) -> str:
        scale, zero = self.grid.scale(low, high)
        self.scales[tensor] = scale
        grid_inputs = [
            self.constant(np.array(scale, np.float32), f"{tensor}_scale"),
            self.constant(np.array(zero, np.float32).astype(self.grid.dtype), f"{tensor}_zero_point"),
        ]
        quantized_name = self._add("QuantizeLinear", [tensor, *grid_inputs], f"{tensor}_quantized")
        return self._add("DequantizeLinear", [quantized_name, *grid_inputs], result, fixed=True)

    def _add(self, op_type: str, inputs: list[str], result: str, fixed: bool = False, **attributes: Any) -> str:
        output = result if fixed else unused_name(result, self._taken)
        node: NodeProto = helper.make_node(op_type, inputs, [output], name=f"{op_type}/{output}", **attributes)
        self.graph.node.append(node)
        return output


def weight_scales(insertion: Insertion, node: str, axis: int) -> NDArray[np.float32]:
    """Scales [channels] of a node's weight along `axis`; a channel of zeros gets the smallest of the others."""
    values = to_array(insertion.initializers[insertion.by_name[node].input[1]])
    scales = insertion.weight_grid.scales(values, axis)
    min_scale = scales[scales > 0].min(initial=np.float32(1.0))
    return np.where(scales > 0, scales, min_scale).astype(np.float32)


def widened_for_bias(scales: NDArray[np.float32], bias: Array, activation_scale: float) -> NDArray[np.float32]:
    """Weight scales large enough for each bias to fit an int32 on the accumulator's grid, with a factor 2 to spare."""
    needed_scale = np.abs(bias.astype(np.float64)) / (activation_scale * 2.0**30)
    return np.maximum(np.maximum(scales, needed_scale), SMALLEST_SCALE).astype(np.float32)


def has_quantizable_bias(node: NodeProto, initializers: dict[str, TensorProto], channels: int) -> bool:
    """Whether the bias is a float constant with one value per output channel."""
    bias = initializers.get(node.input[2]) if len(node.input) > 2 else None
    return bias is not None and list(bias.dims) == [channels] and bias.data_type == TensorProto.FLOAT
