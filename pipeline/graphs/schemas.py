"""What an operator's schema lets be narrowed to a 16-bit float."""

from collections.abc import Mapping, Sequence

from onnx import NodeProto, TensorProto, defs, numpy_helper

from pipeline.graphs.half_floats import HalfFormat

FLOAT = TensorProto.FLOAT
# Their result type follows an attribute, or the input in a way that the schema does not state.
_UNCASTABLE = {"Bernoulli", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def can_narrow(node: NodeProto, half: HalfFormat, types: Mapping[str, int], opset: int) -> bool:
    """Whether all float results of a node can be `half`, or, where it has none, some float input."""
    if node.op_type in _UNCASTABLE:
        return False
    if typed_by_attribute(node):
        return True
    inputs, outputs = narrowable(node, half, types, opset)
    floats = {i for i, name in enumerate(node.output) if types.get(name) == FLOAT}
    return bool(inputs) and floats <= outputs


def narrowable(node: NodeProto, half: HalfFormat, types: Mapping[str, int], opset: int) -> tuple[set[int], set[int]]:
    """Positions of the float inputs that the schema lets be `half`, and of the results that follow them.

    Both are empty for an operator that onnx does not know.
    """
    try:
        schema = defs.get_schema(node.op_type, opset, node.domain)
    except defs.SchemaError:
        return set(), set()
    allowed = {v.type_param_str for v in schema.type_constraints if half.type_name in v.allowed_type_strs}
    formal = {i: _formal(schema.inputs, i) for i, name in enumerate(node.input) if types.get(name) == FLOAT}
    inputs = {i for i, type_str in formal.items() if type_str in allowed}
    turned = {formal[i] for i in inputs}
    return inputs, {i for i in range(len(node.output)) if _formal(schema.outputs, i) in turned}


def typed_by_attribute(node: NodeProto) -> bool:
    """Whether the node's float result takes its type from an attribute that names fp32."""
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i == FLOAT for a in node.attribute)
    filled = [a.t.data_type for a in node.attribute if a.name == "value"]
    return node.op_type == "ConstantOfShape" and filled == [FLOAT]


def retype(node: NodeProto, half: HalfFormat) -> None:
    """Let the attribute that names the result's type name `half`."""
    for attribute in node.attribute:
        if attribute.name == "to":
            attribute.i = half.element_type
        if attribute.name == "value":
            attribute.t.CopyFrom(numpy_helper.from_array(half.narrow(numpy_helper.to_array(attribute.t))))


def _formal(parameters: Sequence[defs.OpSchema.FormalParameter], index: int) -> str:
    """Type variable of the formal parameter at a position; the last one repeats when it is variadic."""
    return parameters[min(index, len(parameters) - 1)].type_str
