"""Compiles a graph with TVM, and runs the result."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import helper, numpy_helper

from builders.backends import request_checks
from builders.onnx_graphs.bodies import Names, plain, set_items, walk_nodes
from builders.onnx_graphs.rewriting import attributes_of
from builders.onnx_graphs.structure import settle_shapes
from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.hardware.cpu_kinds import level_of
from enginesmith.core.types import BuildRequest, Engine, Session, Untyped

if TYPE_CHECKING:
    import onnx

# Most characters of the compiler's message that an error quotes.
_LONGEST = 1000
_REMEDY = "rewrite that part of the model, or use another backend"
# No build id, no symbols: the linker would write the names of temporary files into the engine.
_LINKER = ("-Wl,--build-id=none", "-s")


def compile_model(request: BuildRequest, model: Path, workdir: Path) -> Path:
    """WORKDIR/engine.so, compiled from `model`. Raises ModelError when TVM refuses it, naming the node if known."""
    path = workdir / "engine.so"
    try:
        _compile_module(request, model).export_library(str(path), options=list(_LINKER))
    except RuntimeError as error:
        raise ModelError(f"TVM cannot link the engine: {_short(str(error))}") from error
    return path


def _compile_module(request: BuildRequest, model: Path) -> Untyped:
    """TVM's executable of the model."""
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    proto, names = plain(model)
    # Write the size of each dim that has one size in all profiles into the graph.
    fixed_sizes = {repr(dim): low for dim, (low, high) in request_checks.sizes(request).items() if low == high}
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and (size := fixed_sizes.get(names.original_names.get(dim.dim_param, ""))):
                dim.dim_value = size
    # TVM's importer ignores some attributes and inputs; the compiled node then computes something else, as ONNX's
    # node tests show.
    for node in walk_nodes(proto.graph):
        if reason := _find_ignored(node):
            raise ModelError(f"TVM cannot compile the model: {names.restore(node.name)}: {reason}")
    settle_shapes(proto)
    rewrite_ranges(proto)
    with _own_words(proto, names):
        module = from_onnx(proto)
        _no_empty_constants(module, proto, names)
        return tvm.compile(module, tvm.target.Target({"kind": "llvm", "mcpu": level_of(request)}))


@contextmanager
def _own_words(proto: Untyped, names: Names) -> Iterator[None]:
    """Turn TVM's errors into ModelError with the model's names; an EnginesmithError stays as it is."""
    try:
        yield
    except EnginesmithError:
        raise
    except Exception as error:  # the importer and passes raise all of Python's classes, AssertionError included
        raise ModelError(f"TVM cannot compile the model: {_reason(error, proto, names)}; {_REMEDY}") from error


def _no_empty_constants(module: Untyped, proto: Untyped, names: Names) -> None:
    """Raise ModelError for a constant without elements: TVM cannot load an engine with one."""
    from tvm import relax
    from tvm.ir.expr import GenericConst

    empty_shapes: list[tuple[int, ...]] = []

    def note(value: Untyped) -> None:
        if isinstance(value, GenericConst) and 0 in getattr(value.value, "shape", ()):
            empty_shapes.append(tuple(value.value.shape))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function.body, note)
    if empty_shapes:
        weight = next(
            (names.restore(tensor.name) for tensor in proto.graph.initializer if 0 in tensor.dims), "a constant"
        )
        raise ModelError(
            f"TVM cannot compile the model: {weight} has shape {empty_shapes[0]} and so no elements; {_REMEDY}"
        )


def _reason(error: Exception, proto: Untyped, names: Names) -> str:
    """TVM's message with the node that the importer was reading, found in the stack frames."""
    message = names.restore(_short(str(error)) or type(error).__name__)
    node, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name in ("_construct_nodes", "_convert_subgraph"):
            node = trace.tb_frame.f_locals.get("node", node)
        trace = trace.tb_next
    if node is None:
        nodes = (node for node in proto.graph.node if "not supported" in message and node.op_type in message)
        node = next(nodes, None)
    return message if node is None else f"{names.restore(node.name)}: {message}"


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


def _find_ignored(node: "onnx.NodeProto") -> str | None:
    attributes = attributes_of(node)
    training_name = node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]
    if training_name or (node.op_type == "BatchNormalization" and attributes.get("training_mode", 0)):
        return "TVM ignores training_mode; export the model in evaluation mode"
    if node.op_type == "IsInf" and 0 in (attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)):
        return "TVM ignores detect_positive and detect_negative; compare with one infinity, or use another backend"
    if node.op_type == "RoiAlign" and attributes.get("mode", b"avg") != b"avg":
        return "TVM ignores the mode and averages; use another backend"
    return None


def rewrite_ranges(model: "onnx.ModelProto") -> None:
    """Rewrite every Range whose limit is one dimension of a tensor, in place, so that TVM knows the result's size.

    The positions of a transformer's tokens are `Range(0, size of a dimension, 1)`. TVM's importer gives that size a new
    symbol. It cannot prove the symbol equal to the dimension's, and then compiles no sum of the two. The exclusive
    running sum of as many ones has the same numbers, and its size is the dimension's own symbol.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    values = {tensor.name: tensor for tensor in graph.initializer}
    unit = numpy_helper.from_array(np.array([1], np.int64))
    nodes = []
    for node in graph.node:
        size = _one_dimension(node, producers, values)
        if size is None:
            nodes.append(node)
            continue
        ones_name, axis_name = f"{node.output[0]}_ones", f"{node.output[0]}_axis"
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), axis_name))
        nodes.append(helper.make_node("ConstantOfShape", [size], [ones_name], name=node.name, value=unit))
        nodes.append(helper.make_node("CumSum", [ones_name, axis_name], list(node.output), name=node.name, exclusive=1))
    set_items(graph.node, nodes)


def _one_dimension(
    node: "onnx.NodeProto", makers: dict[str, "onnx.NodeProto"], values: dict[str, "onnx.TensorProto"]
) -> str | None:
    """The name of the one-element vector up to which a Range counts 0, 1, 2...; None for other nodes."""
    if node.op_type != "Range" or [_scalar(values.get(node.input[index])) for index in (0, 2)] != [0, 1]:
        return None
    scalar_node = makers.get(node.input[1])
    if scalar_node is None or scalar_node.op_type not in ("Squeeze", "Reshape"):
        return None
    shape = makers.get(scalar_node.input[0])
    if shape is None or shape.op_type != "Shape":
        return None

    attributes = attributes_of(shape)
    start, end = attributes.get("start", 0), attributes.get("end", 0)
    return str(shape.output[0]) if end - start == 1 and start >= 0 else None


def _scalar(tensor: "onnx.TensorProto | None") -> int | None:
    if tensor is None:
        return None
    array = numpy_helper.to_array(tensor)
    return int(array) if array.size == 1 and array.dtype == np.int64 else None


@contextmanager
def open_engine(engine: Engine) -> Iterator[Session]:
    """Load `engine`. Raises EnginesmithError with TVM's message if that fails."""
    import tvm
    from tvm import relax

    # At a new path: TVM unloads no library, and identifies loaded ones by their path with links resolved. After the
    # file of an engine was replaced, TVM would run the functions of the earlier one.
    with tempfile.TemporaryDirectory(prefix="enginesmith-tvm-") as folder:
        path = Path(folder) / engine.path.name
        try:
            path.hardlink_to(engine.path)
        except OSError:  # another file system, or no permission to link the file
            shutil.copyfile(engine.path, path)
        try:
            entry = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())["main"]
        except (RuntimeError, ValueError, AttributeError, OSError) as error:
            raise EnginesmithError(f"TVM cannot load {engine.path.name}: {words(error)}; build it again") from error
    with closing(request_checks.FunctionSession(engine.request, "TVM", partial(_run, entry))) as session:
        yield session


def _run(main: Untyped, arrays: list[np.ndarray]) -> list[np.ndarray]:
    import tvm
    import tvm_ffi

    device_inputs = [tvm.runtime.tensor(array) for array in arrays]
    try:
        raw_outputs = main(*device_inputs)
    except (ValueError, RuntimeError, TypeError) as error:
        raise EnginesmithError(f"TVM failed while running: {words(error)}") from error
    is_single = isinstance(raw_outputs, tvm_ffi.Shape) or not isinstance(raw_outputs, Sequence)
    results = [raw_outputs] if is_single else raw_outputs
    # An output that is a shape has no `numpy`, but sizes.
    return [result.numpy() if hasattr(result, "numpy") else np.array(list(result), np.int64) for result in results]


def words(error: Exception) -> str:
    """The first line of TVM's message; the rest is its stack."""
    return str(error).strip().split("\n")[0] or type(error).__name__
