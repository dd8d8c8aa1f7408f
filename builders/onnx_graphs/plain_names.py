"""An ONNX model under plain names, for compilers that make identifiers of the names in a graph.

TVM reads the name of a dimension as arithmetic ('seq-len' is seq minus len) and changes the names of inputs until they
are identifiers; MLIR's importers make a function's name of the graph's. In the copy every name is a letter and a
number. `Names` puts the model's own names back into the compiler's messages.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders.onnx_graphs.bodies import list_bodies
from builders.onnx_graphs.safe_division import guard_divisions
from enginesmith.core.errors import ModelError

if TYPE_CHECKING:
    import onnx

GRAPH = "main"
LOWEST_OPSET = 17
_PLAIN = re.compile(r"\b[vnd]\d+\b")


@dataclass(frozen=True)
class Names:
    """own: plain name -> the model's own, quoted: of values v0.., nodes n0.. (with their operator), dimensions d0..."""

    own: dict[str, str]

    def restore(self, text: str) -> str:
        """`text` with every plain name in it replaced by the model's own."""
        return _PLAIN.sub(lambda found: self.own.get(found[0], found[0]), text)


def plain(model: Path) -> "tuple[onnx.ModelProto, Names]":
    """The model in the file with plain names, external data taken in, without documentation; and its own names.

    Names are given in the order of the graph, so that equal models give equal copies. Integer divisions that could end
    the process are rewritten (`builders.onnx_graphs.safe_division`); old opsets are lifted where they can be.
    Raises ModelError when the file is no valid ONNX model.
    """
    import onnx

    try:
        onnx.checker.check_model(str(model))
        copy = onnx.load(model)
    except Exception as error:  # the checker raises protobuf's, its own and the standard library's classes alike
        raise ModelError(f"{model.name} is no valid ONNX model: {error}; export it again") from error
    copy = _lift(copy)
    renamer = _Renamer()
    renamer.graph(copy.graph)
    copy.graph.name = GRAPH
    for field in ("doc_string", "producer_name", "producer_version", "domain", "metadata_props", "model_version"):
        copy.ClearField(field)
    guard_divisions(copy)
    return copy, Names({plain_name: own for own, plain_name in renamer.list_renamed()})


def _lift(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """The model in opset `LOWEST_OPSET` where it was older and onnx's converter can lift it, which enters no graph in
    a node: importers know the operators of old opsets in part, shape inference follows no sizes through them."""
    import onnx
    import onnx.version_converter

    opset = max(
        (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=LOWEST_OPSET
    )
    if opset >= LOWEST_OPSET or any(list_bodies(node) for node in model.graph.node):
        return model
    try:
        lifted = onnx.version_converter.convert_version(model, LOWEST_OPSET)
        onnx.checker.check_model(lifted)
    except (RuntimeError, ValueError, onnx.checker.ValidationError):
        return model
    return lifted


class _Renamer:
    """Gives each name one plain name, in all graphs of a model: inner graphs read the outer one's values by name."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._dims: dict[str, str] = {}
        self._nodes: list[str] = []

    def list_renamed(self) -> Iterator[tuple[str, str]]:
        """(own name for people, plain name) of everything that was renamed."""
        for letter, names in (("v", self._values), ("d", self._dims), ("n", self._nodes)):
            for number, own in enumerate(names):
                yield (own if letter == "n" else repr(own)), f"{letter}{number}"

    def graph(self, graph: "onnx.GraphProto") -> None:
        """Rename all that a graph holds, the graphs in its nodes' attributes included."""
        for field in ("doc_string", "metadata_props", "value_info", "quantization_annotation"):
            graph.ClearField(field)
        for value in (*graph.input, *graph.output):
            value.name = self._value(value.name)
            value.ClearField("doc_string")
            for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
                if dim.dim_param:
                    dim.dim_param = self._dims.setdefault(dim.dim_param, f"d{len(self._dims)}")
        for tensor in graph.initializer:
            tensor.name = self._value(tensor.name)
        for node in graph.node:
            self._nodes.append(f"node {node.name!r} ({node.op_type})")
            node.name = f"n{len(self._nodes) - 1}"
            for field in ("doc_string", "metadata_props"):
                node.ClearField(field)
            node.input[:] = [self._value(name) for name in node.input]
            node.output[:] = [self._value(name) for name in node.output]
            for inner in list_bodies(node):
                self.graph(inner)

    def _value(self, own: str) -> str:
        return self._values.setdefault(own, f"v{len(self._values)}") if own else ""  # '' is an input left out
