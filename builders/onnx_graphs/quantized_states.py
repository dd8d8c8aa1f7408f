"""States that an engine reads and writes as int8, such as a cache of keys and values.

The reference graph has floating-point inputs and outputs: each state is rounded to a multiple of its scale behind the
input, and again before the output (`quantize_states`; ONNX QuantizeLinear and DequantizeLinear, zero point 0). The
compiled engine has the same values as int8 inputs and outputs (`with_int8_states`). Quantizing a multiple of the scale
gives the same multiple again, so that a state loses nothing from step to step.

If an output is the input with more rows behind it (a growing cache), only the new rows are rounded.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from builders.onnx_graphs.bodies import walk_nodes
from enginesmith.core.errors import ModelError
from enginesmith.core.types import QuantizedState


def quantize_states(model: ModelProto, states: Iterable[QuantizedState]) -> None:
    """Round the states behind the inputs and before the outputs of a graph, in place. Raises ModelError for a state
    that the graph does not have as float32."""
    for state in states:
        for name, graph_values in ((state.input, model.graph.input), (state.output, model.graph.output)):
            kind = next((value.type.tensor_type.elem_type for value in graph_values if value.name == name), None)
            if kind != TensorProto.FLOAT:
                dtype_text = "not there" if kind is None else TensorProto.DataType.Name(kind).lower()
                text = f"state {state.input!r} cannot be int8: {name!r} is {dtype_text}, and must be float32"
                raise ModelError(f"{text}; remove the state's dtype")
        values: dict[str, np.ndarray] = {"scale": np.array(state.scale, np.float32), "zero": np.array(0, np.int8)}
        constant_names = [f"{_place(state)}/{name}" for name in values]
        model.graph.initializer.extend(map(numpy_helper.from_array, values.values(), constant_names))
        _round_output(model.graph, state, constant_names)
        rounded_name = f"{_place(state)}/taken"
        _rename_reads(model.graph, state.input, rounded_name)
        _insert(model.graph, 0, _rounding(rounded_name, (state.input, rounded_name), constant_names))


def with_int8_states(model: ModelProto, states: Iterable[QuantizedState]) -> None:
    """Change state inputs and outputs to int8, in place, in a graph that `quantize_states` has changed."""
    for state in states:
        # Feed the input, as int8, to what dequantizes it.
        _set_int8(model.graph.input, state.input)
        index, node = _producer(model.graph, f"{_place(state)}/taken/int8")
        _rename_reads(model.graph, node.output[0], state.input)
        del model.graph.node[index]
        _give_int8(model.graph, state)
        operand_names = {name for node in walk_nodes(model.graph) for name in node.input}
        operand_names |= {value.name for value in model.graph.output}
        for node in [*model.graph.node]:
            if node.name.startswith(f"{_place(state)}/") and not operand_names.intersection(node.output):
                model.graph.node.remove(node)


def _rounding(place: str, ends: tuple[str, str], constants: Sequence[str]) -> list[NodeProto]:
    """Nodes that round a tensor to multiples of the scale. place: prefix of their names. ends: the tensor, and their
    result."""
    int8_name = f"{place}/int8"
    return [
        helper.make_node("QuantizeLinear", [ends[0], *constants], [int8_name], name=f"{place}/quantize"),
        helper.make_node("DequantizeLinear", [int8_name, *constants], [ends[1]], name=f"{place}/dequantize"),
    ]


def _round_output(graph: GraphProto, state: QuantizedState, constants: Sequence[str]) -> None:
    index, producer = _producer(graph, state.output)
    if producer.op_type == "Concat" and state.input in producer.input:
        for number, name in enumerate(name for name in dict.fromkeys(producer.input) if name != state.input):
            rounded_name = f"{_place(state)}/new{number}"
            producer.input[:] = [rounded_name if operand == name else operand for operand in producer.input]
            _insert(graph, index + 2 * number, _rounding(rounded_name, (name, rounded_name), constants))
        return
    exact_name = f"{_place(state)}/exact"
    _rename_reads(graph, state.output, exact_name)
    producer.output[:] = [exact_name if name == state.output else name for name in producer.output]
    _insert(graph, index + 1, _rounding(f"{_place(state)}/given", (exact_name, state.output), constants))


def _give_int8(graph: GraphProto, state: QuantizedState) -> None:
    """Make the int8 value before dequantization the output; for a cache with new rows, join the rows as int8."""
    _set_int8(graph.output, state.output)
    index, producer = _producer(graph, state.output)
    real_name = f"{_place(state)}/real"
    if producer.op_type == "DequantizeLinear":
        _, quantize_node = _producer(graph, producer.input[0])
        quantize_node.output[0], producer.input[0], producer.output[0] = state.output, state.output, real_name
        return
    _rename_reads(graph, state.output, real_name)
    nodes = [_producer(graph, name)[1] for name in producer.input]
    producer.input[:] = [node.input[0] for node in nodes]
    dequantize_node = helper.make_node(
        "DequantizeLinear", [state.output, *nodes[0].input[1:]], [real_name], name=f"{real_name}/dequantize"
    )
    _insert(graph, index + 1, [dequantize_node])


def _place(state: QuantizedState) -> str:
    """The prefix of the names of a state's nodes and tensors."""
    return f"enginesmith/state/{state.input}"


def _producer(graph: GraphProto, tensor: str) -> tuple[int, NodeProto]:
    """The index of the node that computes a tensor, and the node. Raises ModelError if there is none."""
    for index, node in enumerate(graph.node):
        if tensor in node.output:
            return index, node
    raise ModelError(f"{tensor!r} cannot be a state of int8: no node computes it; remove the state's dtype")


def _set_int8(ends: Iterable[ValueInfoProto], name: str) -> None:
    for value in ends:
        if value.name == name:
            value.type.tensor_type.elem_type = TensorProto.INT8


def _insert(graph: GraphProto, index: int, nodes: Sequence[NodeProto]) -> None:
    for offset, node in enumerate(nodes):
        graph.node.insert(index + offset, node)


def _rename_reads(graph: GraphProto, old: str, new: str) -> None:
    """Replace the input `old` by `new` in every node, including nodes in bodies."""
    for node in walk_nodes(graph):
        node.input[:] = [new if name == old else name for name in node.input]
