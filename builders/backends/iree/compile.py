"""Compiles a graph with IREE, after the rewrites that IREE needs, and runs the result."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from builders.backends.known_faults import find_faults
from builders.backends.request_checks import FunctionSession
from builders.onnx_graphs.bodies import Names, list_bodies, opset_of, plain, walk_nodes
from builders.onnx_graphs.rewriting import Scope, Writer, Writing, attributes_of, rewrite
from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError, ModelError, StepError
from enginesmith.core.types import Engine, Session, TensorSpec, Untyped

if TYPE_CHECKING:
    import onnx

# Nodes that IREE 3.13 compiles into something else, written as nodes that compute the same and that it gets right.

# Exporters write this number for 'from the end', for any size.
_BEYOND = 2**31 - 1


def rewrite_for_iree(graph: "onnx.GraphProto", opset: int) -> None:
    """Rewrite a graph whose shapes are inferred, inner graphs included, in place.

    The values that a Loop's body hands to the next iteration get the shapes of the body's inputs. Shape inference finds
    none, since ONNX lets an iteration change them. IREE does not, and takes a value without a shape for a scalar.
    """
    loops = (node for node in walk_nodes(graph) if node.op_type == "Loop")
    for body in (body for loop in loops for body in list_bodies(loop)):
        # The body takes the turn's number and the condition first, and gives the condition.
        for body_input, body_output in zip(body.input[2:], body.output[1:], strict=False):
            input_type, output_type = body_input.type.tensor_type, body_output.type.tensor_type
            if input_type.HasField("shape") and not output_type.HasField("shape"):
                output_type.shape.CopyFrom(input_type.shape)
    rewrite(graph, opset, _RULES)


def _slice(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """Let a backward Slice whose start is beyond the end begin at the last entry: IREE reads before the tensor."""
    tensor, starts_name, _, axes, steps = (*write.node.input, "", "")[:5]
    step, start = scope.array(steps), scope.array(starts_name)
    if not steps or (step is not None and (step > 0).all()) or (start is not None and (start < 0).all()):
        return None
    if step is not None and start is not None and (start_index := _begin(start, step, scope, tensor, axes)) is not None:
        start_name = write.constant(start_index)
    else:
        start_name = _computed_begin(write, scope, tensor, starts_name, axes, steps)
    write.last("Slice", [tensor, start_name, *write.node.input[2:]], list(write.node.output))
    return write.nodes


def _begin(start: Array, step: Array, scope: Scope, data: str, axes: str) -> Array | None:
    """Where a slice begins on each axis; None if it depends on unknown sizes."""
    axis, sizes = scope.array(axes) if axes else np.arange(start.size), scope.sizes(data)
    if axis is None or sizes is None:
        return None
    clipped_start = start.copy()
    for index in np.flatnonzero((step < 0) & (start >= 0)):
        size = sizes[axis[index]]
        if size is None and start[index] < _BEYOND:
            return None
        clipped_start[index] = -1 if start[index] >= _BEYOND or size is None else min(start[index], size - 1)
    return clipped_start


def _computed_begin(write: Writer, scope: Scope, data: str, starts: str, axes: str, steps: str) -> str:
    from onnx import TensorProto

    is_wide = scope.dtype(starts) != np.int32
    size, count = write("Shape", data), scope.sizes(starts)
    if not axes and count and count[0]:
        axes = write.constant(np.arange(count[0]))
    if axes:
        size = write("Gather", size, axes)
    if not is_wide:
        size = write("Cast", size, to=TensorProto.INT32)
    kind = np.int64 if is_wide else np.int32
    last_index = write("Sub", size, write.constant(np.array([1], kind)))
    is_backwards = write("Less", steps, write.constant(np.array([0], kind)))
    is_beyond = write("And", is_backwards, write("Less", last_index, starts))
    return write("Where", is_beyond, last_index, starts)


def _clip(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":  # noqa: ARG001 - the same of all types
    """Write Clip as Max, then Min: IREE's Clip turns NaN into the lower bound, and reads unsigned numbers as signed."""
    value, low, high = (*write.node.input, "", "")[:3]
    if not low and not high:
        return None
    lower_name = value if not low else write("Max", low, value) if high else ""
    clamp = ("Min", [high, lower_name]) if high else ("Max", [low, value])
    write.last(*clamp, list(write.node.output))
    return write.nodes


def _normalize(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """Write LpNormalization with a divisor of 1 where the norm is 0: IREE divides by the norm as it is."""
    attributes, kind = attributes_of(write.node), scope.dtype(write.node.input[0])
    if kind is None:
        return None
    value, axes, norm_type = write.node.input[0], [attributes.get("axis", -1)], f"ReduceL{attributes.get('p', 2)}"
    if write.opset < 18:
        norm = write(norm_type, value, axes=axes)
    else:
        norm = write(norm_type, value, write.constant(np.array(axes, np.int64)))
    is_zero = write("Equal", norm, write.constant(np.zeros((), kind)))
    divisor = write("Where", is_zero, write.constant(np.ones((), kind)), norm)
    write.last("Div", [value, divisor], list(write.node.output))
    return write.nodes


def _power(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """Rewrite Pow unless its exponent is one constant: IREE's gives NaN for negative bases and for 0 to the 0."""
    from onnx import helper

    base, exponent = write.node.input
    kind, constant = scope.dtype(base), scope.array(exponent)
    if kind is None or kind.kind not in "fV" or (constant is not None and constant.size == 1):
        return None
    if (base_values := scope.array(base)) is not None and (base_values > 0).all():
        return None
    if scope.dtype(exponent) != kind:
        exponent = write("Cast", exponent, to=helper.np_dtype_to_tensor_dtype(kind))
    zero, unit, two = (write.constant(np.array(number, kind)) for number in (0, 1, 2))
    size = write("Where", write("Equal", exponent, zero), unit, write("Pow", write("Abs", base), exponent))
    is_negative = write("Less", base, zero)
    is_odd = write("Equal", write("Abs", write("Mod", exponent, two, fmod=1)), unit)
    result = write("Where", write("And", is_negative, is_odd), write("Neg", size), size)
    is_fractional = write("Not", write("Equal", write("Floor", exponent), exponent))
    nan_name = write.constant(np.array(np.nan, kind))
    write.last("Where", [write("And", is_negative, is_fractional), nan_name, result], list(write.node.output))
    return write.nodes


def _multiply_integers(write: Writer, scope: Scope) -> "list[onnx.NodeProto] | None":
    """Add zero points of 0 to a MatMulInteger of two uint8 inputs: without them, IREE reads both as signed."""
    if len(write.node.input) > 2 or any(scope.dtype(name) != np.uint8 for name in write.node.input):
        return None
    zeros = [write.constant(np.zeros((), np.uint8)) for _ in range(2)]
    write.last("MatMulInteger", [*write.node.input, *zeros], list(write.node.output))
    return write.nodes


_RULES: dict[str, Writing] = {
    "Clip": _clip,
    "LpNormalization": _normalize,
    "MatMulInteger": _multiply_integers,
    "Pow": _power,
    "Slice": _slice,
}

# Compiles an ONNX file with IREE's importer and compiler; their errors have the model's own names.

_MODULE = "model.mlirbc"
# Most characters of the compiler's message that an error quotes.
_LONGEST = 1000
_ERROR = re.compile(r'error: (?:loc\("(?P<node>[^"]*)"\): )?(?P<words>[^\n]*)')
# Behind its reason it prints the operation, as its own passes have left it.
_AFTER = re.compile(r"( that was explicitly marked illegal)?: %\d+ = .*$")
_REMEDY = "rewrite that part of the model, or use another backend"


def compile_model(model: Path, workdir: Path, flags: list[str]) -> Path:
    """WORKDIR/engine.vmfb, compiled from `model`.

    Raises ModelError when importer or compiler refuse it, with the node if they name it; StepError for a crash.
    """
    names = _import(model, workdir / _MODULE)
    engine = workdir / "engine.vmfb"
    # names without folders: it writes them into the engine
    command = [str(_compiler()), _MODULE, "-o", engine.name, *flags]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=workdir, check=False)
    print(names.restore(process.stderr), file=sys.stderr)
    if process.returncode < 0:
        raise StepError(f"iree-compile died of signal {-process.returncode}: {reason(process.stderr, names)}", "crash")
    if process.returncode or not engine.exists():
        raise ModelError(f"IREE cannot compile the model: {reason(process.stderr, names)}; {_REMEDY}")
    return engine


def reason(text: str, names: Names) -> str:
    """The first error that the compiler printed, with the model's names of nodes (and their operators) and values."""
    match = _ERROR.search(text)
    if match is None:
        return " ".join(names.restore(text).split())[-_LONGEST:] or "it gave no reason"
    node_name, text = match.groups()
    message = _AFTER.sub("", text)[:_LONGEST]
    return names.restore(f"{node_name}: {message}" if node_name else message)


def _import(model: Path, module: Path) -> Names:
    """Write `model` to the file `module` as MLIR bytecode, and return the model's own names.

    Raises ModelError for a model that the importer refuses, or that IREE would miscompile.
    """
    import onnx
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    proto, names = plain(model)
    try:
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        for _, node, message in find_faults(proto, "iree"):
            fault_text = names.restore(f"{node.name} {message}")
            raise ModelError(f"IREE does not compile the model correctly: {fault_text}, or use onnxruntime")
        rewrite_for_iree(proto.graph, opset_of(proto))
        model_info = onnx_importer.ModelInfo(onnx.shape_inference.infer_shapes(proto, data_prop=True))
        operation = model_info.create_module(context=ir.Context()).operation
        onnx_importer.NodeImporter.define_function(model_info.main_graph, operation).import_all()
    except (onnx_importer.OnnxImportError, onnx.shape_inference.InferenceError, ir.MLIRError) as error:
        message = names.restore(" ".join(str(error).split()))[:_LONGEST]
        raise ModelError(f"IREE cannot import the model: {message}; {_REMEDY}") from error
    with module.open("wb") as stream:
        operation.write_bytecode(stream)
    return names


def _compiler() -> Path:
    import iree.compiler

    return Path(iree.compiler.__file__).parent / "_mlir_libs" / "iree-compile"


# Runs an IREE engine: on this CPU, and, never tried, on this machine's GPU.

_PLACES = re.compile(r"^Error invoking function: |[\w/<>.]+\.?[ch]?:\d+: [A-Z_]+; |; while (invoking|calling) [^;]*")


@contextmanager
def open_engine(engine: Engine, device: str) -> Iterator[Session]:
    """Load `engine` on a device, named as IREE does ('local-task', 'cuda://0').

    Raises EnginesmithError with IREE's words when it cannot be loaded.
    """
    import iree.runtime as runtime

    try:
        config = runtime.Config(device)
        module = runtime.VmModule.mmap(config.vm_instance, str(engine.path))
        context = runtime.SystemContext(vm_modules=[module], config=config)
        entry = context.modules[module.name]["main"]
    except (ValueError, RuntimeError, KeyError) as error:
        raise EnginesmithError(f"IREE cannot load {engine.path.name}: {words(error)}; build it again") from error
    with closing(FunctionSession(engine.request, "IREE", partial(_run, entry, engine.request.outputs))) as session:
        yield session


def _run(main: Untyped, outputs: Sequence[TensorSpec], arrays: list[np.ndarray]) -> list[np.ndarray]:
    try:
        raw_outputs = main(*arrays)
    except (ValueError, RuntimeError, IndexError) as error:
        raise EnginesmithError(f"IREE failed while running: {words(error)}") from error
    values = raw_outputs if isinstance(raw_outputs, tuple) else (raw_outputs,)
    results = [np.array(value.to_host()) for value in values]  # copied, because IREE owns the memory of the values
    for index, (spec, array) in enumerate(zip(outputs, results, strict=True)):
        # IREE's integers have a width and no sign; they are returned as signed ones.
        dtype = np.dtype(spec.dtype) if spec.dtype.lstrip("u").startswith("int") else array.dtype
        if array.dtype.kind in "iu" and dtype.itemsize == array.dtype.itemsize:
            results[index] = array.view(dtype)
    return results


def words(error: Exception) -> str:
    """IREE's message without the places in its source code and without its stack."""
    first_line = " ".join(str(error).split("\n")[0].split())
    return _PLACES.sub("", first_line).rstrip("; ") or type(error).__name__
