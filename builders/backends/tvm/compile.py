"""An ONNX file through TVM's Relax to a shared library, and what TVM says, in the model's own words."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from builders.backends import profile_bounds
from builders.backends.tvm.ignored import check_heeded
from builders.backends.tvm.ranges import countable
from builders.onnx_graphs.plain_names import Names, plain
from enginery.core.errors import EngineryError, ModelError
from enginery.core.hardware.cpu_levels import level_of
from enginery.core.types import BuildRequest
from enginery.core.untyped import Untyped

_LONGEST = 1000
_REMEDY = "rewrite that part of the model, or use another backend"
# No build id, no symbols: the linker would write the names of temporary files into the engine.
_LINKER = ("-Wl,--build-id=none", "-s")


def compile_model(
    request: BuildRequest, model: Path, workdir: Path, *, fast_math: bool, tune_s: float
) -> tuple[Path, tuple[str, ...]]:
    """WORKDIR/engine.so, compiled from `model`, and notes; for a GPU with cubins of its generation, or not at all.

    tune_s: how long a CPU's kernels are searched for (`builders.backends.tvm.tuning`), in seconds.
    Raises ModelError when TVM refuses the model, naming the node where that is known; EngineryError when the GPU's code
    cannot be compiled.
    """
    path = workdir / "engine.so"
    if request.target.is_cpu:
        target = {"kind": "llvm", "mcpu": level_of(request)}
        search = _Search(workdir, tune_s)
        _link_library(_compile_module(request, model, target, search if tune_s else None), path)
        return path, search.notes
    from builders.backends.tvm.cuda import CubinCompiler

    compiler = CubinCompiler(request.target.sm, workdir, fast_math=fast_math)
    host = {"kind": "llvm", "mcpu": level_of(request)}
    _link_library(
        _compile_module(request, model, {"kind": "cuda", "arch": request.target.sm, "host": host}, None), path
    )
    compiler.check_packed(path)
    return path, ()


@dataclass
class _Search:
    """Tuning for so long, and what came of it."""

    workdir: Path
    seconds: float
    notes: tuple[str, ...] = ()

    def __call__(self, module: Untyped, target: dict[str, Untyped]) -> Untyped:
        import tvm

        from builders.backends.tvm.tuning import schedule_kernels

        counted = tvm.target.Target({**target, "num-cores": os.cpu_count() or 1})
        module, self.notes = schedule_kernels(module, counted, self.workdir, self.seconds)
        return module


def _compile_module(
    request: BuildRequest,
    model: Path,
    target: dict[str, Untyped],
    search: Callable[[Untyped, dict[str, Untyped]], Untyped] | None,
) -> Untyped:
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    proto, names = plain(model)
    _fix_sizes(proto, request, names)
    check_heeded(proto, names)
    countable(proto)
    with _own_words(proto, names):
        module = from_onnx(proto)
        _no_empty_constants(module, proto, names)
    if search:
        module = search(module, target)
    with _own_words(proto, names):
        return tvm.compile(module, tvm.target.Target(target))


@contextmanager
def _own_words(proto: Untyped, names: Names) -> Iterator[None]:
    """What TVM says of a model as a ModelError; of a compiler that TVM called as it is."""
    try:
        yield
    except EngineryError:
        raise
    except Exception as error:  # its importer and passes raise all of Python's classes, AssertionError included
        raise ModelError(f"TVM cannot compile the model: {_reason(error, proto, names)}; {_REMEDY}") from error


def _no_empty_constants(module: Untyped, proto: Untyped, names: Names) -> None:
    """TVM writes a constant without elements into an engine that it then cannot load."""
    from tvm import relax
    from tvm.ir.expr import GenericConst

    found: list[tuple[int, ...]] = []

    def note(value: Untyped) -> None:
        if isinstance(value, GenericConst) and 0 in getattr(value.value, "shape", ()):
            found.append(tuple(value.value.shape))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function.body, note)
    if found:
        weight = next((names.restore(item.name) for item in proto.graph.initializer if 0 in item.dims), "a constant")
        raise ModelError(f"TVM cannot compile the model: {weight} has shape {found[0]} and so no elements; {_REMEDY}")


def _fix_sizes(proto: Untyped, request: BuildRequest, names: Names) -> None:
    """A dim that every profile gives the same one size is that size: only such kernels can be tuned."""
    fixed = {repr(dim): low for dim, (low, high) in profile_bounds.sizes(request).items() if low == high}
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and (size := fixed.get(names.own.get(dim.dim_param, ""))):
                dim.dim_value = size


def _link_library(built: Untyped, path: Path) -> None:
    try:
        built.export_library(str(path), options=list(_LINKER))
    except RuntimeError as error:
        raise ModelError(f"TVM cannot link the engine: {_short(str(error))}") from error


def _reason(error: Exception, proto: Untyped, names: Names) -> str:
    words = names.restore(_short(str(error)) or type(error).__name__)
    node = _at(error.__traceback__)
    if node is None:
        unknown = [node for node in proto.graph.node if "not supported" in words and node.op_type in words]
        node = unknown[0] if unknown else None
    return words if node is None else f"{names.restore(node.name)}: {words}"


def _at(place: TracebackType | None) -> Untyped:
    """The node that TVM's importer was at, which it tells nobody."""
    found = None
    while place is not None:
        if place.tb_frame.f_code.co_name in ("_construct_nodes", "_convert_subgraph"):
            found = place.tb_frame.f_locals.get("node", found)
        place = place.tb_next
    return found


def _short(said: str) -> str:
    return " ".join(said.split())[:_LONGEST]
