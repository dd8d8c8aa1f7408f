"""One fusion that ONNX Runtime leaves out: the bias behind an integer MatMul.

Its MatMulIntegerToFloat adds a bias while it scales the sums, for nothing; its optimizer gives it one only in graphs
whose scales are made at run time. With fixed scales (Q/DQ) the Add stays behind it, one more pass over the result.
"""

from collections import Counter
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto

_BIAS_INPUT = 6


def fuse_bias(path: Path) -> int:
    """Fold biases in an optimized model on disk; gives how many."""
    model = onnx.load(path)
    folded = fold_biases(model)
    if folded:
        onnx.save(model, path)
    return folded


def fold_biases(model: ModelProto) -> int:
    """The same in place, on a model in memory."""
    graph = model.graph
    made = {name: node for node in graph.node for name in node.output}
    reads = Counter(name for node in graph.node for name in node.input)
    reads.update(value.name for value in graph.output)
    given = {item.name: item for item in graph.initializer}
    folded = 0
    for node in [node for node in graph.node if node.op_type == "Add"]:
        for product, bias in (node.input, reversed(node.input)):
            maker = made.get(product)
            if maker and reads[product] == 1 and _takes(maker, given.get(bias), given):
                _fold(maker, bias, node.output[0])
                graph.node.remove(node)
                made[node.output[0]] = maker
                folded += 1
                break
    return folded


def _takes(node: NodeProto, bias: TensorProto | None, given: dict[str, TensorProto]) -> bool:
    """Whether a node is an integer MatMul without a bias, and the bias has one float32 for each of its columns."""
    if node.op_type != "MatMulIntegerToFloat" or any(node.input[_BIAS_INPUT:]):
        return False
    weight = given.get(node.input[1])
    if bias is None or weight is None or bias.data_type != TensorProto.FLOAT:
        return False
    return list(bias.dims) == [weight.dims[-1]]


def _fold(node: NodeProto, bias: str, result: str) -> None:
    node.input.extend([""] * (_BIAS_INPUT - len(node.input)))
    del node.input[_BIAS_INPUT:]
    node.input.append(bias)
    node.output[0] = result
