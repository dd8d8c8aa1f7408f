"""Rewrites of whole ONNX graphs: subgraphs, plain names, divisions, names of shards."""

import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from builders.onnx_graphs.wire import fields, inner_fields, inner_text
from enginesmith.core.codec import parse_as
from enginesmith.core.errors import ModelError, is_digest
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Library

if TYPE_CHECKING:
    import onnx
    from onnx import GraphProto, NodeProto

Message = TypeVar("Message", "onnx.ModelProto", "onnx.NodeProto", "onnx.TensorProto")

# The graphs inside the nodes of an ONNX graph: the bodies of If, Loop and Scan. Nothing is imported from onnx.


def list_bodies(node: "NodeProto") -> "list[GraphProto]":
    """The graphs in a node's attributes, in their order."""
    bodies: list[GraphProto] = []
    for attribute in node.attribute:
        bodies += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    return bodies


def walk_graphs(graph: "GraphProto") -> "Iterator[GraphProto]":
    """A graph, and after it every graph inside its nodes, however deep."""
    yield graph
    for node in graph.node:
        for body in list_bodies(node):
            yield from walk_graphs(body)


def walk_nodes(graph: "GraphProto") -> "Iterator[NodeProto]":
    """The nodes of a graph and of every graph inside them: each graph's own first, then those of its bodies."""
    for body in walk_graphs(graph):
        yield from body.node


def list_reads(node: "NodeProto") -> list[str]:
    """Unique names that a node reads: its inputs, then the outer names that its bodies read."""
    return list(dict.fromkeys([*(name for name in node.input if name), *list_captured(node)]))


def list_captured(node: "NodeProto") -> list[str]:
    """Names from outside that the bodies of a node read, each once."""
    outer_names: dict[str, None] = {}
    for body in list_bodies(node):
        own_names = {value.name for value in (*body.input, *body.initializer)}
        own_names |= {name for step in body.node for name in step.output}
        outer_names |= dict.fromkeys(name for step in body.node for name in list_reads(step) if name not in own_names)
    return list(outer_names)


def set_items(field: Any, items: Iterable[Any]) -> None:
    """Set the items of a repeated field; removing single ones one by one would take quadratic time."""
    new_items = list(items)
    del field[:]
    field.extend(new_items)


def drop_unread(graph: "GraphProto") -> None:
    """Remove the initializers that no node reads and no output is, in place."""
    operand_names = {name for node in graph.node for name in list_reads(node)} | {value.name for value in graph.output}
    live_tensors = [tensor for tensor in graph.initializer if tensor.name in operand_names]
    if len(live_tensors) < len(graph.initializer):  # setting the field copies weights
        set_items(graph.initializer, live_tensors)


def opset_of(model: "onnx.ModelProto", default: int = 0) -> int:
    """The opset of ONNX's own operators. default: the result for a model that declares none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=default)


def copied(message: Message) -> Message:
    """A copy of a node, tensor or model."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def chain_of_additions(count: int) -> "onnx.ModelProto":
    """A model of `count` additions from x to y: each adds c (float32 [m]) to the previous result."""
    from onnx import parser

    names = ["x", *(f"t{index}" for index in range(1, count)), "y"]
    body = "".join(f"{b} = Add({a}, c) " for a, b in pairwise(names))
    text = f'<ir_version: 10, opset_import: ["": 20]> chain (float[n] x, float[m] c) => (float[k] y) {{ {body} }}'
    return parser.parse_model(text)


# Rewrites integer divisions by data, for compilers whose code does not check the divisor.
#
# x86 ends the process at an integer division by zero, and at a division of the lowest number by -1. ONNX defines
# neither. Here a quotient or remainder by zero is 0, as on ARM, and the lowest number divided by -1 is itself, as
# fixed-width integers wrap. Divisors that are constants or computed from shapes stay: compilers read sizes there.

_DIVISIONS = ("Div", "Mod")
_SIGNED = (3, 5, 6, 7)  # onnx.TensorProto: INT8, INT16, INT32, INT64
_WHOLE = (*_SIGNED, 2, 4, 12, 13)  # and UINT8, UINT16, UINT32, UINT64
_SIZES = ("Shape", "Size", "Constant")
_MOST_KEPT = 1024  # bytes of a weight that may hold sizes, which inference reads


def guard_divisions(model: "onnx.ModelProto") -> None:
    """Rewrite integer divisions by data in place. New values are named after the quotient, new nodes as the node."""
    import onnx

    divisions = set(_list_by_data(model.graph, set()))
    if not divisions:
        return
    light_copy = copied(model)
    for tensor in light_copy.graph.initializer:
        if len(tensor.raw_data) > _MOST_KEPT:
            tensor.ClearField("raw_data")
    _rewrite(model.graph, onnx.shape_inference.infer_shapes(light_copy).graph, {}, divisions)


def _list_by_data(graph: "onnx.GraphProto", outer: set[str]) -> Iterator[str]:
    """Names of the results of divisions by data, those in inner graphs too. outer: names of sizes around the graph."""
    sizes = outer | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        bodies = list_bodies(node)
        if node.op_type in _DIVISIONS and node.input[1] not in sizes:
            yield node.output[0]
        elif node.op_type in _SIZES or (node.input and not bodies and sizes.issuperset(filter(None, node.input))):
            sizes.update(node.output)
        for body in bodies:
            yield from _list_by_data(body, sizes)


def _rewrite(graph: "onnx.GraphProto", typed: "onnx.GraphProto", outer: Mapping[str, int], results: set[str]) -> None:
    """Rewrite the divisions with these results. typed: the graph with types.  outer: element types around it."""
    values = (*typed.input, *typed.value_info, *typed.output)
    types = {**outer, **{value.name: value.type.tensor_type.elem_type for value in values}}
    types |= {tensor.name: tensor.data_type for tensor in typed.initializer}
    new_nodes: list[onnx.NodeProto] = []
    for node, typed_node in zip(graph.node, typed.node, strict=True):
        for body, typed_body in zip(list_bodies(node), list_bodies(typed_node), strict=True):
            _rewrite(body, typed_body, types, results)
        kind = types.get(node.input[1], 0) if results.intersection(node.output) else 0
        new_nodes.extend(_guard_division(node, kind) if kind in _WHOLE else [copied(node)])
    set_items(graph.node, new_nodes)


def _guard_division(node: "onnx.NodeProto", kind: int) -> "list[onnx.NodeProto]":
    """The nodes that replace a division. They divide by 1 where the divisor is 0 or -1, and for `Div` multiply the
    quotient by that divisor. kind: ONNX's element type."""
    from onnx import helper

    divisor, result = node.input[1], node.output[0]
    special_name, one_name, safe_name = f"{result}_special", f"{result}_one", f"{result}_divisor"

    def make_node(op_type: str, inputs: list[str], output: str) -> "onnx.NodeProto":
        return helper.make_node(op_type, inputs, [output], name=node.name)

    def constant(number: int, output: str) -> "onnx.NodeProto":
        tensor = helper.make_tensor(output, kind, [], [number])
        return helper.make_node("Constant", [], [output], name=node.name, value=tensor)

    nodes = [constant(1, one_name), constant(0, f"{result}_zero")]
    if kind in _SIGNED:
        nodes += [
            constant(-1, f"{result}_minus"),
            make_node("Equal", [divisor, f"{result}_zero"], f"{result}_by_zero"),
            make_node("Equal", [divisor, f"{result}_minus"], f"{result}_by_minus"),
            make_node("Or", [f"{result}_by_zero", f"{result}_by_minus"], special_name),
        ]
    else:
        nodes.append(make_node("Equal", [divisor, f"{result}_zero"], special_name))
    division = copied(node)
    division.input[1] = safe_name
    nodes += [make_node("Where", [special_name, one_name, divisor], safe_name), division]
    if node.op_type == "Div":
        division.output[0] = f"{result}_quotient"
        nodes.append(make_node("Where", [special_name, divisor, one_name], f"{result}_factor"))
        nodes.append(make_node("Mul", [f"{result}_quotient", f"{result}_factor"], result))
    return nodes


# A copy of an ONNX model with plain names, for compilers that make identifiers of the names in a graph.
#
# TVM parses the name of a dimension as arithmetic ('seq-len' is seq minus len) and changes the names of inputs until
# they are identifiers; MLIR's importers name a function after the graph. In the copy each name is a letter and a
# number. `Names` puts the model's own names back into the compiler's messages.

GRAPH = "main"
# Older models are converted to this opset if onnx's converter can do it.
LOWEST_OPSET = 17
_PLAIN = re.compile(r"\b[vnd]\d+\b")


@dataclass(frozen=True)
class Names:
    """Maps plain names of a copy to the model's own. original_names: plain name -> quoted original name: values are
    v0.., nodes n0.. (the original has their operator too), dims d0..."""

    original_names: dict[str, str]

    def restore(self, text: str) -> str:
        """`text` with every plain name in it replaced by the model's own."""
        return _PLAIN.sub(lambda match: self.original_names.get(match[0], match[0]), text)


def check_model(model: Path) -> None:
    """Raise ModelError when onnx's checker refuses the model in a file."""
    import onnx

    try:
        onnx.checker.check_model(str(model))
    except Exception as error:  # the checker raises protobuf's, its own and the standard library's classes alike
        raise ModelError(f"{model.name} is not a valid ONNX model: {error}; export it again") from error


def plain(model: Path) -> "tuple[onnx.ModelProto, Names]":
    """The model in the file with plain names, its external data included, without documentation; and its `Names`.

    Names are numbered in the order of the graph: equal models give equal copies. Integer divisions that could end the
    process are rewritten (`guard_divisions`); old opsets are converted where possible.
    Raises ModelError if the file is not a valid ONNX model.
    """
    import onnx

    check_model(model)
    copy = lift(onnx.load(model), LOWEST_OPSET)
    renamer = _Renamer()
    renamer.graph(copy.graph)
    copy.graph.name = GRAPH
    for field in ("doc_string", "producer_name", "producer_version", "domain", "metadata_props", "model_version"):
        copy.ClearField(field)
    guard_divisions(copy)
    return copy, Names({plain_name: original_name for original_name, plain_name in renamer.list_renamed()})


def lift(model: "onnx.ModelProto", lowest: int) -> "onnx.ModelProto":
    """The model converted to opset `lowest` if it is older and onnx's converter can do it, else the model itself.

    Importers support only some operators of old opsets, and shape inference follows no sizes through them. A model
    with graphs inside nodes, or with weights in files, is returned as it is: the converter does not convert those.
    """
    import onnx
    import onnx.version_converter

    has_files = any(tensor.external_data for tensor in model.graph.initializer)
    if opset_of(model, lowest) >= lowest or has_files or any(map(list_bodies, model.graph.node)):
        return model
    try:
        lifted_model = onnx.version_converter.convert_version(model, lowest)
        onnx.checker.check_model(lifted_model)
    except (RuntimeError, ValueError, onnx.checker.ValidationError):
        return model
    return lifted_model


class _Renamer:
    """Gives each name one plain name, in all graphs of a model: inner graphs read the outer one's values by name."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._dims: dict[str, str] = {}
        self._nodes: list[str] = []

    def list_renamed(self) -> Iterator[tuple[str, str]]:
        """(own name for people, plain name) of everything that was renamed."""
        for letter, names in (("v", self._values), ("d", self._dims), ("n", self._nodes)):
            for number, original_name in enumerate(names):
                yield (original_name if letter == "n" else repr(original_name)), f"{letter}{number}"

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
            for body in list_bodies(node):
                self.graph(body)

    def _value(self, original: str) -> str:
        return self._values.setdefault(original, f"v{len(self._values)}") if original else ""  # '' is an input left out


# The shards that an ONNX graph names (`builders.onnx_graphs.outline`), read without onnx and without its weights.

_GRAPH, _METADATA, _INITIALIZER, _EXTERNAL_DATA = 7, 14, 5, 13  # of ModelProto, GraphProto, TensorProto
# The entry of a model's metadata that names the libraries with its operators.
LIBRARIES = "enginesmith.libraries"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Libraries:
    """The libraries with operators of a graph. They lie beside it as shards do, each named by its digest."""

    libraries: tuple[Library, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of all builds of the libraries."""
        return tuple(build.sha256 for library in self.libraries for build in library.builds)


NO_LIBRARIES = Libraries(())


def list_libraries(path: Path) -> Libraries:
    """Libraries that the graph in a file names; none of another file. Raises ModelError for those in another form."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            entries = (field for field in fields(buffer, 0, len(buffer)) if field.number == _METADATA)
            texts = [inner_text(buffer, entry, 2) for entry in entries if inner_text(buffer, entry, 1) == LIBRARIES]
    except (ValueError, OSError):
        return NO_LIBRARIES
    try:
        return parse_as(texts[0].encode(), _MOST_BYTES, Libraries) if texts else NO_LIBRARIES
    except Malformed as error:
        raise ModelError(f"{path.name} has an invalid list of libraries ({error}); build it again") from error


def list_shards(path: Path) -> tuple[str, ...]:
    """The digests of the shards and libraries that the graph in a file names, sorted. () for a graph in one piece, and
    for a file that is no graph, whose reader reports the error. Raises ModelError if weights are in a file that is
    no shard, and as `list_libraries` does."""
    shard_names = list_weight_files(path)
    if bad_names := [name for name in shard_names if not is_digest(name)]:
        raise ModelError(f"{path.name} keeps weights in {bad_names[0][:80]!r}, which is not a shard; build it again")
    return tuple(sorted({*shard_names, *list_libraries(path).digests}))


def list_weight_files(path: Path) -> tuple[str, ...]:
    """The names, in the graph, of the files with its weights, sorted; () for a missing file or one without a graph."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return tuple(sorted(set(_locations(buffer))))
    except (ValueError, OSError):
        return ()


def has_shards(path: Path) -> bool:
    """Whether the weights of the graph in a file are in shards."""
    return any(map(is_digest, list_weight_files(path)))


def graph_bytes(path: Path) -> int:
    """Bytes of a graph's file and of the files with its weights."""
    files = (path.parent / name for name in list_weight_files(path))
    return path.stat().st_size + sum(file.stat().st_size for file in files if file.is_file())


def _locations(data: mmap.mmap) -> Iterator[str]:
    """The names of the files with the weights of the main graph."""
    for graph in (field for field in fields(data, 0, len(data)) if field.number == _GRAPH):
        for tensor in inner_fields(data, graph, _INITIALIZER):
            for entry in inner_fields(data, tensor, _EXTERNAL_DATA):
                if inner_text(data, entry, 1) == "location":
                    yield inner_text(data, entry, 2)
