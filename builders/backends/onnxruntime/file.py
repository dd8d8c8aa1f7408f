"""The file that ONNX Runtime saves: made an engine that stands alone, and read as the graph that was optimized."""

from pathlib import Path

import onnx

from builders.onnx_graphs.bodies import walk_graphs
from builders.onnx_graphs.outline import load_outline
from builders.onnx_graphs.shard_names import list_weight_files
from builders.onnx_graphs.shards import in_shards, save_graph
from builders.onnx_graphs.weights import embed, is_external, load_graph

# How ONNX Runtime names the fp32 values that stand in for fp16 ones without a kernel.
WIDENED = "InsertedPrecisionFreeCast_"
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)


def settle_weights(path: Path, folder: Path) -> tuple[str, ...]:
    """Take the external data of its source, which lies in `folder`, into the engine `path`, or see that it lies in
    shards beside it, where that of its source did; a note where fp16 operators compute in fp32."""
    engine = load_graph(path, folder) if list_weight_files(path) else load_outline(path)
    if in_shards(engine):
        save_graph(engine, path)
    elif list_weight_files(path):
        for tensor in engine.graph.initializer:
            if is_external(tensor):
                embed(tensor)
        onnx.save(engine, path)
    widened = sum(any(WIDENED in name for name in (*node.input, *node.output)) for node in engine.graph.node)
    if not widened:
        return ()
    share = f"{widened} of {len(engine.graph.node)} operators"
    return (
        f"{share} compute in fp32 on this CPU, unrounded in between: fp16's overflow and rounding do not show here",
    )


def embed_shapes(model: onnx.ModelProto, folder: Path) -> None:
    """Take the integer vectors of a model whose weights are in files in `folder` into the model, in place.

    They may be shapes, lengths or indices, which ONNX's shape inference reads from the model alone: where ONNX Runtime
    makes one Split of 128 Slices, its lengths are 1024 bytes, and a file that has them outside does not open.
    """
    for graph in walk_graphs(model.graph):
        for tensor in graph.initializer:
            is_vector = tensor.data_type in _INDICES and len(tensor.dims) <= 1
            if is_vector and onnx.external_data_helper.uses_external_data(tensor):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))


def restore_names(model: onnx.ModelProto) -> None:
    """Give the tensors of an fp16 engine that are computed in fp32 their names in the source graph, in place.

    ONNX Runtime calls the fp32 form of tensor 'h' `WIDENED` + 'h'; where the engine also holds 'h' itself, rounded by a
    Cast of that, it becomes 'h/narrow'. The fp32 forms of inputs, of constants and of tensors that are computed in fp16
    are copies, and keep their names; so do those of outputs.
    """
    graph = model.graph
    maker = {name: node for node in graph.node for name in node.output}
    fixed = {item.name for item in (*graph.input, *graph.output, *graph.initializer)}
    names = dict[str, str]()
    for name, node in maker.items():
        source = name.removeprefix(WIDENED)
        if source == name or source in fixed or source in node.input:
            continue
        names[name] = source
        if source in maker:
            names[source] = f"{source}/narrow"
    told = [item for item in graph.value_info if item.name not in {*names, *names.values()}]
    del graph.value_info[:]
    graph.value_info.extend(told)
    for body in walk_graphs(graph):
        for node in body.node:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) for name in field]
