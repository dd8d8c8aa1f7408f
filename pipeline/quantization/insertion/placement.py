"""Where Q/DQ pairs go besides the weighted nodes themselves, so that a backend's fusions stay whole.

TensorRT runs convolution, bias, residual Add and Relu as one int8 kernel when the other operand of the Add is
quantized too (its developer guide: "quantize the residual input in skip-connections").
onnxruntime's x86 path stays in integers from one convolution to the next when what lies between them (Add, pooling,
Concat) has Q/DQ on both sides: each detour through float costs two conversions and two changes of memory layout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto

from pipeline.graphs.graph import constants, consumers
from pipeline.quantization.insertion.insertion_points import find_sites, taps

# Their results are some of their inputs' values: the range stays.
_SELECTING = ("MaxPool",)
_JOINING = ("Add", "Concat", *_SELECTING, "GlobalAveragePool", "AveragePool")


@dataclass(frozen=True)
class Residual:
    """An Add that a weighted node's kernel can take in. operand: position of the other summand, `tensor` its name."""

    node: str
    operand: int
    tensor: str


@dataclass(frozen=True)
class JoinNode:
    """A node between integer kernels. result: what it writes, behind a Relu (`fused`) that is its only reader.

    same_as: the input whose range the result has, or None where its own was measured.
    """

    node: str
    result: str
    fused: str | None = None
    same_as: str | None = None


def residuals(model: ModelProto, convolutions: Iterable[str]) -> tuple[Residual, ...]:
    """The residual Adds behind these convolutions (by node name), each with the operand that the kernel does not make.

    Of two convolutions the larger one takes the Add in: the smaller is the shortcut's projection.
    """
    given, readers = constants(model.graph), consumers(model.graph)
    outputs = {value.name for value in model.graph.output}
    chosen = set(convolutions)
    made = {node.output[0]: node for node in model.graph.node if node.name in chosen}
    found = []
    for node in model.graph.node:
        if node.op_type == "Add" and not any(name in given for name in node.input):
            own = [name in made and len(readers[name]) == 1 and name not in outputs for name in node.input]
            if any(own) and node.input[0] != node.input[1]:
                main = own.index(True) if not all(own) else _larger(node, made, given)
                found.append(Residual(node.name, 1 - main, node.input[1 - main]))
    return tuple(found)


def find_joins(model: ModelProto, written: Iterable[str]) -> tuple[JoinNode, ...]:
    """The nodes all of whose inputs are quantized, given the tensors that integer kernels write; in graph order."""
    readers = consumers(model.graph)
    outputs = {value.name for value in model.graph.output}
    quantized, found = set(written), []
    for node in model.graph.node:
        if node.op_type in _JOINING and _single(node) and all(name in quantized for name in node.input):
            join = _find_join(node, readers, outputs)
            quantized.add(join.result)
            found.append(join)
    return tuple(found)


def _find_join(node: NodeProto, readers: Mapping[str, list[NodeProto]], outputs: set[str]) -> JoinNode:
    result = node.output[0]
    if node.op_type in _SELECTING:
        return JoinNode(node.name, result, same_as=node.input[0])
    after = readers.get(result, [])
    if len(after) == 1 and after[0].op_type == "Relu" and result not in outputs:
        return JoinNode(node.name, after[0].output[0], after[0].name)
    return JoinNode(node.name, result)


def _single(node: NodeProto) -> bool:
    return node.domain in ("", "ai.onnx") and len([name for name in node.output if name]) == 1


def _larger(node: NodeProto, made: Mapping[str, NodeProto], given: Mapping[str, TensorProto]) -> int:
    sizes = []
    for name in node.input:
        weight = given.get(made[name].input[1])
        count = 1
        for size in weight.dims if weight else ():
            count *= size
        sizes.append(count)
    return sizes.index(max(sizes))


def tensors_to_measure(model: ModelProto) -> tuple[str, ...]:
    """Every tensor of a prepared model whose range some backend's scheme wants: sites, residual operands, joins."""
    sites = find_sites(model)[0]
    convolutions = [site for site in sites if site.op_type == "Conv"]
    beside = {item.tensor for item in residuals(model, [site.node for site in convolutions])}
    between = {
        item.result for item in find_joins(model, [site.result for site in convolutions]) if item.same_as is None
    }
    return tuple(sorted({*taps(sites), *beside, *between}))
