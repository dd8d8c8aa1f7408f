"""The arithmetic of fp16 and bf16 graphs on a machine without their kernels.

A 16-bit kernel computes in fp32 inside and rounds its result once. So an fp32 graph that rounds every 16-bit tensor,
by a cast to the type and back, computes what a GPU with fp32 accumulation computes, but for the order of sums.
onnxruntime's own CPU path does less: it keeps fp32 between fp16 nodes (seen in 1.31: the root of the square of 1000 is
1000 there, where fp16 has infinity), and it has no bf16 kernels at all.
"""

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pipeline.graphs.graph import element_types, finish, rename_captured, tidy

HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def emulate(model: ModelProto) -> ModelProto:
    """An fp32 graph that rounds wherever the given fp16 or bf16 graph would; 16-bit outputs become fp32.

    Run it with onnxruntime's optimizations off (ORT_DISABLE_ALL): some of them take casts for no-ops.
    Control flow is not entered: its bodies stay in fp32 in graphs that `cast_float` made.
    """
    copy = tidy(model)
    graph, types = copy.graph, element_types(copy)
    _widen_constants(graph)
    for value in graph.output:
        if value.type.tensor_type.elem_type in HALF_TYPES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    rounded = _widen_inputs(graph)
    for node in list(graph.node):
        rounded.append(node)
        for index, name in enumerate(node.output):
            if types.get(name) in HALF_TYPES:
                rounded += _round(node, index, types[name])
        _widen_attributes(node)
    del graph.node[:]
    graph.node.extend(rounded)
    return finish(copy)


def _round(node: NodeProto, index: int, element_type: int) -> list[NodeProto]:
    name = node.output[index]
    node.output[index] = exact = f"{name}/exact"
    half = f"{name}/rounded"
    return [
        helper.make_node("Cast", [exact], [half], name=f"{half}/narrow", to=element_type),
        helper.make_node("Cast", [half], [name], name=f"{half}/widen", to=TensorProto.FLOAT),
    ]


def _widen_inputs(graph: GraphProto) -> list[NodeProto]:
    """Casts of the 16-bit inputs to fp32; the inputs take other names and keep their type, so that data still fits."""
    halves = [value.name for value in graph.input if value.type.tensor_type.elem_type in HALF_TYPES]
    names = {name: f"{name}/widened" for name in halves}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        rename_captured(node, names)
    return [
        helper.make_node("Cast", [name], [widened], name=widened, to=TensorProto.FLOAT)
        for name, widened in names.items()
    ]


def _widen_constants(graph: GraphProto) -> None:
    for item in graph.initializer:
        if item.data_type in HALF_TYPES:
            item.CopyFrom(_widen(item))


def _widen(item: TensorProto) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(item).astype("float32"), item.name)


def _widen_attributes(node: NodeProto) -> None:
    """Let attributes that name a 16-bit type, or hold such a tensor, mean fp32."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in HALF_TYPES:
            attribute.t.CopyFrom(_widen(attribute.t))
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in HALF_TYPES:
            attribute.i = TensorProto.FLOAT
