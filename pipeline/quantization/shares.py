"""The share of a model's multiplications with weights that is in a narrow format.

An engine with less than a tenth (`ranges.LEAST_SHARE`) is refused. Only products by a constant, or by a value that is
computed from constants alone, count: of convolutions, matrices and recurrent layers, in the main graph and in the
bodies of If (the larger branch), Loop and Scan (each iteration; one if their number is unknown). Products of two
activations do not count: no scheme here quantizes them.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from onnx import GraphProto, ModelProto, NodeProto, helper, shape_inference

from builders.onnx_graphs.bodies import list_bodies, list_captured
from builders.onnx_graphs.weights import to_array
from enginesmith.core.types import Shape
from pipeline.quantization.graph import attribute_of, constants, infer_at, shapes_of
from pipeline.quantization.insertion_points import INTEGER_OPS
from pipeline.values import ModelShapes
from validation.latency.measurement.loop import tuned_for
from validation.latency.roofline.costs import (
    CONVOLUTIONS,
    PRODUCTS,
    RECURRENT,
    TRANSPOSED_CONVOLUTIONS,
    multiplications,
    per_value,
)

_WEIGHTED = {**CONVOLUTIONS, **TRANSPOSED_CONVOLUTIONS, **PRODUCTS}
_RECURRENT = (*RECURRENT, "DynamicQuantizeLSTM")
# Operators that move or convert a weight between its storage and its node.
_MOVING = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def narrow_share(
    model: ModelProto,
    node_names: Collection[str],
    inputs: Mapping[str, Shape],
    elements: Mapping[str, float] | None = None,
) -> float | None:
    """The share of the multiplications with weights that are narrow: those of the nodes `node_names`, and those that
    are narrow in the source model; None for a model without such multiplications.

    inputs: shapes of the inputs.  elements: average size of tensors in samples; other sizes follow from `inputs`.
    """
    counts = count_multiplications(model, inputs, elements or {})
    total, narrow_nodes = sum(counts.values()), find_own_narrow(model.graph)
    narrow_count = sum(count for name, count in counts.items() if name in narrow_nodes or name in node_names)
    return narrow_count / total if total else None


def sizes_at(shapes: ModelShapes) -> dict[str, Shape]:
    """Shapes of the inputs at the sizes that the model is tuned for."""
    tuned_sizes = tuned_for(shapes.dims)
    return {spec.name: spec.at(tuned_sizes) for spec in shapes.inputs}


def find_own_narrow(graph: GraphProto) -> set[str]:
    """Names of the nodes of a main graph that multiply in 8 bits or fewer in the source model: by a dequantized weight,
    in a model that rounds activations too, or in integers."""
    producers = {name: node for node in graph.node for name in node.output}
    has_rounding = any(node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in graph.node)
    narrow_nodes = {node.name for node in graph.node if node.op_type in INTEGER_OPS}
    for node in graph.node if has_rounding else ():
        producer = producers.get(node.input[1]) if node.op_type in _WEIGHTED and len(node.input) > 1 else None
        while producer is not None and producer.op_type in _MOVING:
            producer = producers.get(producer.input[0])
        if producer is not None and producer.op_type == "DequantizeLinear":
            narrow_nodes.add(node.name)
    return narrow_nodes


def count_multiplications(
    model: ModelProto, inputs: Mapping[str, Shape], elements: Mapping[str, float]
) -> dict[str, float]:
    """Multiplications with weights in a run, by node of the main graph; control flow counts those of its bodies."""
    inferred_shapes, initializers = _infer(model, inputs), constants(model.graph)
    graph = inferred_shapes.graph
    shapes = shapes_of(graph) | {name: tuple(tensor.dims) for name, tensor in initializers.items()}
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    kinds |= {name: tensor.data_type for name, tensor in initializers.items()}
    shared_names = [name for name in elements if name in shapes and 0 not in shapes[name]]
    input_count = sum(math.prod(shapes[name]) for name in shared_names)
    scale = sum(elements[name] for name in shared_names) / input_count if input_count else 1.0
    trips = {
        name: int(to_array(tensor))
        for name, tensor in initializers.items()
        if tensor.data_type == 7 and not tensor.dims
    }
    scope = _Scope(inferred_shapes, shapes, kinds, frozenset(_list_fixed(graph, initializers)), elements, scale, trips)
    return {node.name: count for node in graph.node if (count := scope.count(node))}


def _infer(model: ModelProto, inputs: Mapping[str, Shape]) -> ModelProto:
    """The result of `infer_at`; the model itself, with its stated shapes, if they contradict these sizes."""
    try:
        return infer_at(model, inputs)
    except (shape_inference.InferenceError, ValueError):
        return model


def _list_fixed(graph: GraphProto, names: Collection[str]) -> Iterator[str]:
    """These names, and all names of a graph that depend on them alone."""
    fixed_names = set(names)
    yield from fixed_names
    for node in graph.node:
        if (
            not list_bodies(node)
            and not node.op_type.startswith("Random")
            and fixed_names.issuperset(filter(None, node.input))
        ):
            fixed_names.update(node.output)
            yield from node.output


@dataclass(frozen=True)
class _Scope:
    """The tensors that a graph can read. model: of the graph.  kinds: element types.  fixed: names that depend on
    constants alone.  elements: measured sizes of tensors; other sizes are `scale` times that of their shape.
    trips: integer constants by name."""

    model: ModelProto
    shapes: Mapping[str, Shape]
    kinds: Mapping[str, int]
    fixed: frozenset[str]
    elements: Mapping[str, float]
    scale: float
    trips: Mapping[str, int]

    def count(self, node: NodeProto) -> float:
        """The number of a node's multiplications with weights in a run."""
        if bodies := list_bodies(node):
            body_counts = [self._count_body(self._infer_loop(node, body)) for body in bodies]
            return max(body_counts) if node.op_type == "If" else self._iterations(node, bodies[0]) * sum(body_counts)
        fixed_names = [name for name in node.input if name in self.fixed and self.shapes.get(name)]
        if not fixed_names or all(name in self.fixed for name in node.input if name):
            return 0.0
        if node.op_type in _RECURRENT:
            return self._count_recurrent(node)
        weight_inputs = node.input[_WEIGHTED[node.op_type] :][:1] if node.op_type in _WEIGHTED else []
        weight = weight_inputs[0] if weight_inputs and weight_inputs[0] in fixed_names else fixed_names[0]
        dims = self.shapes[weight]
        if node.op_type in _WEIGHTED:
            value_count = self._values(node.input[0] if node.op_type in TRANSPOSED_CONVOLUTIONS else node.output[0])
            is_transposed = bool(attribute_of(node, "transB", 0)) or weight == node.input[0]
            return (
                math.prod(dims) if value_count is None else value_count * per_value(node.op_type, dims, is_transposed)
            )
        input_shapes = [self.shapes.get(name) for name in node.input]
        output_shapes = [self.shapes[name] for name in node.output if name in self.shapes]
        product_count = multiplications(
            node.op_type, input_shapes, output_shapes, attribute_of(node, "equation", b"").decode()
        )
        return 0.0 if product_count is None else product_count * self.scale or math.prod(dims)

    def _count_recurrent(self, node: NodeProto) -> float:
        """The number of multiplications: both weights, in each step of each sequence."""
        weight_shapes = [self.shapes[name] for name in node.input[1:3] if name in self.fixed]
        width = weight_shapes[0][1 if node.op_type == "DynamicQuantizeLSTM" else -1] if weight_shapes else 0
        value_count = self._values(node.input[0])
        return (1.0 if value_count is None else value_count / max(width, 1)) * sum(map(math.prod, weight_shapes))

    def _values(self, name: str) -> float | None:
        """The number of elements of a tensor in a run; None if it is unknown."""
        if name in self.elements:
            return self.elements[name]
        shape = self.shapes.get(name)
        return None if shape is None or 0 in shape else self.scale * math.prod(shape)

    def _count_body(self, body: GraphProto) -> float:
        shapes = {**self.shapes, **shapes_of(body)}
        body_names = {tensor.name for tensor in body.initializer}
        fixed_names = self.fixed | {*_list_fixed(body, {*self.fixed, *body_names})}
        body_counter = replace(self, shapes=shapes, fixed=fixed_names, elements={})
        return sum(body_counter.count(node) for node in body.node)

    def _infer_loop(self, node: NodeProto, body: GraphProto) -> GraphProto:
        """The body of a Loop with the initial shapes of its states, which inference leaves open; any other body
        unchanged."""
        if node.op_type != "Loop":
            return body
        graph = GraphProto()
        outer_shapes = {name: self.shapes[name] for name in list_captured(node) if name in self.shapes}
        graph.CopyFrom(body)
        initial_names = dict(zip((value.name for value in graph.input[2:]), node.input[2:], strict=False))
        state_shapes = {
            name: self.shapes[source_name] for name, source_name in initial_names.items() if source_name in self.shapes
        }
        known_shapes = {name: shape for name, shape in outer_shapes.items() if self.kinds.get(name)}
        graph.input.extend(
            helper.make_tensor_value_info(name, self.kinds[name], shape) for name, shape in known_shapes.items()
        )
        body_model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        return _infer(body_model, state_shapes).graph

    def _iterations(self, node: NodeProto, body: GraphProto) -> float:
        """The iterations of a Loop or a Scan: its constant, or the length of its scanned inputs or gathered outputs."""
        if node.op_type == "Loop" and node.input[0] in self.trips:
            return self.trips[node.input[0]]
        if node.op_type == "Scan":
            scan_count = attribute_of(node, "num_scan_inputs", 1)
            axes = attribute_of(node, "scan_input_axes", [0] * scan_count)
            shape = self.shapes.get(node.input[len(node.input) - scan_count], ())
            return max(1, shape[axes[0]] if len(shape) > axes[0] else 1)
        first_output = len(body.input) - 2  # the outputs gathered over all iterations follow the states
        lengths = [self.shapes[name][0] for name in node.output[first_output:] if self.shapes.get(name)]
        return max([1, *lengths])
