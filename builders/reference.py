"""The reference interpreter: runs ONNX graphs on this CPU as they are written.

Golden sets, calibration and all comparisons use its results, whichever backend compiles the graph. It is ONNX Runtime
without graph optimizations. It computes the part of a graph that depends on constants alone once. If this CPU's integer
kernels saturate, it uses other weights with the same meaning (`saturation`). ONNX Runtime's own backend uses it too;
its engines are compared with the reference like all others.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from google.protobuf.message import Error as ProtobufError  # type: ignore[import-untyped]

from builders.backends.onnxruntime.file import embed_shapes as embed_shapes
from builders.backends.onnxruntime.file import restore_names as restore_names
from builders.backends.onnxruntime.saturation import exact_source
from builders.backends.onnxruntime.session import OrtSession, failures, open_model
from builders.backends.onnxruntime.session import words_of as words_of
from builders.onnx_graphs.bodies import graph_bytes, has_shards
from builders.onnx_graphs.outline import load_outline
from builders.onnx_graphs.structure import cut_constant_part, cut_varying_part
from builders.onnx_graphs.weights import embed, is_external
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.types import Tensors, Untyped

# Bytes of a graph below which one thread runs it: in a call, and in a step of a model with state.
ONE_THREAD_BYTES, ONE_THREAD_STEP_BYTES = 1 << 20, 8 << 20


class ReferenceSession(OrtSession):
    """A session of a graph that is run exactly as it is written.

    threads: number for one operator; 0 for one per core.  name: the model's name in errors; default: its file's name.
    plan_buffers: whether tensors share buffers by a plan. Planning time grows with the square of the number of tensors
    (0.7 s for 1,400 nodes). Without a plan each tensor is also freed after its last use, and memory is the same.
    Weights in shards are mapped and not packed for the kernels: packing copies them into memory, beside the weights of
    the compared engine. A run without packing takes up to twice the time.
    Raises ModelError when the model cannot be read or run, naming the operator if that is the reason.
    """

    def __init__(self, model: Path, *, threads: int = 0, name: str | None = None, plan_buffers: bool = True) -> None:
        def open_session(path: Path, options: Untyped) -> Untyped:
            options.enable_mem_reuse = plan_buffers
            if has_shards(path):
                options.add_session_config_entry("session.disable_prepacking", "1")
            elif session := _open_parts(path, options):
                return session
            return open_model(path, options, name, exact_source(path) if this_kind().saturates else None)

        super().__init__(model, optimized=False, threads=threads, session_factory=open_session, name=name)


def threads_for(graph: Path, steps: bool = False) -> int:
    """The threads for a session that runs a graph as it is written; 0 for one per core. In a small graph a second
    thread waits between operators and costs as much CPU time as the first: a decoder of 2.5 MiB takes twice the time.
    steps: whether calls are steps of a model with state, which compute less than other calls."""
    return 1 if graph_bytes(graph) < (ONE_THREAD_STEP_BYTES if steps else ONE_THREAD_BYTES) else 0


class _VaryingPart:
    """ONNX Runtime's session of the part of a graph that depends on its inputs. arrays: the constant part's outputs."""

    def __init__(self, session: Untyped, arrays: Mapping[str, Array]) -> None:
        self._session, self._given = session, arrays
        self.get_outputs = session.get_outputs

    def get_inputs(self) -> Sequence[Untyped]:
        return [value for value in self._session.get_inputs() if value.name not in self._given]

    def run(self, names: Sequence[str], inputs: Tensors) -> Untyped:
        return self._session.run(names, {**inputs, **self._given})


def _open_parts(path: Path, options: Untyped) -> _VaryingPart | None:
    """A session of a graph whose constant part was run once (`structure.cut_constant_part`), with bit-identical
    outputs. None if there is no such part, if it cannot be read or run separately, or if this CPU saturates."""
    import onnxruntime as ort

    if this_kind().saturates:  # then the whole graph is rewritten when it is opened
        return None
    try:
        model = load_outline(path)
        if (constant_model := cut_constant_part(model)) is None:
            return None
        for tensor in (*constant_model.graph.initializer, *model.graph.initializer):
            if is_external(tensor):
                embed(tensor)
        opener = partial(ort.InferenceSession, sess_options=options, providers=["CPUExecutionProvider"])
        names = [value.name for value in constant_model.graph.output]
        constant_values = dict(zip(names, opener(constant_model.SerializeToString()).run(names, {}), strict=True))
        return _VaryingPart(opener(cut_varying_part(model, constant_values).SerializeToString()), constant_values)
    except (ProtobufError, OSError, ValueError, ModelError, *failures()):  # opening the whole graph reports the reason
        return None


def open_interpreter(
    model: Path | bytes,
    what: str,
    *,
    optimized: bool | Literal["constants"] = False,
    threads: int = 0,
    entries: Mapping[str, str] = MappingProxyType({}),
    save: str = "",
) -> Untyped:
    """ONNX Runtime's own `InferenceSession` of a model; its runs do not check inputs first.

    what: the model's name in errors.  optimized: True lets it fuse nodes and lay tensors out for this CPU; 'constants'
    lets it compute once the values that depend on constants alone.
    entries: of its configuration.  save: file for the graph as it will be run; '' for none.
    threads: of one run; 0 for the runtime's own number.
    Raises ModelError when the model does not load.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # the runtime also raises each error that it logs
    options.intra_op_num_threads = threads
    level = ort.GraphOptimizationLevel
    levels = {False: level.ORT_DISABLE_ALL, "constants": level.ORT_ENABLE_BASIC, True: level.ORT_ENABLE_ALL}
    options.graph_optimization_level = levels[optimized]
    options.optimized_model_filepath = save
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    source = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class of their own
        raise ModelError(f"onnxruntime cannot load {what}: {words_of(error)}") from error


def run_within(session: Untyped, inputs: Tensors, seconds: float) -> Untyped:
    """All outputs of an interpreter's session for `inputs`. Raises what the session raises, and ModelError if the run
    takes longer than `seconds`: it is then stopped between two nodes, also inside loops."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = 4
    timer = threading.Timer(seconds, setattr, (options, "terminate", True))
    timer.start()
    try:
        return session.run(None, inputs, options)
    except failures() as error:
        if not options.terminate:
            raise
        raise ModelError(f"the run took longer than {seconds:g} s") from error
    finally:
        timer.cancel()


def accepts(model: bytes) -> bool:
    """Whether the interpreter can read a serialized model, for example its opset."""
    try:
        open_interpreter(model, "the model")
    except ModelError:
        return False
    return True


def list_signatures() -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    """By domain and name of an operator, the types of its inputs and outputs in order: variables such as 'T', and
    'tensor(int32)' where there is only one. Operators that onnx does not have are among them."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    signatures = {}
    for schema in get_all_operator_schema():
        only_types = {
            constraint.type_param_str: constraint.allowed_type_strs[0]
            for constraint in schema.type_constraints
            if len(constraint.allowed_type_strs) == 1
        }
        input_types, output_types = (
            [only_types.get(formal.typeStr, formal.typeStr) for formal in formals]
            for formals in (schema.inputs, schema.outputs)
        )
        signatures[schema.domain, schema.name] = input_types, output_types
    return signatures
