"""An ONNX file through TVM's Relax to a shared library, and what TVM says, in the model's own words."""

from pathlib import Path
from types import TracebackType
from typing import Any

from builders.cpu_levels import level_of
from builders.errors import ModelError
from builders.plain_onnx import Names, plain
from builders.tvm.ranges import countable
from builders.types import BuildRequest

_LONGEST = 1000
_REMEDY = "rewrite that part of the model, or use another backend"
# No build id, no symbols: the linker would write the names of temporary files into the engine.
_LINKER = ("-Wl,--build-id=none", "-s")


def compile_model(request: BuildRequest, model: Path, workdir: Path, *, fast_math: bool) -> Path:
    """WORKDIR/engine.so, compiled from `model`; for a GPU with cubins of its generation in it, or not at all.

    Raises ModelError when TVM refuses the model, naming the node where that is known; EngineryError when the GPU's code
    cannot be compiled.
    """
    path = workdir / "engine.so"
    if request.target.is_cpu:
        _linked(_compiled(model, {"kind": "llvm", "mcpu": level_of(request)}), path)
        return path
    from builders.tvm.cuda import CubinCompiler

    compiler = CubinCompiler(request.target.sm, workdir, fast_math=fast_math)
    host = {"kind": "llvm", "mcpu": level_of(request)}
    _linked(_compiled(model, {"kind": "cuda", "arch": request.target.sm, "host": host}), path)
    compiler.check_packed(path)
    return path


def _compiled(model: Path, target: dict[str, Any]) -> Any:
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    proto, names = plain(model)
    countable(proto)
    try:
        module = from_onnx(proto)
        _no_empty_constants(module, proto, names)
        return tvm.compile(module, tvm.target.Target(target))
    except ModelError:  # of a compiler that TVM called
        raise
    except Exception as error:  # its importer and passes raise all of Python's classes, AssertionError included
        raise ModelError(f"TVM cannot compile the model: {_reason(error, proto, names)}; {_REMEDY}") from error


def _no_empty_constants(module: Any, proto: Any, names: Names) -> None:
    """TVM writes a constant without elements into an engine that it then cannot load."""
    from tvm import relax
    from tvm.ir.expr import GenericConst

    found: list[tuple[int, ...]] = []

    def note(value: Any) -> None:
        if isinstance(value, GenericConst) and 0 in getattr(value.value, "shape", ()):
            found.append(tuple(value.value.shape))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function.body, note)
    if found:
        weight = next((names.restore(item.name) for item in proto.graph.initializer if 0 in item.dims), "a constant")
        raise ModelError(f"TVM cannot compile the model: {weight} has shape {found[0]} and so no elements; {_REMEDY}")


def _linked(built: Any, path: Path) -> None:
    try:
        built.export_library(str(path), options=list(_LINKER))
    except RuntimeError as error:
        raise ModelError(f"TVM cannot link the engine: {_short(str(error))}") from error


def _reason(error: Exception, proto: Any, names: Names) -> str:
    words = names.restore(_short(str(error)) or type(error).__name__)
    node = _at(error.__traceback__)
    if node is None:
        unknown = [node for node in proto.graph.node if "not supported" in words and node.op_type in words]
        node = unknown[0] if unknown else None
    return words if node is None else f"{names.restore(node.name)}: {words}"


def _at(place: TracebackType | None) -> Any:
    """The node that TVM's importer was at, which it tells nobody."""
    found = None
    while place is not None:
        if place.tb_frame.f_code.co_name in ("_construct_nodes", "_convert_subgraph"):
            found = place.tb_frame.f_locals.get("node", found)
        place = place.tb_next
    return found


def _short(said: str) -> str:
    return " ".join(said.split())[:_LONGEST]
