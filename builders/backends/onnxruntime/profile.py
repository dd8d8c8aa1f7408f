"""Reads the trace that ONNX Runtime's profiler writes: time, types and shapes of each node, run by run.

The trace is a list of events (Chrome's trace format, times in microseconds). A run is a 'model_run' of category
'Session'; the kernels of a run are the events of category 'Node' named '..._kernel_time' within its time.

An event has the shapes of its inputs and outputs, but not those of weights that the kernel has packed for itself. So
the inputs come from the graph as it is executed, which the session writes too: its constants, and the outputs of other
events.

While it times a kernel the profiler also writes down its shapes and threads, which takes as long as a small kernel. So
nodes that do next to nothing are timed in the same way, and the median of these is subtracted from every time.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends.onnxruntime.session import open_model, session_options
from builders.backends.optional_methods import NodeTime, RunProfile, TensorType, element_name, type_name
from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.parsing import find, read
from enginesmith.core.types import Untyped

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

    from enginesmith.core.types import Tensors

_END = "_kernel_time"
_QUICKER = 0.5  # share of the runs that counts
_EMPTY_NODES, _EMPTY_RUNS = 16, 20


@dataclass(frozen=True)
class TraceEvent:
    """An event of the trace. begun, taken: in microseconds.  inputs, outputs: as the event has them."""

    name: str
    category: str
    begun: float
    taken: float
    operator: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @property
    def ended(self) -> float:
        """In microseconds."""
        return self.begun + self.taken

    @classmethod
    def from_json(cls, item: object) -> "TraceEvent":
        """An event with a time. Raises DataError for what is none."""
        return cls(
            find(item, "name", str, ""),
            find(item, "cat", str, ""),
            read(item, "ts", float),
            find(item, "dur", float, 0.0),
            find(item, "args.op_name", str, ""),
            _read_types(find(item, "args.input_type_shape", list, [])),
            _read_types(find(item, "args.output_type_shape", list, [])),
        )


def profile_nodes(path: Path, inputs: "Tensors", runs: int, workdir: Path, level: str, threads: int) -> RunProfile:
    """Times of the nodes of a model on disk. level, threads: of its session, as `session_options` takes them.

    Raises ModelError for a model that cannot be opened, and for a trace that cannot be read.
    """
    found = _trace_run(path, inputs, runs, workdir, session_options(level, threads))
    empty = statistics.median(node.seconds for node in _empty(workdir, session_options(level, threads)).nodes)
    nodes = [replace(node, seconds=max(node.seconds - empty, 0.0)) for node in found.nodes]
    return replace(found, nodes=nodes)


def _trace_run(path: Path, inputs: "Tensors", runs: int, workdir: Path, options: Untyped) -> RunProfile:
    executed = workdir / f"executed-{path.stem}.onnx"
    options.enable_profiling = True
    options.profile_file_prefix = str(workdir / f"profile-{path.stem}")
    options.optimized_model_filepath = str(executed)
    weights = f"executed-{path.stem}.weights"
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights)
    session = open_model(path, options)
    discard = max(2, runs // 5)
    for _ in range(discard + runs):
        session.run(None, dict(inputs))
    given = {name: (array.dtype.name, tuple(array.shape)) for name, array in inputs.items()}
    return read_trace(Path(session.end_profiling()), executed, given, discard)


def _empty(workdir: Path, options: Untyped) -> RunProfile:
    """The profile of a graph of additions of one number, one after the other."""
    import numpy as np
    from onnx import parser

    names = ["x", *(f"t{index}" for index in range(1, _EMPTY_NODES)), "y"]
    lines = "".join(f"{b} = Add({a}, c) " for a, b in itertools.pairwise(names))
    text = f'<ir_version: 10, opset_import: ["": 20]> empty (float[1] x, float[1] c) => (float[1] y) {{ {lines} }}'
    path = workdir / "empty.onnx"
    path.write_bytes(parser.parse_model(text).SerializeToString())
    one = np.ones(1, np.float32)
    return _trace_run(path, {"x": one, "c": one}, _EMPTY_RUNS, workdir, options)


def read_trace(path: Path, executed: Path, inputs: Mapping[str, TensorType], discard: int) -> RunProfile:
    """Mean times over the quicker half of the runs, the first `discard` left out: slow ones were interrupted.

    executed: the optimized graph, as the session wrote it.  inputs: types and shapes of the run's. Raises ModelError
    for a trace without a run, which means that this version of the runtime writes another form.
    """
    try:
        found = [TraceEvent.from_json(item) for item in json.loads(path.read_bytes()) if "ts" in item]
    except (OSError, ValueError, TypeError, AttributeError, DataError) as error:
        raise ModelError(f"onnxruntime's profile {path.name} cannot be read: {error}") from error
    events = sorted(found, key=lambda item: item.begun)
    runs = [item for item in events if item.name == "model_run"][discard:]
    if not runs:
        raise ModelError("onnxruntime's profile holds no run; this version of onnxruntime writes another form of it")
    kernels = [item for item in events if item.category == "Node" and item.name.endswith(_END)]
    chosen = sorted(runs, key=lambda item: item.taken)[: max(1, round(_QUICKER * len(runs)))]
    inside = [_outermost([item for item in kernels if run.begun <= item.begun <= run.ended]) for run in chosen]
    nodes = []
    for same in zip(*inside, strict=False):  # one node in all runs
        first, seconds = same[0], sum(item.taken for item in same) / len(same) * 1e-6
        nodes.append(NodeTime(first.name.removesuffix(_END), first.operator, seconds, first.inputs, first.outputs))
    whole_s = sum(item.taken for item in chosen) / len(chosen) * 1e-6
    return RunProfile(_with_inputs(nodes, executed, inputs), len(chosen), whole_s)


def _outermost(kernels: Sequence[TraceEvent]) -> list[TraceEvent]:
    """The kernels without those of bodies, whose time is part of their If's or Loop's."""
    kept: list[TraceEvent] = []
    for item in kernels:
        if not kept or item.ended > kept[-1].ended or item.begun > kept[-1].ended:
            kept.append(item)
    return kept


def _with_inputs(nodes: Sequence[NodeTime], executed: Path, inputs: Mapping[str, TensorType]) -> list[NodeTime]:
    """The nodes with all of their inputs; one that the graph does not show keeps those of its event."""
    from builders.onnx_graphs.outline import load_outline

    graph = load_outline(executed).graph
    found = [(node, _take_node(node, graph, taken)) for taken in [set[int]()] for node in nodes]
    known = {item.name: (element_name(item.data_type), tuple(item.dims)) for item in graph.initializer} | dict(inputs)
    for node, told in found:
        if told is not None:
            known |= dict(zip([name for name in told.output if name], node.outputs, strict=False))
    return [
        replace(node, inputs=tuple(known[name] for name in told.input if name in known)) if told is not None else node
        for node, told in found
    ]


def _take_node(node: NodeTime, graph: "GraphProto", taken: set[int]) -> "NodeProto | None":
    """The graph's node of this name that is not in `taken`, to which its place is added; None where there is none.

    The trace calls a node without a name by its operator and a number: that is the next such node.
    """
    alike: list[tuple[int, NodeProto]]
    alike = [(i, item) for i, item in enumerate(graph.node) if i not in taken and item.op_type == node.op_type]
    named = [found for found in alike if found[1].name == node.name]
    for i, item in (named or [found for found in alike if not found[1].name])[:1]:
        taken.add(i)
        return item
    return None


def _read_types(items: Sequence[Mapping[str, Sequence[int]]]) -> tuple[TensorType, ...]:
    return tuple((type_name(kind), tuple(shape)) for item in items for kind, shape in item.items())
