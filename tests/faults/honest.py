"""Engines that are right and not equal: the same graph as another compiler's kernels would compute it."""

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, shape_inference

from pipeline.quantization.schemes.cast import emulate
from tests.faults.nets import add_constants, put_nodes
from tests.faults.plants import element_type
from tests.validation.attribution.planted import copy_of, weight


def split_sums(model: ModelProto) -> ModelProto:
    """Matrix products and convolutions with a constant weight in two halves that are added: another order of sums."""
    changed_model = copy_of(model)
    constants = {item.name for item in model.graph.initializer}
    for node in list(changed_model.graph.node):
        if len(node.input) < 2 or node.input[1] not in constants or weight(model, node.input[1]).dtype != np.float32:
            continue
        values = weight(model, node.input[1])
        group = next((item.i for item in node.attribute if item.name == "group"), 1)
        if node.op_type == "MatMul" and values.ndim == 2 and len(values) > 1:
            _halve(changed_model, node, values, 0, -1)
        elif node.op_type == "Conv" and group == 1 and values.shape[1] > 1:
            _halve(changed_model, node, values, 1, 1)
    return changed_model


def _halve(model: ModelProto, node: NodeProto, values: np.ndarray, axis: int, along: int) -> None:
    """In place. axis: of the weight.  along: of the activation."""
    middle, parts, nodes = values.shape[axis] // 2, [], []
    for index, span in enumerate((range(middle), range(middle, values.shape[axis]))):
        prefix = f"{node.name}/half{index}"
        add_constants(model, {f"{prefix}/w": np.take(values, span, axis), f"{prefix}/i": np.array(span, np.int64)})
        nodes.append(
            helper.make_node("Gather", [node.input[0], f"{prefix}/i"], [f"{prefix}/x"], f"{prefix}/Gather", axis=along)
        )
        part = NodeProto()
        part.CopyFrom(node)
        part.name = prefix
        part.input[:] = [f"{prefix}/x", f"{prefix}/w", *([] if index else node.input[2:])]
        part.output[:] = [f"{prefix}/y"]
        nodes.append(part)
        parts.append(f"{prefix}/y")
    nodes.append(helper.make_node("Add", parts, [node.output[0]], node.name))
    put_nodes(model, node, nodes)


def nudged(model: ModelProto) -> ModelProto:
    """What is quantized is off by 2^-22 of itself, up or down by its place: ties go elsewhere."""
    changed_model, rng = copy_of(model), np.random.default_rng(0)
    lengths = _lengths(model)
    for node in list(changed_model.graph.node):
        tensor = node.input[0] if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") else ""
        if not lengths.get(tensor) or element_type(model, tensor) != TensorProto.FLOAT:
            continue
        name = f"{node.name}/nudged"
        factors = 1 + 2.0**-22 * rng.choice([-1, 1], lengths[tensor])
        add_constants(changed_model, {f"{name}/by": factors.astype(np.float32)})
        node.input[0] = name
        put_nodes(changed_model, node, [helper.make_node("Mul", [tensor, f"{name}/by"], [name], name), node])
    return changed_model


def _lengths(model: ModelProto) -> dict[str, int]:
    """The last axis of each tensor that has one of a known length."""
    graph = shape_inference.infer_shapes(model).graph
    shapes = {item.name: item.type.tensor_type.shape.dim for item in (*graph.input, *graph.value_info)}
    return {name: dims[-1].dim_value for name, dims in shapes.items() if dims}


def rounding(model: ModelProto) -> ModelProto:
    """An fp16 graph with every 16-bit tensor rounded to 16 bits, which onnxruntime's CPU kernels do not do."""
    return emulate(model)


KERNELS = {"fp32": split_sums, "fp16": rounding, "int8": nudged, "int8-dynamic": nudged, "int4": split_sums}
