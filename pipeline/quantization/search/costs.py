"""The modelled time and bytes of a model with some products in narrow formats: a roofline of peak rates.

Nodes that a compiler would fuse are one kernel (`validation.latency.roofline.breakdown.greedy_groups`). A kernel takes
the longer of its operations at the peak rate of their format and of its bytes at the peak bandwidth (Williams, Waterman
& Patterson, "Roofline", CACM 52, 2009). So times are too short; only their quotients are used (`rates.ERROR`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, TensorProto
from onnx.shape_inference import InferenceError

from enginesmith.core.types import Shape
from pipeline.quantization.graph import infer_at
from pipeline.quantization.search.rates import PEAKS, PRODUCT_FORMATS, FloatPrecision, Peaks
from pipeline.values import ModelledFigures
from validation.latency.roofline.breakdown import greedy_groups
from validation.latency.roofline.costs import GraphNode, count


@dataclass(frozen=True)
class _Kernel:
    """Fused nodes. products: operations of the nodes with products, by name.  others: operations of the other nodes.
    traffic: bytes in the model, by tensor, that are read from outside or written for outside."""

    products: Mapping[str, int]
    others: int
    traffic: Mapping[str, int]


@dataclass(frozen=True)
class CostModel:
    """Costs of a float model at fixed input sizes. Formats of products are precisions, by node name.

    weights: bytes of the constants, by name.  readers: names of the nodes that read a tensor.
    """

    kernels: tuple[_Kernel, ...]
    weights: Mapping[str, int]
    readers: Mapping[str, set[str]]

    @classmethod
    def of(cls, model: ModelProto, shapes: Mapping[str, Shape]) -> "CostModel | None":
        """The costs of a prepared float model; None if its shapes contradict `shapes`, those of its inputs."""
        try:
            graph = count(infer_at(model, shapes).graph)
        except (InferenceError, ValueError):
            return None
        readers: dict[str, set[str]] = {}
        for node in graph.nodes:
            for name in node.reads:
                readers.setdefault(name, set()).add(node.cost.name)
        floats = (tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT)
        weights = {tensor.name: 4 * math.prod(tensor.dims) for tensor in floats}
        kernels = tuple(_fuse(group, readers, graph.outputs) for group in greedy_groups(graph))
        return cls(kernels, weights, readers)

    def estimate_ms(self, formats: Mapping[str, str], peaks: Peaks) -> float:
        """Milliseconds of a run."""
        total_s = 0.0
        for kernel in self.kernels:
            rates = {name: peaks.rate(formats.get(name)) for name in kernel.products}
            busy_s = kernel.others / peaks.rate(None)
            busy_s += sum(operations / rates[name] for name, operations in kernel.products.items())
            moved_bytes = sum(size * self._share(name, formats, peaks.floats) for name, size in kernel.traffic.items())
            total_s += max(busy_s, moved_bytes / peaks.bytes_per_s) + peaks.node_s
        return 1e3 * total_s

    def weight_bytes(self, formats: Mapping[str, str], floats: FloatPrecision) -> int:
        """Bytes of all weights."""
        return round(sum(size * self._share(name, formats, floats) for name, size in self.weights.items()))

    def _share(self, tensor: str, formats: Mapping[str, str], floats: FloatPrecision) -> float:
        """A tensor's bytes divided by its bytes in fp32: less than 1 if all its readers have a narrower format."""
        float_bits = 32 if floats == "fp32" else 16
        reader_formats = [formats.get(name) for name in self.readers.get(tensor, ())] or [None]
        index = 0 if tensor in self.weights else 1
        return max((PRODUCT_FORMATS[name][index] if name else None) or float_bits for name in reader_formats) / 32


def _fuse(group: Sequence[GraphNode], readers: Mapping[str, set[str]], outputs: Sequence[str]) -> _Kernel:
    node_names = {node.cost.name for node in group}
    made_bytes = {name: size for node in group for name, size in node.makes.items()}
    traffic = {name: size for node in group for name, size in node.reads.items() if name not in made_bytes}
    traffic |= {
        name: size for name, size in made_bytes.items() if name in outputs or readers.get(name, set()) - node_names
    }
    products = {node.cost.name: node.cost.operations for node in group if node.cost.macs}
    others = sum(node.cost.operations for node in group if not node.cost.macs)
    return _Kernel(products, others, traffic if any(node.cost.moved_bytes for node in group) else {})


def model_graph(
    model: ModelProto, shapes: Mapping[str, Shape], formats: Mapping[str, str], floats: FloatPrecision
) -> dict[str, ModelledFigures]:
    """`Graph.modelled` of a prepared float model with some nodes in `formats`, and its other nodes in floats; {} if its
    shapes contradict `shapes`, those of its inputs."""
    if (costs := CostModel.of(model, shapes)) is None:
        return {}
    variants: list[tuple[Mapping[str, str], FloatPrecision]] = [(formats, floats), ({}, "fp32"), ({}, "fp16")]
    weight_bytes = ModelledFigures(*(costs.weight_bytes(narrow, rest) for narrow, rest in variants))
    return {"bytes": weight_bytes} | {
        name: ModelledFigures(*(costs.estimate_ms(narrow, peaks.with_floats(rest)) for narrow, rest in variants))
        for name, peaks in PEAKS.items()
    }
