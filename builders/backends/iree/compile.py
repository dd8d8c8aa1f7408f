"""An ONNX file through IREE's importer and compiler, and what either says, in the model's own words."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends.iree.miscompilations import wrong_loops, wrong_operators
from builders.backends.iree.rewrites import rewrite
from builders.onnx_graphs.plain_names import Names, plain
from enginery.core.errors import ModelError, StepError

if TYPE_CHECKING:
    import onnx

_MODULE = "model.mlirbc"
_LONGEST = 1000
_ERROR = re.compile(r'error: (?:loc\("(?P<node>[^"]*)"\): )?(?P<words>[^\n]*)')
# What it says behind its reason: the operation as it stood after passes that nobody has heard of.
_AFTER = re.compile(r"( that was explicitly marked illegal)?: %\d+ = .*$")
_REMEDY = "rewrite that part of the model, or use another backend"


def compile_model(model: Path, workdir: Path, flags: list[str]) -> Path:
    """WORKDIR/engine.vmfb, compiled from `model`.

    Raises ModelError when importer or compiler refuse it, naming the node where they do; StepError when the compiler
    crashes.
    """
    names = _import(model, workdir / _MODULE)
    engine = workdir / "engine.vmfb"
    # names without folders: it writes them into the engine
    command = [str(_compiler()), _MODULE, "-o", engine.name, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=workdir, check=False)
    print(names.restore(ended.stderr), file=sys.stderr)
    if ended.returncode < 0:
        raise StepError(f"iree-compile died of signal {-ended.returncode}: {reason(ended.stderr, names)}", "crash")
    if ended.returncode or not engine.exists():
        raise ModelError(f"IREE cannot compile the model: {reason(ended.stderr, names)}; {_REMEDY}")
    return engine


def reason(said: str, names: Names) -> str:
    """The first error that the compiler told, with the node's own name and operator where it knows the node."""
    found = _ERROR.search(said)
    if found is None:
        return " ".join(names.restore(said).split())[-_LONGEST:] or "it gave no reason"
    node, said = found.groups()
    words = _AFTER.sub("", said)[:_LONGEST]
    return names.restore(f"{node}: {words}" if node else words)


def _import(model: Path, module: Path) -> Names:
    """Write `model` to the file `module` as MLIR, in the form whose weights are not written as text."""
    import onnx
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    proto, names = plain(model)
    try:
        info = onnx_importer.ModelInfo(_infer(_rewrite_for_iree(_infer(proto), names)))
        operation = info.create_module(context=ir.Context()).operation
        onnx_importer.NodeImporter.define_function(info.main_graph, operation).import_all()
    except (onnx_importer.OnnxImportError, onnx.shape_inference.InferenceError, ir.MLIRError) as error:
        words = names.restore(" ".join(str(error).split()))[:_LONGEST]
        raise ModelError(f"IREE cannot import the model: {words}; {_REMEDY}") from error
    with module.open("wb") as stream:
        operation.write_bytecode(stream)
    return names


def _infer(proto: "onnx.ModelProto") -> "onnx.ModelProto":
    from onnx import shape_inference

    return shape_inference.infer_shapes(proto, data_prop=True)


def _rewrite_for_iree(proto: "onnx.ModelProto", names: Names) -> "onnx.ModelProto":
    """The model without what IREE compiles into something else. Raises ModelError where that is not to be had."""
    opset = max(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    found = next(chain(wrong_loops(proto.graph), wrong_operators(proto.graph, opset)), None)
    if found is not None:
        raise ModelError(f"IREE computes something else than the model: {names.restore(found)}, or use onnxruntime")
    rewrite(proto.graph, opset)
    return proto


def _compiler() -> Path:
    import iree.compiler

    return Path(iree.compiler.__file__).parent / "_mlir_libs" / "iree-compile"
