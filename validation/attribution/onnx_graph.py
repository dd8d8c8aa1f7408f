"""The graph that attribution cuts and runs, and the rules for blaming segments."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ValueInfoProto, helper, numpy_helper

from builders.onnx_graphs.bodies import list_reads, opset_of, set_items
from builders.onnx_graphs.outline import in_shards, link_shards
from builders.onnx_graphs.structure import select_needed
from builders.onnx_graphs.weights import load_graph
from enginesmith.arrays import Array
from enginesmith.core.types import Session, Tensors, TensorSpec
from validation.attribution.cuts import GraphStep, list_scores
from validation.attribution.result import SegmentRow, TensorError
from validation.comparison.sessions import run
from validation.limits.budget import HONEST_DB, MARGIN_DB, MOST_DB, within
from validation.limits.terms import Budget
from validation.metrics.drift import Drift, measure
from validation.metrics.slices import worst_slice

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

# The error of one tensor as a stored value, and the choice of segments that break a limit of the model alone.

# A segment is blamed alone if its noise energy is over this many times that of all other segments together.
LONE = 10.0


def describe_drift(drift: Drift | None, note: str = "") -> TensorError:
    """The TensorError of a drift; without a drift, a TensorError without numbers, with the reason in its note."""
    if drift is None:
        return TensorError(math.nan, math.nan, 0, 0.0, note or "not measured")
    if drift.mismatches is not None:
        return TensorError(unequal=1 - drift.agreement, note=note)
    worst_drift = worst_slice(drift.slices, None) if drift.slices else None
    slice_fields = (worst_drift.sqnr_db, str(worst_drift)) if worst_drift else (math.inf, "")
    return TensorError(drift.sqnr_db, drift.max_rel, drift.nonfinite, 0.0, note, *slice_fields)


def measure_pair(expected: Array, actual: Array | None) -> tuple[Drift | None, str]:
    """The drift of a value and ''; None and the reason if the value is missing or cannot be compared."""
    if actual is None:
        return None, "it is missing"
    try:
        drift = measure(expected, actual, samples=len(expected) if expected.ndim > 1 else None)
        return replace(drift, slices=drift.slices.without_means() if drift.slices else None), ""
    except ValueError as error:
        return None, str(error)


def is_of_the_cut(local_error: TensorError, inherited_error: TensorError) -> bool:
    """Whether a segment alone has over twice the error that the whole candidate has at the same tensor.

    The whole candidate includes the segment; therefore the cut must have made the runtime choose another kernel, for
    example for a product whose activation is no longer dequantized directly before it.
    """
    is_measured = not (local_error.note or inherited_error.note or local_error.nonfinite or inherited_error.nonfinite)
    return is_measured and local_error.sqnr_db < inherited_error.sqnr_db - HONEST_DB


def explain_blame(local: TensorError, budget: Budget) -> str:
    """A text that says which limit of the whole model a segment's own error breaks; '' for none. NaN breaks all."""
    if local.note:
        return local.note
    if local.nonfinite:
        return f"{local.nonfinite} elements are NaN or infinite and should not be"
    if local.unequal > 1 - budget.agreement:
        return f"{local.unequal:.2%} of its integers are wrong"
    if budget.sqnr_db is not None and not within("sqnr_db", local.sqnr_db, budget.sqnr_db):
        return f"{local.sqnr_db:.1f} dB by itself, limit {budget.sqnr_db:g} dB"
    if budget.max_rel is not None and not within("max_rel", local.max_rel, budget.max_rel):
        return f"an error of {local.max_rel:.2g} of its peak by itself, limit {budget.max_rel:g}"
    return ""


def blame_slice(rows: Sequence[SegmentRow], budget: Budget) -> list[SegmentRow]:
    """The rows; the row with the worst slice is blamed if that slice breaks the limit on slices.

    For an output that fails in a slice although every segment keeps the limit on total error energy.
    """
    if budget.slice_sqnr_db is None or not rows:
        return list(rows)
    worst_row = min(rows, key=lambda row: row.local.slice_sqnr_db)
    if within("slice_sqnr_db", worst_row.local.slice_sqnr_db, budget.slice_sqnr_db):
        return list(rows)
    blame = (
        f"{worst_row.local.slice}: {worst_row.local.slice_sqnr_db:.1f} dB by itself, limit {budget.slice_sqnr_db:g} dB"
    )
    return [replace(row, blamed=blame) if row is worst_row else row for row in rows]


def blame_lone(rows: Sequence[SegmentRow]) -> list[SegmentRow]:
    """The rows; a row is blamed if its noise energy is over LONE times that of all other rows together.

    For an engine that fails although every segment keeps the limit: later quantization enlarges an error. Errors that
    float32 kernels may have are not blamed.
    """
    ratios = [10 ** (-row.local.sqnr_db / 10) if row.local.sqnr_db < math.inf else 0.0 for row in rows]
    largest_ratio = max(ratios, default=0.0)
    if not largest_ratio > LONE * (sum(ratios) - largest_ratio):
        return list(rows)
    worst_row = rows[ratios.index(largest_ratio)]
    if worst_row.local.sqnr_db >= MOST_DB - MARGIN_DB["fp32"]:
        return list(rows)
    value_text = f"{worst_row.local.sqnr_db:.1f} dB"
    blame = f"{value_text} by itself, within the limit; all others together add less than a tenth of that"
    return [replace(row, blamed=blame) if row is worst_row else row for row in rows]


# An ONNX graph whose inner tensors can be read and replaced, in any kind of session.
#
# The weights are written to one file beside the graph. Every session maps that file; this process never has the
# weights in memory twice. `whole` opens the original file, which does not change.

Opener = Callable[[Path], AbstractContextManager[Session]]
AXIS_OPERATORS = ("Expand", "Reshape", "Softmax", "Squeeze", "Unsqueeze")
# Smaller tensors stay in the graph, as in onnx's own default.
EXTERNAL_FROM_BYTES = 1024
LOCAL, SHAPE = "@local", "@shape"


class OnnxGraph:
    """An ONNX file that can run whole, with inner tensors as outputs, and in segments on given activations.

    opener: opens a session for such a file.  fuses: whether the session fuses nodes; reading a tensor between two fused
    nodes may change their results.  steps: the nodes in an order in which they can run.  outputs: names.  others: names
    of inner values that no session can return, because they are no tensors (sequences, for example).
    Files are written into `workdir`, which the caller removes. Raises ModelError if opening a session does.
    """

    def __init__(self, path: Path, workdir: Path, opener: Opener, *, fuses: bool) -> None:
        from builders.reference import embed_shapes, restore_names

        workdir.mkdir(parents=True, exist_ok=True)
        self._path, self._workdir, self._opens, self._count = path, workdir, opener, 0
        self._model = load_graph(path)
        if in_shards(self._model):
            link_shards(self._model, workdir)
        else:
            onnx.save(  # moves the weights out of the model in memory as well
                self._model,
                workdir / "light.onnx",
                save_as_external_data=True,
                all_tensors_to_one_file=True,
                location="weights",
                size_threshold=EXTERNAL_FROM_BYTES,
            )
        embed_shapes(self._model, workdir)
        restore_names(self._model)
        graph = self._model.graph
        values = onnx.shape_inference.infer_shapes(self._model).graph.value_info
        self.others = {value.name for value in values if value.type.WhichOneof("value") not in ("tensor_type", None)}
        shapes = {value.name: [str(size) for size in value.type.tensor_type.shape.dim] for value in values}
        self.fuses = fuses
        self.outputs: Sequence[str] = [value.name for value in graph.output]
        scalars = {tensor.name: tensor for tensor in graph.initializer if math.prod(tensor.dims) == 1}
        constant_names = {tensor.name for tensor in graph.initializer}
        constant_names |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
        self.steps: Sequence[GraphStep] = [
            GraphStep(
                name=_name(node),
                op_type=node.op_type,
                reads=tuple(name for name in list_reads(node) if name not in constant_names),
                makes=tuple(name for name in node.output if name),
                zero=_zero(node, scalars),
                by_row=node.op_type not in AXIS_OPERATORS or _is_by_row(node, shapes, opset_of(self._model)),
            )
            for node in graph.node
            if node.op_type != "Constant"
        ]
        self.scores = list_scores(self.steps, self.outputs)

    def whole(self) -> AbstractContextManager[Session]:
        """A session of the original file."""
        return self._opens(self._path)

    def open_tapped(self, tensors: Sequence[str], whole: bool) -> AbstractContextManager[Session]:
        """A session that returns these tensors. whole: whether to run all nodes and return the graph's outputs too."""
        model = deepcopy(self._model)
        graph_outputs = {value.name: value for value in model.graph.output}
        output_names = [*(self.outputs if whole else ()), *tensors]
        # A name is enough: the runtime infers type and shape.
        values = [graph_outputs.get(name, ValueInfoProto(name=name)) for name in dict.fromkeys(output_names)]
        _set(model.graph, None if whole else select_needed(model.graph.node, output_names), values)
        return self._open(model)

    def shapes(self, tensors: Sequence[str], inputs: Tensors) -> Mapping[str, tuple[int, ...]]:
        """The shapes of these tensors in one run."""
        model = deepcopy(self._model)
        nodes = select_needed(model.graph.node, tensors)
        nodes += [helper.make_node("Shape", [name], [f"{name}{SHAPE}"]) for name in tensors]
        _set(model.graph, nodes, [ValueInfoProto(name=f"{name}{SHAPE}") for name in tensors])
        with self._open(model) as session:
            shape_outputs = run(session, {spec.name: inputs[spec.name] for spec in session.inputs})
        return {name: tuple(int(size) for size in shape_outputs[f"{name}{SHAPE}"]) for name in tensors}

    def open_segment(self, tensors: Sequence[str], specs: Mapping[str, TensorSpec]) -> AbstractContextManager[Session]:
        """A session of the graph cut at `specs`, its new inputs. An output with the name of an input is NAME@local."""
        model = deepcopy(self._model)
        nodes = select_needed(model.graph.node, tensors, specs)
        for node in nodes:
            for index, name in enumerate(node.output):
                node.output[index] = f"{name}{LOCAL}" if name in specs else name
        values = [ValueInfoProto(name=f"{name}{LOCAL}" if name in specs else name) for name in tensors]
        operand_names = {name for node in nodes for name in list_reads(node)}
        _set(model.graph, nodes, values)
        model.graph.input.extend(_input(spec) for name, spec in specs.items() if name in operand_names)
        return self._open(model)

    def _open(self, model: "ModelProto") -> AbstractContextManager[Session]:
        self._count += 1
        path = self._workdir / f"part-{self._count}.onnx"
        path.write_bytes(model.SerializeToString())
        return self._opens(path)


def _name(node: "NodeProto") -> str:
    """The node's name; if that is empty, the name that rewrites use for the node (`pipeline.quantization.graph`)."""
    return node.name or f"{node.op_type}_{next((name for name in node.output if name), '')}"


def _zero(node: "NodeProto", scalars: "Mapping[str, TensorProto]") -> float | None:
    """The zero point of a QuantizeLinear node; None for other nodes, and if it is not a scalar constant."""
    if node.op_type != "QuantizeLinear":
        return None
    zero_name = node.input[2] if len(node.input) > 2 else ""
    zero_point = scalars.get(zero_name)
    return (
        None if zero_name and not zero_point else float(numpy_helper.to_array(zero_point).item()) if zero_point else 0.0
    )


def _is_by_row(node: "NodeProto", shapes: Mapping[str, Sequence[str]], opset: int) -> bool:
    """`GraphStep.by_row` for an operator of AXIS_OPERATORS. shapes: sizes of inner values, '' for an unknown size."""
    sizes, outs = (shapes.get(name, []) for name in (node.input[0], node.output[0]))
    axis = next((item.i for item in node.attribute if item.name == "axis"), -1 if opset >= 13 else 1)
    return axis in (-1, len(sizes) - 1) if node.op_type == "Softmax" else any(sizes[-1:]) and sizes[-1:] == outs[-1:]


def _set(graph: "GraphProto", nodes: "list[NodeProto] | None", outputs: "Sequence[ValueInfoProto]") -> None:
    """Replace a graph's outputs and, unless `nodes` is None, its nodes, and remove unused constants and inputs."""
    set_items(graph.output, outputs)
    if nodes is None:
        return
    set_items(graph.node, nodes)
    operand_names = {name for node in graph.node for name in list_reads(node)} | {value.name for value in graph.output}
    del graph.value_info[:]
    for field in (graph.initializer, graph.input):
        set_items(field, (entry for entry in field if entry.name in operand_names))


def _input(spec: TensorSpec) -> "ValueInfoProto":
    """A graph input of the spec's rank, with unknown sizes, because activations have other sizes in other cases."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    return helper.make_tensor_value_info(spec.name, kind, [None] * len(spec.shape))
