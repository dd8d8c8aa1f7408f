"""Sessions of ONNX Runtime on a CPU, and their profile by node."""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from builders.backends.optional_methods import NodeTime, RunProfile, TensorType, element_name, type_name
from builders.onnx_graphs.bodies import chain_of_additions, list_libraries
from enginesmith.core.errors import DataError, EnginesmithError, ModelError
from enginesmith.core.parsing import find, read
from enginesmith.core.requirements import LIBRARY_ENTRY
from enginesmith.core.types import Session, ShapeProfile, Tensors, TensorSpec, Untyped
from enginesmith.descriptions import find_library

if TYPE_CHECKING:
    import numpy as np
    from onnx import GraphProto, NodeProto

# Opens ONNX models with ONNX Runtime on the CPU, and turns its errors into messages with the node and the remedy.
#
# Its messages lose their status codes, source paths and C++ signatures.

# Fusions whose kernel is slower than its parts. Measured with 1.31 on MiniLM (batch 8, 64 tokens, one thread): 145 ms
# with both, 131 ms without the first, 128 ms without either; of its int8 engine 80, 73 and 69 ms.
_SLOWER_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion")
# Time in µs that threads spin while they wait for the next operator. Without spinning, a small net takes 15 to 50 µs
# longer per run; ONNX Runtime's default spins for about 20 ms after each run, on cores that builds share.
_SPIN_US = "200"
_FLOATS = {"float": "float32", "double": "float64"}  # ONNX Runtime's names that differ from numpy's
# The oldest opset with kernels in ONNX Runtime: https://onnxruntime.ai/docs/reference/compatibility.html
OLDEST_OPSET = 7
_UNKNOWN_OP = (
    re.compile(r"No Op registered for (?P<op>\w+)"),
    re.compile(r"(?<![\w.:])(?P<op>[\w.:]+)\(-?\d+\) is not a registered function"),
    re.compile(r"implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"),
)
_LONGEST_REASON = 4000
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .+? failed:)?")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ")
# A place in its source, and the text before the parentheses of a function's signature.
_PLACE = re.compile(r"(?<!\S)\S+\.(?:cc|cpp|cu|cuh|h|hpp):\d+ ")
_FUNCTION = re.compile(r"[\w\s:<>~*&,.=\[\]]*::[\w\s:<>~*&,.=\[\]]*(?=\()")
_BEHIND = re.compile(r"\s*(?:const|noexcept)\b")
_CONDITION = re.compile(r"^[^\n]*? was false\.\s*")
_PAIRS = {"(": ")", "[": "]"}


class OrtSession(Session):
    """An ONNX model opened on the CPU.

    optimized: False runs the graph exactly as written, which is what a reference needs.
    threads: threads of one operator; 0 is one per core.  level: ONNX Runtime's own name, instead of `optimized`.
    session_factory: makes ONNX Runtime's session from a file and its options, instead of one on the CPU.
    name: the model's name in errors; default: its file's name.
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
        session_factory: Callable[[Path, Untyped], Untyped] | None = None,
        name: str | None = None,
        profiles: Sequence[ShapeProfile] = (),
    ) -> None:
        from enginesmith.arrays import InputCheck

        level = level or ("ORT_ENABLE_ALL" if optimized else "ORT_DISABLE_ALL")
        self._name = name or model.name
        self._session = (session_factory or partial(open_model, name=name))(
            model, session_options(level, threads, of=model)
        )
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


def session_options(level: str, threads: int, without: Sequence[str] = (), of: Path | None = None) -> Untyped:
    """Options of a session. level: ONNX Runtime's name of the optimization level.

    threads: per operator; 0 is one per core.  without: optimizers to leave out, besides those that make a graph slower.
    of: a graph whose libraries of operators are checked and opened. Raises ModelError for a library that ONNX Runtime
    does not accept, and as `find_library` does.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # it also raises the errors that it logs
    disabled_names = ";".join((*_SLOWER_FUSIONS, *without))
    options.add_session_config_entry("optimization.disable_specified_optimizers", disabled_names)
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    for library in list_libraries(of).libraries if of else ():
        if library.entry == LIBRARY_ENTRY:
            path = find_library(of.parent, library)  # type: ignore[union-attr]  # there is a graph
            try:
                options.register_custom_ops_library(str(path))
            except failures() as error:
                raise ModelError(f"the library {library.name} cannot be opened: {words_of(error)}") from error
    return options


def open_model(model: Path, options: Untyped, name: str | None = None, source: str | bytes | None = None) -> Untyped:
    """ONNX Runtime's session on the CPU. Raises ModelError with its reason.

    name: the model's name in the error; default: its file's name.  source: opened instead of the file.
    """
    import onnxruntime as ort

    try:
        return ort.InferenceSession(source or str(model), options, providers=["CPUExecutionProvider"])
    except failures() as error:
        raise ModelError(f"{name or model.name}: {why_unreadable(error, model)}") from error


def _spec(model: Path, value: Untyped) -> TensorSpec:
    match = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if not match:
        raise ModelError(f"{model.name}: {value.name!r} is a {value.type}; only tensors can be inputs and outputs")
    shape = tuple(f"{value.name}.{axis}" if dim is None else dim for axis, dim in enumerate(value.shape))
    return TensorSpec(value.name, _FLOATS.get(match[1], match[1]), shape)


def failures() -> tuple[type[Exception], ...]:
    """The classes of ONNX Runtime's errors, which have no base class in common."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(cls for cls in vars(state).values() if isinstance(cls, type) and issubclass(cls, Exception))


def words_of(error: Exception) -> str:
    """ONNX Runtime's message without status code, stack trace, and places and signatures of its source."""
    text = _STATUS.sub("", str(error)).partition("\nStacktrace:")[0].strip()
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."  # a model's names can be long
    text = _NODE.sub(lambda match: f"{match[1]} node {match[2]!r}: " if match[2] else f"{match[1]} node: ", text)
    while match := _PLACE.search(text):
        detail = _CONDITION.sub("", _without_signature(text[match.end() :]))
        text = text[: match.start()] + (detail or "a check in it failed")
    return text


def why_unreadable(error: Exception, model: Path) -> str:
    """Why a file could not be opened, with the remedy, and with the operator and node if they are the reason."""
    message = words_of(error)
    opset = _opset(model)
    is_old = opset is not None and opset < OLDEST_OPSET
    advice = f"export the model again with opset {OLDEST_OPSET} or later, or convert it with onnx.version_converter"
    for pattern in _UNKNOWN_OP:
        if match := pattern.search(message):
            groups = match.groupdict()
            node_name, operator = groups.get("node"), groups.get("op")
            node_text = f" (node {node_name!r})" if node_name else ""
            if is_old:
                return f"onnxruntime has no operator {operator}{node_text} of opset {opset}; {advice}"
            remedy = "leave the operator out, or use a dtype it has"
            return f"onnxruntime has no operator {operator}{node_text} for these types; {remedy}: {message}"
    return f"onnxruntime cannot read it: {message}; {advice if is_old else 'export the model again'}"


def _opset(model: Path) -> int | None:
    """The opset of ONNX's own operators in a file; None if it is unknown."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError:  # optional on nodes that run engines
        return None
    try:
        opset_imports = onnx.load(model, load_external_data=False).opset_import
    except (DecodeError, OSError, ValueError):
        return None
    return max((entry.version for entry in opset_imports if entry.domain in ("", "ai.onnx")), default=None)


def _without_signature(text: str) -> str:
    """A message without the signature of a C++ function at its start, if there is one."""
    match = _FUNCTION.match(text)
    if match is None:
        return text
    remainder = _behind_pair(text[match.end() :])
    while remainder.startswith(("(", "::")):  # operator()(...), and lambdas in functions
        remainder = _behind_pair(remainder[remainder.find("(") :]).removeprefix(">") if "(" in remainder else ""
    remainder = _BEHIND.sub("", remainder).lstrip()
    return (_behind_pair(remainder) if remainder.startswith("[with ") else remainder).lstrip()


def _behind_pair(text: str) -> str:
    """The text after the bracket that closes the one at the start."""
    opening_bracket, closing_bracket, depth = text[:1], _PAIRS.get(text[:1], ""), 0
    for index, char in enumerate(text):
        depth += (char == opening_bracket) - (char == closing_bracket)
        if not depth:
            return text[index + 1 :]
    return ""


# Reads the trace that ONNX Runtime's profiler writes: time, types and shapes of each node, run by run.
#
# The trace is a list of events (Chrome's trace format, times in microseconds). A run is a 'model_run' of category
# 'Session'; the kernels of a run are the events of category 'Node' named '..._kernel_time' within its time.
#
# An event has the shapes of its inputs and outputs, except of weights that the kernel has packed. Therefore the inputs
# are read from the graph as it is executed, which the session writes too: its constants, and the outputs of other
# events.
#
# Around each kernel the profiler also records shapes and threads, which takes as long as a small kernel. Therefore
# nodes that do almost nothing are timed in the same way, and their median is subtracted from every time.

_END = "_kernel_time"
_QUICKER = 0.5  # the share of the runs that counts
_EMPTY_NODES, _EMPTY_RUNS = 16, 20


@dataclass(frozen=True)
class TraceEvent:
    """An event of the trace. name, category: as the runtime writes them.  begun, taken: start, duration (microseconds).

    operator: type of the node; '' for an event without a node.
    """

    name: str
    category: str
    begun: float
    taken: float
    operator: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @property
    def ended(self) -> float:
        """The end of the event, in microseconds."""
        return self.begun + self.taken

    @classmethod
    def from_json(cls, event: object) -> "TraceEvent":
        """An event with a time. Raises DataError for anything else."""
        return cls(
            find(event, "name", str, ""),
            find(event, "cat", str, ""),
            read(event, "ts", float),
            find(event, "dur", float, 0.0),
            find(event, "args.op_name", str, ""),
            _read_types(find(event, "args.input_type_shape", list, [])),
            _read_types(find(event, "args.output_type_shape", list, [])),
        )


def profile_nodes(path: Path, inputs: "Tensors", runs: int, workdir: Path, level: str, threads: int) -> RunProfile:
    """Times of the nodes of a model on disk. level, threads: of its session, as `session_options` takes them.

    Raises ModelError for a model that cannot be opened, and for a trace that cannot be read.
    """
    run_profile = _trace_run(path, inputs, runs, workdir, session_options(level, threads, of=path))
    empty_s = statistics.median(node.seconds for node in _empty(workdir, session_options(level, threads)).nodes)
    nodes = [replace(node, seconds=max(node.seconds - empty_s, 0.0)) for node in run_profile.nodes]
    return replace(run_profile, nodes=nodes)


def _trace_run(path: Path, inputs: "Tensors", runs: int, workdir: Path, options: Untyped) -> RunProfile:
    graph_path = workdir / f"executed-{path.stem}.onnx"
    options.enable_profiling = True
    options.profile_file_prefix = str(workdir / f"profile-{path.stem}")
    options.optimized_model_filepath = str(graph_path)
    weights_name = f"executed-{path.stem}.weights"
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights_name)
    session = open_model(path, options)
    discard_count = max(2, runs // 5)
    for _ in range(discard_count + runs):
        session.run(None, dict(inputs))
    input_types = {name: (array.dtype.name, tuple(array.shape)) for name, array in inputs.items()}
    return read_trace(Path(session.end_profiling()), graph_path, input_types, discard_count)


def _empty(workdir: Path, options: Untyped) -> RunProfile:
    """The profile of a graph of successive additions of one number."""
    import numpy as np

    path = workdir / "empty.onnx"
    path.write_bytes(chain_of_additions(_EMPTY_NODES).SerializeToString())
    unit = np.ones(1, np.float32)
    return _trace_run(path, {"x": unit, "c": unit}, _EMPTY_RUNS, workdir, options)


def read_trace(path: Path, graph_path: Path, inputs: Mapping[str, TensorType], discard: int) -> RunProfile:
    """Mean times over the quicker half of the runs after the first `discard`: slow runs were interrupted.

    graph_path: the optimized graph that the session wrote.  inputs: types and shapes of the run's inputs.
    Raises ModelError for a trace that cannot be read, or has no run: this version of the runtime writes another form.
    """
    try:
        trace_events = [TraceEvent.from_json(event) for event in json.loads(path.read_bytes()) if "ts" in event]
    except (OSError, ValueError, TypeError, AttributeError, DataError) as error:
        raise ModelError(f"onnxruntime's profile {path.name} cannot be read: {error}") from error
    events = sorted(trace_events, key=lambda event: event.begun)
    runs = [event for event in events if event.name == "model_run"][discard:]
    if not runs:
        raise ModelError(
            "onnxruntime's profile contains no run; this version of onnxruntime writes profiles in another form"
        )
    kernels = [event for event in events if event.category == "Node" and event.name.endswith(_END)]
    quickest_runs = sorted(runs, key=lambda event: event.taken)[: max(1, round(_QUICKER * len(runs)))]
    node_events = [
        _outermost([event for event in kernels if run.begun <= event.begun <= run.ended]) for run in quickest_runs
    ]
    nodes = []
    for spans in zip(*node_events, strict=False):  # one node in all runs
        span, seconds = spans[0], sum(event.taken for event in spans) / len(spans) * 1e-6
        nodes.append(NodeTime(span.name.removesuffix(_END), span.operator, seconds, span.inputs, span.outputs))
    whole_s = sum(event.taken for event in quickest_runs) / len(quickest_runs) * 1e-6
    return RunProfile(_with_inputs(nodes, graph_path, inputs), len(quickest_runs), whole_s)


def _outermost(kernels: Sequence[TraceEvent]) -> list[TraceEvent]:
    """The kernels, without kernels inside If and Loop: the time of those nodes includes them."""
    outer_events: list[TraceEvent] = []
    for kernel in kernels:
        if not outer_events or kernel.ended > outer_events[-1].ended or kernel.begun > outer_events[-1].ended:
            outer_events.append(kernel)
    return outer_events


def _with_inputs(nodes: Sequence[NodeTime], graph_path: Path, inputs: Mapping[str, TensorType]) -> list[NodeTime]:
    """The nodes with all their inputs; a node that is not in the graph keeps the inputs of its event."""
    from builders.onnx_graphs.outline import load_outline

    graph = load_outline(graph_path).graph
    used_places = set[int]()
    node_pairs = [(node, _take_node(node, graph, used_places)) for node in nodes]
    tensor_types = {tensor.name: (element_name(tensor.data_type), tuple(tensor.dims)) for tensor in graph.initializer}
    tensor_types |= inputs
    for node, graph_node in node_pairs:
        if graph_node is not None:
            tensor_types |= dict(zip([name for name in graph_node.output if name], node.outputs, strict=False))
    return [
        replace(node, inputs=tuple(tensor_types[name] for name in graph_node.input if name in tensor_types))
        if graph_node is not None
        else node
        for node, graph_node in node_pairs
    ]


def _take_node(node: NodeTime, graph: "GraphProto", used_places: set[int]) -> "NodeProto | None":
    """The graph's node of this name that is not in `used_places`, to which its place is added; None without one.

    The trace calls a node without a name by its operator and a number: that is the next such node.
    """
    unused_nodes: list[tuple[int, NodeProto]]
    unused_nodes = [(i, graph_node) for i, graph_node in enumerate(graph.node) if i not in used_places]
    for name in (node.name, ""):
        for i, graph_node in unused_nodes:
            if (graph_node.op_type, graph_node.name) == (node.op_type, name):
                used_places.add(i)
                return graph_node
    return None


def _read_types(items: Sequence[Mapping[str, Sequence[int]]]) -> tuple[TensorType, ...]:
    return tuple((type_name(kind), tuple(shape)) for entry in items for kind, shape in entry.items())
