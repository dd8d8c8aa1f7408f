"""The file of an ONNX Runtime engine: the rewritten graph, with narrow weights, as ONNX Runtime reads it."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import copied, list_bodies, list_weight_files, set_items, walk_graphs, walk_nodes
from builders.onnx_graphs.outline import in_shards, load_outline, save_graph, write_graph
from builders.onnx_graphs.rewriting import attributes_of
from builders.onnx_graphs.weights import embed, is_external, load_graph, size_of, to_array
from enginesmith.arrays import Array
from enginesmith.core.text import pluralize

# The file that ONNX Runtime saves: made an engine that stands alone, and read as the graph that was optimized.

# ONNX Runtime's names of fp32 values that replace fp16 ones without a kernel.
WIDENED = "InsertedPrecisionFreeCast_"
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)


def settle_weights(path: Path, folder: Path) -> tuple[str, ...]:
    """Copy the weights that the engine file `path` reads from `folder`, its source's, into the file, or into shards
    beside it if the source had shards. Returns a note if fp16 operators compute in fp32."""
    engine = load_graph(path, folder) if list_weight_files(path) else load_outline(path)
    if in_shards(engine):
        save_graph(engine, path)
    elif list_weight_files(path):
        for tensor in engine.graph.initializer:
            if is_external(tensor):
                embed(tensor)
        onnx.save(engine, path)
    widened_count = sum(any(WIDENED in name for name in (*node.input, *node.output)) for node in engine.graph.node)
    if not widened_count:
        return ()
    subject = f"{widened_count} of {len(engine.graph.node)} operators"
    return (
        f"{subject} compute in fp32 on this CPU, unrounded in between: fp16's overflow and rounding do not show here",
    )


def embed_shapes(model: onnx.ModelProto, folder: Path) -> None:
    """Load integer scalars and vectors from files in `folder` into the model, in place.

    They may be shapes, lengths or indices. ONNX's shape inference reads these only from the model itself: if ONNX
    Runtime makes one Split of 128 Slices, its lengths take 1024 bytes, and a file with external lengths does not open.
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
    producers = {name: node for node in graph.node for name in node.output}
    fixed_names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    names = dict[str, str]()
    for name, node in producers.items():
        source = name.removeprefix(WIDENED)
        if source == name or source in fixed_names or source in node.input:
            continue
        names[name] = source
        if source in producers:
            names[source] = f"{source}/narrow"
    changed_names = {*names, *names.values()}
    set_items(graph.value_info, (value for value in graph.value_info if value.name not in changed_names))
    for body in walk_graphs(graph):
        for node in body.node:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) for name in field]


# Weights that came as int8 or fp16 stay so in the file that ONNX Runtime saves, where it would widen them to float32.
#
# A weight that is stored narrow and widened by a Cast, a shift and a scale (Cast, Sub, Mul: what quantizers without
# Q/DQ nodes write) is a constant to its optimizer, which computes it once and saves the result: MiniLM with int8
# weights, 22.9 MB, became a file of 90.3 MB. Here the narrow constants and the nodes that widen them take the place of
# each constant that they give bit by bit. A session that optimizes, as every one does by default, computes them again
# as it opens the file, so that nothing is slower afterwards. DequantizeLinear and integer operators are left alone by
# ONNX Runtime.

# Smaller constants are scales, offsets and shapes.
_SMALLEST_BYTES = 1024
# A chain of widening nodes is this long at most.
_LONGEST = 4
_FLOAT = int(TensorProto.FLOAT)


def keep_narrow_weights(path: Path, source: Path) -> tuple[str, ...]:
    """Put narrow constants of `source` back into `path`, the optimized model made from it; returns a note if it did."""
    if not find_widened(load_outline(source)):
        return ()
    model = load_graph(source)
    chains = find_widened(model)
    for tensor in [] if in_shards(model) else _constants(model).values():
        if is_external(tensor):
            embed(tensor)
    engine = load_graph(path)
    size_before, weight_count = size_of(engine), restore_chains(engine, model, chains)
    if not weight_count:
        return ()
    write_graph(engine, path)
    count_text = pluralize(weight_count, "weight is", "weights are")
    size_text = f"{size_of(engine) / 1e6:.1f} MB instead of {size_before / 1e6:.1f}"
    return (f"{count_text} stored in the narrow source type, and widened to fp32 at opening: {size_text}",)


def note_widened(source: Path) -> tuple[str, ...]:
    """A note on narrow weights, stored as fp32 because the graph is not optimized again when it is opened; or ()."""
    chains = find_widened(load_outline(source)).values()
    count = len({chain[0].output[0] for chain in chains})  # a chain's beginning is one too
    if not count:
        return ()
    subject = pluralize(count, "narrow weight is", "narrow weights are")
    return (f"{subject} stored as fp32, as graph_optimization 'all' saves the final graph; 'extended' keeps the type",)


def find_widened(model: ModelProto) -> dict[str, tuple[NodeProto, ...]]:
    """Name of a float32 tensor -> the nodes, in order, that compute it from constants of at most 3/4 of its bytes."""
    constants = _constants(model)
    producers = {name: node for node in model.graph.node for name in node.output}
    chains = dict[str, tuple[NodeProto, ...]]()
    for node in model.graph.node:
        chain = _chain(node, producers, constants, _LONGEST)
        if chain and _narrows(chain, constants):
            chains[node.output[0]] = chain
    return chains


def restore_chains(engine: ModelProto, source: ModelProto, chains: Mapping[str, tuple[NodeProto, ...]]) -> int:
    """Replace constants of the engine by chains of nodes of `source` that compute them, in place; returns how many."""
    constants, tensors = _constants(source), {tensor.name: tensor for tensor in engine.graph.initializer}
    engine_names = {value.name for value in engine.graph.input}.union(*(node.output for node in engine.graph.node))
    nodes, restored_names = dict[str, NodeProto](), list[str]()
    for name, chain in chains.items():
        chain_results = {result for node in chain for result in node.output}
        if name not in tensors or chain_results & engine_names or not _gives(chain, constants, tensors[name]):
            continue
        for node in chain:
            nodes[node.output[0]] = node
            for input_name in node.input:
                if input_name in constants and input_name not in tensors:
                    engine.graph.initializer.append(constants[input_name])
                    tensors[input_name] = engine.graph.initializer[-1]
                    tensors[input_name].name = input_name
        restored_names.append(name)
    if restored_names:
        set_items(engine.graph.initializer, (t for t in engine.graph.initializer if t.name not in nodes))
        set_items(engine.graph.node, [*nodes.values(), *engine.graph.node])
    return len(restored_names)


def _chain(
    node: NodeProto, makers: Mapping[str, NodeProto], constants: Mapping[str, TensorProto], depth: int
) -> tuple[NodeProto, ...] | None:
    """The node behind those that make its inputs, where all of them widen constants; else None."""
    if depth == 0 or node.domain not in ("", "ai.onnx") or node.op_type not in ("Cast", "Mul", "Sub"):
        return None
    if node.op_type == "Cast" and attributes_of(node).get("to") != _FLOAT:
        return None
    chain = dict[str, NodeProto]()
    for name in node.input:
        if name in constants:
            continue
        inner_chain = _chain(makers[name], makers, constants, depth - 1) if name in makers else None
        if inner_chain is None:
            return None
        chain |= {chain_node.output[0]: chain_node for chain_node in inner_chain}
    return (*chain.values(), node)


def _narrows(chain: tuple[NodeProto, ...], constants: Mapping[str, TensorProto]) -> bool:
    """Whether a chain reads a narrow constant, and its constants need at most 3/4 of its result's bytes."""
    operands = {name: constants[name] for node in chain for name in node.input if name in constants}
    cast_operands = [operands[node.input[0]] for node in chain if node.op_type == "Cast" and node.input[0] in operands]
    result_bytes = 4 * max((math.prod(t.dims) for t in cast_operands if t.data_type != _FLOAT), default=0)
    size = sum(math.prod(t.dims) * helper.tensor_dtype_to_np_dtype(t.data_type).itemsize for t in operands.values())
    return bool(result_bytes >= _SMALLEST_BYTES and size <= 0.75 * result_bytes)


def _gives(chain: tuple[NodeProto, ...], constants: Mapping[str, TensorProto], constant: TensorProto) -> bool:
    """Whether the result of a chain is bit-identical to a constant."""
    values = dict[str, Array]()
    for node in chain:
        operands = [values[name] if name in values else to_array(constants[name]) for name in node.input]
        if node.op_type == "Cast":
            values[node.output[0]] = operands[0].astype(np.float32)
        else:
            function = np.multiply if node.op_type == "Mul" else np.subtract
            values[node.output[0]] = function(operands[0], operands[1])
    tensor = values[chain[-1].output[0]]
    return tensor.dtype == np.float32 and np.array_equal(tensor.view(np.int32), to_array(constant).view(np.int32))


def _constants(model: ModelProto) -> dict[str, TensorProto]:
    """Constants by name: initializers, and Constant nodes that hold a tensor."""
    node_constants = {
        node.output[0]: helper.get_node_attr_value(node, "value")
        for node in model.graph.node
        if node.op_type == "Constant" and [attribute.name for attribute in node.attribute] == ["value"]
    }
    return {tensor.name: tensor for tensor in model.graph.initializer} | node_constants


# Rewrites of graphs that ONNX Runtime has optimized, with the same results: two for speed, one against a crash.
#
# `fuse_bias`: the kernel MatMulIntegerToFloat adds a bias while it scales the sums, at no cost; ONNX Runtime's
# optimizer gives it one only in graphs whose scales are made at run time. With fixed scales (Q/DQ) an Add is left
# behind it, one more pass over the result.
#
# `split_convolutions`: ONNX Runtime's integer convolution reads all weights for every few rows of its result. Weights
# larger than the L2 cache come from the next level each time: on ResNet-18 the last three convolutions (512 by 512
# channels, 3x3, 2.4 MB) took 0.96 ms each, at 58 % of the rate of those before them. Cut by output channels, each
# part's weights stay in L2 over all rows, and the results are put together as bytes: the whole net gains 7 % with one
# image and 6 % with eight.
#
# `cast_first`: opening a graph with a Transpose, a Cast and a MatMul in this order can end the process. ONNX Runtime's
# MatmulTransposeFusion swaps such a Cast and Transpose where the Transpose moves the first axis behind others (time and
# batch of a recurrent layer). Where it then fuses nothing, as with weights of two axes, the new nodes have no schema,
# and NchwcTransformer, the next with all optimizations, dereferences it: a segmentation fault, seen in 1.31 and
# reported of 1.24 (https://github.com/microsoft/onnxruntime/issues/28392). The Casts of fp16 graphs are
# inserted after that fusion, so that the saved file has this order; it is saved with the Cast first, for sessions with
# any options.

# The place of the bias among the inputs of MatMulIntegerToFloat (com.microsoft).
_BIAS_INPUT = 6
# Measured with 1.31 on a CPU with 1 MiB of L2 to a core, ResNet-18: parts of 64, 128 and 192 channels (0.3 to 0.9 MB)
# are equally fast, parts of 1.2 MB gain half as much. Convolutions below `SPLIT_BYTES` gain nothing.
SPLIT_BYTES = 1_000_000
PART_BYTES = 600_000
# Number of output channels that the kernel computes at a time.
CHANNELS = 64
_WEIGHT, _PER_CHANNEL = 3, (3, 4, 5, 8)  # weight; weight, its scales and zero points, bias
# Left out where a session optimises a graph, saves it and applies the layout in one go.
FUSION = "MatmulTransposeFusion"
_READERS = ("MatMul", "FusedMatMul")


def rewrite_optimized(path: Path, *, faster: bool) -> tuple[str, ...]:
    """Rewrite an optimized model on disk; returns a note if Casts were moved. faster: with the rewrites for speed."""

    def rewrite(model: ModelProto) -> tuple[int, int]:
        return cast_first(model), fuse_bias(model) + split_convolutions(model) if faster else 0

    swap_count, other_count = rewrite(load_outline(path))
    if swap_count + other_count:
        model = load_graph(path)
        rewrite(model)
        write_graph(model, path)
    if not swap_count:
        return ()
    return (
        f"Casts moved from between a Transpose and a MatMul to before the Transpose: {swap_count}; "
        "otherwise onnxruntime would end the process that opens the engine",
    )


def fuse_bias(model: ModelProto) -> int:
    """Move the bias of an Add after an integer MatMul into the MatMul, in place; returns how many were moved."""
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    read_counts = Counter(name for node in graph.node for name in node.input)
    read_counts.update(value.name for value in graph.output)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    count = 0
    for node in [node for node in graph.node if node.op_type == "Add"]:
        for product, bias in (node.input, reversed(node.input)):
            producer = producers.get(product)
            if producer and read_counts[product] == 1 and _takes(producer, constants.get(bias), constants):
                empty_names = [""] * (_BIAS_INPUT - len(producer.input))
                producer.input[:] = [*producer.input[:_BIAS_INPUT], *empty_names, bias]
                producer.output[0] = node.output[0]
                graph.node.remove(node)
                producers[node.output[0]] = producer
                count += 1
                break
    return count


def _takes(node: NodeProto, bias: TensorProto | None, constants: dict[str, TensorProto]) -> bool:
    """Whether a node is an integer MatMul without a bias, and the bias has one float32 for each of its columns."""
    if node.op_type != "MatMulIntegerToFloat" or any(node.input[_BIAS_INPUT:]):
        return False
    weight = constants.get(node.input[1])
    if bias is None or weight is None or bias.data_type != TensorProto.FLOAT:
        return False
    return list(bias.dims) == [weight.dims[-1]]


def split_convolutions(model: ModelProto) -> int:
    """Split the large integer convolutions, in place; returns how many were split."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes, split_count = list[NodeProto](), 0
    for node in model.graph.node:
        width = _width(node, constants)
        nodes += _parts(model, node, width, constants) if width else [node]
        split_count += bool(width)
    if split_count:
        set_items(model.graph.node, nodes)
        operand_names = {name for node in model.graph.node for name in node.input}
        operand_names.update(value.name for value in model.graph.output)
        if not any(map(list_bodies, nodes)):  # a body within a node could read a constant too: then all stay
            for tensor in [tensor for tensor in model.graph.initializer if tensor.name not in operand_names]:
                model.graph.initializer.remove(tensor)
    return split_count


def _width(node: NodeProto, constants: Mapping[str, TensorProto]) -> int:
    """Output channels of a part; 0 for a node that stays whole."""
    if node.op_type != "QLinearConv" or node.domain not in ("", "ai.onnx"):
        return 0
    weight = constants.get(node.input[_WEIGHT])
    has_constants = all(constants.get(name) for index, name in enumerate(node.input) if index in _PER_CHANNEL and name)
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    if weight is None or not has_constants or groups != 1 or math.prod(weight.dims[2:]) == 1:
        return 0
    channels, depth = weight.dims[0], math.prod(weight.dims[1:])
    width = max(CHANNELS, PART_BYTES // depth // CHANNELS * CHANNELS)
    return width if channels * depth > SPLIT_BYTES and width < channels else 0


def _parts(model: ModelProto, node: NodeProto, width: int, constants: Mapping[str, TensorProto]) -> list[NodeProto]:
    """The nodes in the place of a convolution: parts of `width` output channels each, and their Concat."""
    channels = constants[node.input[_WEIGHT]].dims[0]
    slice_nodes = []
    for start in range(0, channels, width):
        slice_node = copied(node)
        slice_node.name, slice_node.output[0] = (f"{name}/{start}" for name in (node.name, node.output[0]))
        for index in _PER_CHANNEL:
            if index < len(node.input) and node.input[index]:
                values = to_array(constants[node.input[index]])
                if values.ndim and len(values) == channels:
                    slice_node.input[index] = f"{node.input[index]}/{node.name}/{start}"
                    slice_values = np.ascontiguousarray(values[start : start + width])
                    model.graph.initializer.append(numpy_helper.from_array(slice_values, slice_node.input[index]))
        slice_nodes.append(slice_node)
    results = [slice_node.output[0] for slice_node in slice_nodes]
    return [*slice_nodes, helper.make_node("Concat", results, [node.output[0]], name=f"{node.name}/concat", axis=1)]


def file_moves_first_axis(path: Path) -> bool:
    """Whether a model on disk has a Transpose that the fusion may swap with a Cast."""
    model = load_outline(path)
    return any(_moves_first_axis(node) for node in walk_nodes(model.graph))


def cast_first(model: ModelProto) -> int:
    """Swap the Transpose and the Cast before a MatMul, in place; returns how many pairs were swapped."""
    read_counts = Counter(name for node in walk_nodes(model.graph) for name in node.input)
    read_counts.update(value.name for graph in walk_graphs(model.graph) for value in graph.output)
    return sum(_swap(graph, read_counts) for graph in walk_graphs(model.graph))


def _swap(graph: GraphProto, reads: Counter[str]) -> int:
    producers = {name: node for node in graph.node for name in node.output}
    factor_names = {name for node in graph.node if node.op_type in _READERS for name in node.input}
    casts = [node for node in graph.node if node.op_type == "Cast" and node.output[0] in factor_names]
    pairs = [(producers.get(cast.input[0]), cast) for cast in casts]
    swap_pairs = [(transpose, cast) for transpose, cast in pairs if transpose and _moves_first_axis(transpose)]
    for transpose, cast in swap_pairs:
        new_node = copied(transpose)
        inner_name, result = f"{cast.output[0]}/cast_first", cast.output[0]
        cast.input[0], cast.output[0] = transpose.input[0], inner_name
        new_node.input[0], new_node.output[0] = inner_name, result
        reads[transpose.output[0]] -= 1
        if reads[transpose.output[0]]:
            new_node.name = inner_name  # two Casts of one Transpose make two nodes of it
        else:
            graph.node.remove(transpose)
        graph.node.insert(list(graph.node).index(cast) + 1, new_node)  # a copy
    return len(swap_pairs)


def _moves_first_axis(node: NodeProto) -> bool:
    """Whether a node is a Transpose of three or more axes that moves the first to one of the last two places."""
    perms = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"]
    if node.op_type != "Transpose" or not perms:
        return False
    front_axes, last_axes = perms[0][:-2], perms[0][-2:]
    return bool(front_axes) and front_axes == [*range(1, len(front_axes) + 1)] and 0 in last_axes
