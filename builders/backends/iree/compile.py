"""Compiles an ONNX file with IREE's importer and compiler; their errors have the model's own names."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

from builders.backends.iree.miscompilations import wrong_loops, wrong_operators
from builders.backends.iree.rewrites import rewrite
from builders.onnx_graphs.plain_names import Names, plain
from enginesmith.core.errors import ModelError, StepError

_MODULE = "model.mlirbc"
_LONGEST = 1000
_ERROR = re.compile(r'error: (?:loc\("(?P<node>[^"]*)"\): )?(?P<words>[^\n]*)')
# Behind its reason it prints the operation, as its own passes have left it.
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
    """The first error that the compiler printed, with the node's own name and operator where it names the node."""
    found = _ERROR.search(said)
    if found is None:
        return " ".join(names.restore(said).split())[-_LONGEST:] or "it gave no reason"
    node, said = found.groups()
    words = _AFTER.sub("", said)[:_LONGEST]
    return names.restore(f"{node}: {words}" if node else words)


def _import(model: Path, module: Path) -> Names:
    """Write `model` to the file `module` as MLIR bytecode; the model's own names.

    Raises ModelError for a model that the importer refuses, or that IREE would compile into something else.
    """
    import onnx
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    proto, names = plain(model)
    try:
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        opset = max(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
        wrong = next(chain(wrong_loops(proto.graph), wrong_operators(proto.graph, opset)), None)
        if wrong is not None:
            raise ModelError(f"IREE computes something else than the model: {names.restore(wrong)}, or use onnxruntime")
        rewrite(proto.graph, opset)
        info = onnx_importer.ModelInfo(onnx.shape_inference.infer_shapes(proto, data_prop=True))
        operation = info.create_module(context=ir.Context()).operation
        onnx_importer.NodeImporter.define_function(info.main_graph, operation).import_all()
    except (onnx_importer.OnnxImportError, onnx.shape_inference.InferenceError, ir.MLIRError) as error:
        words = names.restore(" ".join(str(error).split()))[:_LONGEST]
        raise ModelError(f"IREE cannot import the model: {words}; {_REMEDY}") from error
    with module.open("wb") as stream:
        operation.write_bytecode(stream)
    return names


def _compiler() -> Path:
    import iree.compiler

    return Path(iree.compiler.__file__).parent / "_mlir_libs" / "iree-compile"
