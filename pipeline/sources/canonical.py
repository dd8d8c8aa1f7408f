"""A bound on the memory that a library may take for one call, where a few bytes of input can ask for any amount.

Local functions of an ONNX model put in where they are called.

A model of a few kilobytes can stand for more nodes than fit into any memory (each function calls the one before it
twice), or call itself: what comes out is measured first. onnx's own inliner does the work, since onnx_ir's takes time
that grows with the square of the nodes (10,000: 37 s, against 0.03 s).

The canonical form of an ONNX model: one that the checker accepts, with shapes inferred and the spec's names on it.

Canonical: local functions inlined; dead nodes, unused initializers, doc strings, metadata and stack traces gone;
constants in name order, and as bytes; the inputs' shapes as the spec says them; the IR version the oldest that the
opset allows.
Canonicalising twice changes nothing, and the same input gives the same bytes in every process.
"""

import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import Error as ProtobufError  # type: ignore[import-untyped]
from onnx import inliner
from onnx_ir.passes import common

from builders.onnx_graphs.bodies import list_bodies
from enginery.core.errors import ModelError
from enginery.core.types import TensorSpec
from pipeline.sources.walk import all_tensors, nodes_in


@contextmanager
def at_most(extra_bytes: int) -> Iterator[None]:
    """Inside, the process gets so much more memory than it has, and then MemoryError.

    The limit (RLIMIT_AS) is the whole process's for that time: for processes that do nothing else meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is None:  # not Linux: whoever started this process limits it
        yield
        return
    wanted = pages * resource.getpagesize() + extra_bytes
    known = [limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


MOST_NODES = 1_000_000
# Protobuf reads 100 messages inside each other, and a graph inside a node is three deeper.
DEEPEST = 30

_Name = tuple[str, str, str]


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without local functions; the same object where it has none.

    Raises ModelError for functions that call themselves, are defined twice, or stand for too much.
    """
    functions = {_name(function.domain, function.name, function.overload): function for function in model.functions}
    if len(functions) < len(model.functions):
        raise ModelError("the model defines a function twice; export it again")
    sizes: dict[_Name, tuple[int, int]] = {}
    for name in _callees_first(functions):
        sizes[name] = _size(functions[name].node, sizes)
    nodes, depth = _size(model.graph.node, sizes)
    if nodes > MOST_NODES or depth > DEEPEST:
        raise ModelError(
            f"the model has {min(nodes, 10**18)} nodes or more in graphs {depth} deep, its functions put in; at most "
            f"{MOST_NODES} and {DEEPEST} can be built: export it with fewer"
        )
    return inliner.inline_local_functions(model) if functions else model


def _callees_first(functions: Mapping[_Name, onnx.FunctionProto]) -> Iterable[_Name]:
    calls = {
        name: {called for node in nodes_in(function.node) if (called := _find_called(node)) in functions}
        for name, function in functions.items()
    }
    try:
        return tuple(TopologicalSorter(calls).static_order())
    except CycleError as error:
        circle = " -> ".join(f"{domain}::{name}"[:80] for domain, name, _ in error.args[1][:5])
        raise ModelError(f"the model's functions call themselves: {circle}; export it again") from error


def _size(nodes: Iterable[onnx.NodeProto], known: Mapping[_Name, tuple[int, int]]) -> tuple[int, int]:
    """How many nodes these stand for, and how deep their graphs go."""
    count = depth = 0
    for node in nodes:
        own, deep = known.get(_find_called(node), (1, 0))
        for graph in list_bodies(node):
            more, deeper = _size(graph.node, known)
            own, deep = own + more, max(deep, deeper + 1)
        count, depth = count + own, max(depth, deep)
    return count, depth


def _find_called(node: onnx.NodeProto) -> _Name:
    return _name(node.domain, node.op_type, node.overload)


def _name(domain: str, name: str, overload: str) -> _Name:
    return ("" if domain == "ai.onnx" else domain, name, overload)


OLDEST_IR_VERSION = 8
# What checking may take beside a few copies of the model. The largest of our examples takes 0.1 GiB.
_CHECKING_BYTES = 2 << 30
_REFUSALS = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    ProtobufError,
    ValueError,
    RuntimeError,
)


def canonical(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec] = (), outputs: Sequence[str] = ()
) -> onnx.ModelProto:
    """Bring a model into canonical form. The argument is left as it is.

    inputs: the spec's inputs, which the model's must match by name, dtype and rank; order and dims are taken from them.
    outputs: new names for the outputs, in order; an inner value that has such a name already gets another.
    Raises ModelError for models that do not fit the spec, or that the ONNX checker or strict shape inference refuse.
    """
    with _convert_errors():
        graph_model = ir.from_proto(inline_functions(model))
        passed_on = {value: value.name for value in graph_model.graph.inputs if value.is_graph_output()}
        _tidy(graph_model)
    _keep_names(passed_on, outputs)
    if inputs:
        _take_inputs(graph_model.graph, inputs)
    if outputs:
        _name_outputs(graph_model.graph, outputs)
    with _convert_errors():
        common.NameFixPass()(graph_model)
        plain = _plain(ir.to_proto(graph_model))
    return _check(plain)


@contextmanager
def _convert_errors() -> Iterator[None]:
    """onnx_ir trusts its input: what a file should not hold ends it with whatever error comes of that."""
    try:
        yield
    except (*_REFUSALS, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"the ONNX graph is malformed: {_reason(error)}; export it again") from error


def _reason(error: BaseException) -> str:
    """The words of the error that started a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400] or type(error).__name__


def _tidy(model: ir.Model) -> None:
    for tidy in (
        common.InlinePass(),  # functions of another opset than the model's, which `inlined` leaves
        common.RemoveInitializersFromInputsPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
        common.OutputFixPass(),
    ):
        tidy(model)
    try:
        common.TopologicalSortPass()(model)
    except ValueError as error:
        raise ModelError(f"the ONNX graph has a cycle: {error}; export it again") from error


def _keep_names(passed_on: Mapping[ir.Value, str | None], outputs: Sequence[str]) -> None:
    """Give inputs that are outputs as well their names back, which `OutputFixPass` leaves to the outputs.

    Raises ModelError where no other names of outputs were asked for.
    """
    for value, name in passed_on.items():
        if value.name != name and not outputs:
            raise ModelError(f"{name!r} is an input and an output; name the outputs otherwise, in the spec's outputs")
        value.name = name


def _take_inputs(graph: ir.Graph, specs: Sequence[TensorSpec]) -> None:
    """Put the inputs into the spec's order and shapes, and the spec's dim names wherever the model's own stood."""
    values = {value.name: value for value in graph.inputs}
    wanted = [spec.name for spec in specs]
    check_names([str(name) for name in values], wanted)
    names: dict[str, int | str] = {}
    for spec in specs:
        names |= _match(values[spec.name], spec)
        values[spec.name].shape = ir.Shape(spec.shape)
    graph.inputs[:] = [values[name] for name in wanted]
    for value in graph.outputs:
        if value.shape is not None:
            value.shape = ir.Shape([_rename(dim, names) for dim in value.shape])


def check_names(own: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise ModelError where a model's inputs have other names than the spec's."""
    if sorted(own) != sorted(wanted):
        raise ModelError(f"the model's inputs are {sorted(own)}, the spec's {sorted(wanted)}; make them equal")


def _match(value: ir.Value, spec: TensorSpec) -> dict[str, int | str]:
    """The model's names of this input's dims, and what the spec calls them."""
    if _dtype(value) != spec.dtype:
        raise ModelError(
            f"input {spec.name!r} is {value.dtype} in the model and {spec.dtype} in the spec; correct the spec"
        )
    if value.shape is None:
        return {}
    shape = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    fits = len(shape) == len(spec.shape)
    if not fits or any(isinstance(a, int) and a != b for a, b in zip(shape, spec.shape, strict=True)):
        raise ModelError(
            f"input {spec.name!r} is {_format(shape)} in the model and {_format(spec.shape)} in the spec; "
            "correct the spec, or export the model with that axis dynamic"
        )
    return {own: dim for own, dim in zip(shape, spec.shape, strict=True) if isinstance(own, str)}


def _dtype(value: ir.Value) -> str | None:
    """numpy's name of a value's type; None for one that numpy does not know."""
    try:
        return None if value.dtype is None else str(value.dtype.numpy().name)
    except TypeError:
        return None


def _format(shape: Sequence[int | str | None]) -> str:
    dims = ["?" if dim is None else str(dim)[:80] for dim in shape[:16]]
    return "[{}]".format(", ".join([*dims, "..."] if len(shape) > 16 else dims))


def _rename(dim: int | ir.SymbolicDim, names: Mapping[str, int | str]) -> int | str | None:
    """A dim, or an expression such as 's40*4', in the spec's names."""
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    text = re.sub(r"[A-Za-z_]\w*", lambda word: str(names.get(word[0], word[0])), dim.value)
    return int(text) if text.isdigit() else text


def _name_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    if len(names) != len(graph.outputs):
        raise ModelError(f"the model has {len(graph.outputs)} outputs, the spec names {len(names)}: {', '.join(names)}")
    for value in graph.inputs:
        if value.name in names:
            raise ModelError(f"output {value.name!r} has the name of an input; choose another in the spec's outputs")
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Leave nothing in the file but the function it stands for."""
    plain = onnx.ModelProto(producer_name="enginery", graph=model.graph)
    plain.opset_import.extend(sorted(model.opset_import, key=lambda entry: entry.domain))
    oldest: int = onnx.helper.find_min_ir_version_for(plain.opset_import, ignore_unknown=True)
    plain.ir_version = max(OLDEST_IR_VERSION, oldest)
    plain.graph.name = "model"
    plain.graph.initializer.sort(key=lambda tensor: tensor.name)
    del plain.graph.value_info[:]
    for tensor in all_tensors(plain):
        _write_bytes(tensor)
    return plain


def _write_bytes(tensor: onnx.TensorProto) -> None:
    """Numbers that stand in a list of their type, as the bytes that most writers leave."""
    if not tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))


def _check(model: onnx.ModelProto) -> onnx.ModelProto:
    infer, size = onnx.shape_inference.infer_shapes, model.ByteSize()
    try:
        # It works out the values of small tensors, too, which a Range or a row of Concats makes large.
        with at_most(_CHECKING_BYTES + 8 * size):
            inferred = infer(model, check_type=True, strict_mode=True, data_prop=True)
            onnx.checker.check_model(inferred)
    except MemoryError as error:
        raise ModelError(
            f"finding the shapes of the model's tensors takes over {_CHECKING_BYTES >> 30} GiB: one of them comes "
            "from a very long list (Range, Concat); export the model without it"
        ) from error
    except _REFUSALS as error:
        raise ModelError(f"the model is not valid ONNX: {_reason(error)}; correct or export it again") from error
    inferred.graph.value_info.sort(key=lambda value: value.name)
    return inferred
