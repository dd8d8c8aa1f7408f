"""TensorRT's library: loaded once, its version, and its messages and layer records as text."""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware import cuda
from enginesmith.core.requirements import Library, Requirement
from enginesmith.core.text import join_first
from enginesmith.core.types import Engine, Untyped
from enginesmith.descriptions import find_library

# Maximum number of problems, and of their remedies, that an error names.
_MAX_PROBLEMS = 5
_SOURCE = re.compile(r"\s*In \w+ at /[^\s)]+|^\[\w+\.cpp::\w+::\d+\]\s*|^I\w+::\w+:\s*|\[\w+\.cpp:\d+: \w+\]\s*")
_AN_ASSERTION = re.compile(r"^(Assertion failed: )?(false|true|\w+)$")

_NO_MEMORY = r"[Oo]ut of memory|OutOfMemory"
# TensorRT 10 skips kernels that need more memory than available, with a warning. If no kernel remains, its error is
# "Could not find any implementation for node" and does not mention memory.
_NO_IMPLEMENTATION = r"[Cc]ould not find any implementation"
_TACTIC_LACKS_MEMORY = rf"{_NO_MEMORY}|insufficient memory|memory is insufficient|Requested amount of GPU memory"
_OLD_DRIVER = r"cudaError 35|driver version is insufficient"
# TensorRT-RTX 1.4 needs a GPU, of any kind, to build int8; later releases need none. "Cuda Runtime": any CUDA error.
_CUDA_ERROR = rf"{_OLD_DRIVER}|Cuda Runtime"
# TensorRT's messages and their remedies. The first match applies.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"FP32 GEMM is not supported", "use fp16"),
    (r"HW-specific datatypes", "use fp16, or a newer generation"),
    (r"workspace (limit|memory)", "raise backends.{backend}.workspace_mib, or set it to 0 (no limit)"),
    (r"Scale coefficients must all be positive", "a quantization scale underflowed to 0; floor it at float16's tiny"),
    (
        r"missing values for shape input tensor|shape inputs, but no optimization profile",
        "an input decides shapes or loops by its values, which have no range here: make it a constant of the model "
        "(source.arguments), or use another backend",
    ),
    (
        r"condition is not a build-time constant",
        "give the dims that decide the branch (such as the batch of a recurrent cell) fixed sizes under inputs",
    ),
    (r"optimization profile|profile \d+|MIN<=OPT<=MAX", "make dims (min, opt, max) fit the model's inputs"),
    (_NO_MEMORY, "free GPU memory, or lower the largest shapes in dims"),
    (
        _NO_IMPLEMENTATION,
        "no kernel supports this operator with these types and shapes: keep its node in fp32 (quantization.overrides), "
        "or raise backends.{backend}.workspace_mib, because some kernels need more",
    ),
    (_OLD_DRIVER, "update the NVIDIA driver, or use a node with a GPU"),
    (r"version|[Ii]ncompatible|magicTag", "build the engine again with the installed version"),
)
_REWRITE = "rewrite those operators, or use another backend (backends: {onnxruntime: {}})"
_NO_REMEDY = "leave that part of the model in another precision, or report it with the log"


def clean(text: str) -> str:
    """A message of TensorRT without places in its source code, on one line."""
    return _SOURCE.sub("", " ".join(text.split())).replace(" ()", "").strip()


def builder_reason(title: str, backend: str, messages: Iterable[tuple[str, str]]) -> str:
    """Why a build or a load failed: every distinct error in the log, and the remedy for the first known one."""
    log = [*messages]
    errors = list(dict.fromkeys(clean(text) for level, text in log if "ERROR" in level))
    message = "; ".join(errors) or "it gave no reason"
    if _find_disguised_error(log):
        memory_message = next(clean(text) for _, text in log if re.search(_TACTIC_LACKS_MEMORY, text))
        message, remedy = f"{message} (no kernel fits the memory: {memory_message})", dict(_REMEDIES)[_NO_MEMORY]
    elif failure_kind(log) == "no-node":
        remedy = dict(_REMEDIES)[_OLD_DRIVER]
    else:
        remedy = next((cure_text for pattern, cure_text in _REMEDIES if re.search(pattern, message)), _NO_REMEDY)
    return f"{title} failed: {message}; remedy: {remedy.format(backend=backend)}"


def failure_kind(messages: Iterable[tuple[str, str]]) -> str:
    """The `StepError.kind` of a failed build: 'memory' (TensorRT reports that the GPU or the host lacks it, or finds no
    kernel after it skipped some for lack of it), 'no-node' (a CUDA error, and this host has no GPU), or ''."""
    log = [*messages]
    error_text = "\n".join(text for level, text in log if "ERROR" in level)
    if _find_disguised_error(log) or re.search(_NO_MEMORY, error_text):
        return "memory"
    return "no-node" if re.search(_CUDA_ERROR, error_text) and not cuda.gpus() else ""


def _find_disguised_error(messages: Sequence[tuple[str, str]]) -> bool:
    has_error = any(re.search(_NO_IMPLEMENTATION, text) for level, text in messages if "ERROR" in level)
    return has_error and any(re.search(_TACTIC_LACKS_MEMORY, text) for _, text in messages)


def parser_reason(title: str, backend: str, problems: Sequence[Untyped]) -> str:
    """The message for a parser's `ParserError`s: a clause for each unsupported node, and the remedies."""
    clauses = list(dict.fromkeys(_clause(problem) for problem in problems))
    return (
        f"{title} cannot take the model: {join_first(clauses, _MAX_PROBLEMS, '; ') or 'it gave no reason'}; "
        f"{'; '.join(dict.fromkeys(_cure(problem, backend) for problem in problems[:_MAX_PROBLEMS])) or _REWRITE}"
    )


def _cure(problem: Untyped, backend: str) -> str:
    """The remedy for one `ParserError`."""
    node, kind, description = problem.node_name(), problem.code().name, problem.desc()
    if re.search(r"[Pp]lugin not found|getPluginCreator|plugin creator", description):
        if backend == "tensorrt":
            return f"name its library in source.libraries; or {_REWRITE}"
        return f"full tensorrt takes plugins, {backend} takes none; or {_REWRITE}"
    if kind == "UNSUPPORTED_NODE_DATATYPE":
        return f"leave the node in fp32: quantization.overrides: [{{match: {node!r}, precision: fp32}}]; or {_REWRITE}"
    if kind == "UNSUPPORTED_NODE_DYNAMIC":
        return f"give one size (min = max) to the dims it depends on; or {_REWRITE}"
    return _REWRITE


def _clause(problem: Untyped) -> str:
    node, operator, description = problem.node_name(), problem.node_operator(), clean(problem.desc())
    code = problem.code().name.lower().replace("_", " ")
    description = code if _AN_ASSERTION.match(description) else f"{description} ({code})"
    return f"node {node!r} ({operator}): {description}" if operator else description


@cache
def recorder(module: str) -> Untyped:
    """The process's one TensorRT logger for that module (TensorRT ignores later ones).

    It keeps warnings and errors in `messages`, as (severity, text), and prints all but verbose output on stderr.
    """
    trt = importlib.import_module(module)

    class LogRecorder(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Untyped, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                self.messages.append((severity.name, message))
            if severity <= trt.ILogger.INFO:
                print(f"[{severity.name}] {message}", file=sys.stderr)

    return LogRecorder()


# A plugin library is code that runs in the builder's and the server's process. It is stored with the graph and the
# engine, named by its digest, which is checked before it is loaded. TensorRT finds new weights by the initializers'
# names, after `builders.onnx_graphs.structure` found no other difference. Refitting was never run on a GPU.

# A library with plugins must have one of these functions: `IPluginRegistry::loadLibrary` of NvInferRuntime.h.
ENTRIES = ("getCreators", "getPluginCreators")
_SHOWN = 5


@dataclass(frozen=True)
class Opening:
    """How to open an engine. gpu: index of the GPU.

    streamed_budget_bytes: bytes of streamed weights that the GPU keeps; 0 is TensorRT's choice, None for an engine
    without streaming.  cuda_graphs: replay a CUDA graph for each shape.  own_graphs: TensorRT-RTX captures it itself.
    host_code: whether the engine has code for the host (version-compatible ones do).  stripped: whether its weights
    come from the ONNX model.  prepare: called with runtime and engine before the engine is loaded (for plugins).
    """

    gpu: int
    streamed_budget_bytes: int | None = None
    cuda_graphs: bool = False
    own_graphs: bool = False
    host_code: bool = False
    stripped: bool = False
    prepare: Callable[[Untyped, Engine], None] = lambda _runtime, _engine: None


def load(owner: Untyped, libraries: Iterable[Requirement], folder: Path) -> None:
    """Load the plugin libraries among `libraries`, from the files in `folder` named by digest, into the registry of
    `owner`, a builder or a runtime. Raises EnginesmithError for one that cannot be loaded, and as `find_library`."""
    plugins = [library for library in libraries if isinstance(library, Library) and library.entry in ENTRIES]
    for library in plugins:
        if owner.get_plugin_registry().load_library(str(find_library(folder, library))) is None:
            raise EnginesmithError(
                f"plugin library {library.name} cannot be loaded, or its plugins are registered already; it must be "
                "built for this release of TensorRT"
            )


def refit(trt: Untyped, logger: Untyped, cuda_engine: Untyped, model: Path) -> None:
    """Load an ONNX model's weights into an engine. Raises EnginesmithError naming missing or unsuitable weights."""
    refitter = trt.Refitter(cuda_engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(model)):
        problems = [clean(parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise EnginesmithError(
            f"the weights of {model.name} do not fit: {_reason(problems, logger)}; build the engine again"
        )
    missing_names = refitter.get_missing_weights()
    if missing_names or not refitter.refit_cuda_engine():
        reason = f"{model.name} lacks {join_first(missing_names, _SHOWN)}" if missing_names else _reason([], logger)
        raise EnginesmithError(f"the engine did not accept the new weights: {reason}; build it again")


def serialize_engine(trt: Untyped, cuda_engine: Untyped, logger: Untyped) -> bytes:
    """A loaded engine as bytes, with its weights, still refittable. Raises EnginesmithError with TensorRT's reason."""
    config = cuda_engine.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    config.set_flag(trt.SerializationFlag.INCLUDE_REFIT)
    host_memory = cuda_engine.serialize_with_config(config)
    if host_memory is None:
        raise EnginesmithError(builder_reason("the refitted engine", "tensorrt", logger.messages))
    return bytes(host_memory)


def _reason(problems: list[str], logger: Untyped) -> str:
    errors = [clean(text) for level, text in logger.messages if "ERROR" in level]
    return "; ".join(dict.fromkeys([*problems, *errors])) or "TensorRT gives no reason"
