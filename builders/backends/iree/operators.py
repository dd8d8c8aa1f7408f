"""Operators that IREE 3.13 compiles into something else, or never ends compiling; found by running them."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from builders.backends.iree.control import wrong_scan
from builders.backends.iree.scope import Scope, attributes_of
from builders.onnx_graphs.bodies import list_bodies

if TYPE_CHECKING:
    import onnx

# Of others it takes tanh, or another slope.
_ACTIVATIONS = {b"Sigmoid", b"Tanh", b"Relu"}


def wrong_operators(graph: "onnx.GraphProto", opset: int, outer: Scope | None = None) -> Iterator[str]:
    """What IREE gets wrong of a graph whose shapes are inferred, inner graphs included, with node and remedy."""
    scope = (outer or Scope()).inside(graph)
    for node in graph.node:
        if node.domain in ("", "ai.onnx"):
            rules = [*_RULES.get(node.op_type, ()), *([_flattens] if opset < 13 else ())]
            for rule in rules:
                for found in rule(node, scope):
                    yield f"{node.name} {found}"
        for inner in list_bodies(node):
            yield from wrong_operators(inner, opset, scope)


def _flattens(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if node.op_type == "Hardmax":
        sizes, axis = scope.sizes(node.input[0]), attributes_of(node).get("axis", 1)
        if sizes is None or axis not in (-1, len(sizes) - 1):
            yield "is taken along one axis, as from opset 13 on; export the model with opset 13 or later"


def _find_unsigned(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    for name in node.input[:1]:
        kind = scope.dtype(name)
        if kind is not None and kind.kind == "u":
            yield f"takes {kind.name} for signed numbers; cast {name} to a wider signed type in front of it"


def _recurrent(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    given = attributes_of(node)
    lengths, peepholes = (node.input[place] if len(node.input) > place else "" for place in (4, 7))
    if lengths and not _full(lengths, node.input[0], scope):
        yield "leaves sequence_lens out of account; mask the sequences in the model"
    if peepholes:
        yield "leaves its peephole weights out of account; export the model without them"
    if "clip" in given:
        yield "leaves clip out of account; export the model without it"
    if others := [name.decode() for name in given.get("activations", ()) if name not in _ACTIVATIONS]:
        yield f"computes another activation than {others[0]}; use Sigmoid, Tanh or Relu"


def _full(lengths: str, sequence: str, scope: Scope) -> bool:
    array, sizes = scope.array(lengths), scope.sizes(sequence)
    return array is not None and sizes is not None and array.tolist() == [sizes[0]] * array.size


def _average(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    """With ceil_mode: averages of windows that reach beyond the padding, and windows that begin there."""
    given = attributes_of(node)
    if not given.get("ceil_mode") or given.get("auto_pad", b"NOTSET") != b"NOTSET":
        return
    kernel = np.array(given["kernel_shape"])
    ones = [1] * kernel.size
    pads = np.array(given.get("pads", [0, 0] * kernel.size)).reshape(2, -1)
    windows = (kernel - 1) * given.get("dilations", ones) + 1
    strides = np.array(given.get("strides", ones))
    sizes = (scope.sizes(node.input[0]) or [None] * (kernel.size + 2))[2:]
    # how far the last window reaches beyond the padding; a whole window beyond the entries is none
    room = windows - pads[1]
    beyond = [
        min(stride, space) - 1 if size is None else -(size + sum(pad) - window) % stride
        for size, pad, window, stride, space in zip(sizes, pads.T, windows, strides, room, strict=True)
    ]
    if max(beyond) > (0 if given.get("count_include_pad") else 1):
        yield "divides by too much where windows reach beyond the padding (ceil_mode); pad in the model instead"
    elif any(reach and reach >= space for reach, space in zip(beyond, room, strict=True)):
        yield "has windows that begin behind the last entry (ceil_mode), which are to be left out; pad in the model"


def _pad(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    if attributes_of(node).get("mode") == b"wrap":
        yield "is never done compiling with mode wrap; write it as slices and Concat"
    amounts = scope.array(node.input[1]) if len(node.input) > 1 else None
    reflects = attributes_of(node).get("mode") == b"reflect"  # of these it gets the ends right
    if amounts is not None and (amounts[: amounts.size // 2 if reflects else None] < 0).any():
        yield "reads elsewhere where an amount is negative; cut off by Slice"


def _quantized_product(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:
    ranks = [scope.sizes(node.input[place]) for place in (0, 3)]
    if any(sizes is None or len(sizes) > 2 for sizes in ranks):
        yield "is computed wrongly in batches; use DequantizeLinear, MatMul and QuantizeLinear"


def _always(words: str) -> Callable[["onnx.NodeProto", Scope], Iterator[str]]:
    def rule(node: "onnx.NodeProto", scope: Scope) -> Iterator[str]:  # noqa: ARG001 - as all rules
        yield words

    return rule


_RULES: dict[str, tuple[Callable[["onnx.NodeProto", Scope], Iterator[str]], ...]] = {
    "AveragePool": (_average,),
    "Det": (_always("divides by zero where an entry of the diagonal comes to 0; compute the determinant outside"),),
    "Div": (_find_unsigned,),
    "GRU": (_recurrent,),
    "GridSample": (_always("reads elsewhere for points far outside of the image; sample outside of the model"),),
    "LSTM": (_recurrent,),
    "MaxPool": (_find_unsigned,),
    "Mod": (_find_unsigned,),
    "Pad": (_pad,),
    "QLinearMatMul": (_quantized_product,),
    "RNN": (_recurrent,),
    "Scan": (wrong_scan,),
    "TopK": (_find_unsigned,),
}
