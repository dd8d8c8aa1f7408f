"""Opens ONNX models with ONNX Runtime on the CPU, and makes its errors what, which node and remedy.

Its messages are given without status codes, source paths and C++ signatures.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.types import Session, ShapeProfile, Tensors, TensorSpec, Untyped

if TYPE_CHECKING:
    import numpy as np

# Fusions whose kernel is slower than its parts. Measured with 1.31 on MiniLM (batch 8, 64 tokens, one thread): 145 ms
# with both, 131 ms without the first, 128 ms without either; of its int8 engine 80, 73 and 69 ms.
_SLOWER_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion")
# Threads that wait for the next operator stay awake so long. Asleep at once, they cost a small net 15 to 50 µs a run to
# wake; ONNX Runtime's default keeps them busy for some 20 ms after each run, on cores that builds share.
_SPIN_US = "200"
_FLOATS = {"float": "float32", "double": "float64"}  # ONNX Runtime's names that differ from numpy's
# ONNX Runtime's kernels begin there: https://onnxruntime.ai/docs/reference/compatibility.html
OLDEST_OPSET = 7
_UNKNOWN_OP = (
    re.compile(r"No Op registered for (?P<op>\w+)"),
    re.compile(r"(?<![\w.:])(?P<op>[\w.:]+)\(-?\d+\) is not a registered function"),
    re.compile(r"implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"),
)
_LONGEST_REASON = 4000
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .+? failed:)?")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ")
# A place in its source, and what may stand before the parentheses of a function's signature.
_PLACE = re.compile(r"(?<!\S)\S+\.(?:cc|cpp|cu|cuh|h|hpp):\d+ ")
_FUNCTION = re.compile(r"[\w\s:<>~*&,.=\[\]]*::[\w\s:<>~*&,.=\[\]]*(?=\()")
_BEHIND = re.compile(r"\s*(?:const|noexcept)\b")
_CONDITION = re.compile(r"^[^\n]*? was false\.\s*")
_PAIRS = {"(": ")", "[": "]"}


class OrtSession(Session):
    """An ONNX model opened on the CPU.

    optimized: False runs the graph exactly as written, which is what a reference needs.
    threads: threads of one operator; 0 is one per core.  level: ONNX Runtime's own name, instead of `optimized`.
    opens: makes ONNX Runtime's session from a file and its options, instead of one on the CPU.
    name: what errors call the model; default: its file's name.
    profiles: shapes that it takes; none means every shape of its inputs.
    Raises ModelError, naming the operator where that is the reason, when the model cannot be read or run.
    """

    def __init__(
        self,
        model: Path,
        *,
        optimized: bool = True,
        threads: int = 0,
        level: str | None = None,
        opens: Callable[[Path, Untyped], Untyped] | None = None,
        name: str | None = None,
        profiles: Sequence[ShapeProfile] = (),
    ) -> None:
        from enginesmith.arrays import InputCheck

        level = level or ("ORT_ENABLE_ALL" if optimized else "ORT_DISABLE_ALL")
        self._name = name or model.name
        self._session = (opens or partial(open_model, name=name))(model, session_options(level, threads))
        self.inputs: Sequence[TensorSpec] = [_spec(model, value) for value in self._session.get_inputs()]
        self.outputs: Sequence[TensorSpec] = [_spec(model, value) for value in self._session.get_outputs()]
        self._output_names = [spec.name for spec in self.outputs]
        self._check = InputCheck(self.inputs, profiles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._session = None  # frees its memory

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """Run once. Raises DataError for arrays that do not fit, ModelError when an operator fails on them."""
        self._check_call(inputs)
        names = self._output_names
        try:
            return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))
        except failures() as error:
            raise ModelError(f"{self._name}: onnxruntime failed while running: {words_of(error)}") from error

    def prepare_call(self, inputs: Tensors) -> Callable[[], object]:
        """ONNX Runtime's own call on these inputs, checked here. Raises DataError as `run` does."""
        self._check_call(inputs)
        return partial(self._session.run, self._output_names, dict(inputs))

    def _check_call(self, inputs: Tensors) -> None:
        if self._session is None:
            raise EnginesmithError(f"{self._name}: the session is closed; open it again")
        self._check(inputs)


def session_options(level: str, threads: int, without: Sequence[str] = ()) -> Untyped:
    """Options of a session. level: ONNX Runtime's own name.  threads: of one operator; 0 is one per core.

    without: names of optimizers to leave out, besides those that make a graph slower.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what it logs as an error it also raises
    left_out = ";".join((*_SLOWER_FUSIONS, *without))
    options.add_session_config_entry("optimization.disable_specified_optimizers", left_out)
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    return options


def open_model(model: Path, options: Untyped, name: str | None = None, source: str | bytes | None = None) -> Untyped:
    """ONNX Runtime's session on the CPU. Raises ModelError with its reason.

    name: what the error calls the model; default: its file's name.  source: what is opened in place of the file.
    """
    import onnxruntime as ort

    try:
        return ort.InferenceSession(source or str(model), options, providers=["CPUExecutionProvider"])
    except failures() as error:
        raise ModelError(f"{name or model.name}: {why_unreadable(error, model)}") from error


def _spec(model: Path, value: Untyped) -> TensorSpec:
    found = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if not found:
        raise ModelError(f"{model.name}: {value.name!r} is a {value.type}; only tensors can be inputs and outputs")
    shape = tuple(f"{value.name}.{axis}" if dim is None else dim for axis, dim in enumerate(value.shape))
    return TensorSpec(value.name, _FLOATS.get(found[1], found[1]), shape)


def failures() -> tuple[type[Exception], ...]:
    """The classes of ONNX Runtime's errors, which have no base class in common."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(
        cls
        for cls in (getattr(state, name) for name in dir(state))
        if isinstance(cls, type) and issubclass(cls, Exception)
    )


def words_of(error: Exception) -> str:
    """ONNX Runtime's message without status code, stack trace, and places and signatures of its source."""
    words = _STATUS.sub("", str(error)).partition("\nStacktrace:")[0].strip()
    words = words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]} ..."  # a model's names can be long
    words = _NODE.sub(lambda found: f"{found[1]} node {found[2]!r}: " if found[2] else f"{found[1]} node: ", words)
    while found := _PLACE.search(words):
        said = _CONDITION.sub("", _without_signature(words[found.end() :]))
        words = words[: found.start()] + (said or "a check in it failed")
    return words


def why_unreadable(error: Exception, model: Path) -> str:
    """Why a file could not be opened, with the remedy, and with operator and node where one is the reason."""
    words = words_of(error)
    opset = _opset(model)
    old = opset is not None and opset < OLDEST_OPSET
    newer = f"export the model again with opset {OLDEST_OPSET} or later, or convert it with onnx.version_converter"
    for pattern in _UNKNOWN_OP:
        if found := pattern.search(words):
            groups = found.groupdict()
            node, operator = groups.get("node"), groups.get("op")
            where = f" (node {node!r})" if node else ""
            if old:
                return f"onnxruntime has no operator {operator}{where} of opset {opset}; {newer}"
            remedy = "leave the operator out, or use a dtype it has"
            return f"onnxruntime has no operator {operator}{where} for these types; {remedy}: {words}"
    return f"onnxruntime cannot read it: {words}; {newer if old else 'export the model again'}"


def _opset(model: Path) -> int | None:
    """The opset of ONNX's own operators in a file; None where that cannot be told."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError:  # who runs engines need not have it
        return None
    try:
        found = onnx.load(model, load_external_data=False).opset_import
    except (DecodeError, OSError, ValueError):
        return None
    return max((entry.version for entry in found if entry.domain in ("", "ai.onnx")), default=None)


def _without_signature(text: str) -> str:
    """A message without the signature of a C++ function at its start, if there is one."""
    found = _FUNCTION.match(text)
    if found is None:
        return text
    rest = _behind_pair(text[found.end() :])
    while rest.startswith(("(", "::")):  # operator()(...), and lambdas in functions
        rest = _behind_pair(rest[rest.find("(") :]).removeprefix(">") if "(" in rest else ""
    rest = _BEHIND.sub("", rest).lstrip()
    return (_behind_pair(rest) if rest.startswith("[with ") else rest).lstrip()


def _behind_pair(text: str) -> str:
    """What follows the bracket that closes the one at the start."""
    opening, closing, depth = text[:1], _PAIRS.get(text[:1], ""), 0
    for place, char in enumerate(text):
        depth += (char == opening) - (char == closing)
        if not depth:
            return text[place + 1 :]
    return ""
