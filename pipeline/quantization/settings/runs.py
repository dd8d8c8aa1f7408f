"""Calibration samples as the search wants them: many in a run, most of them to fit settings on, others to judge on.

Running graphs and tails of graphs: a tail starts at tensors that are known and ends at the model's outputs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, helper

from builders.onnx_graphs.bodies import list_reads
from builders.reference import open_interpreter, words_of
from enginery.arrays import Array
from enginery.core.errors import ModelError
from enginery.core.types import Dim, Tensors, TensorSpec
from pipeline.quantization.graph import consumers

FITTED, JUDGED = 384, 96

# Number of samples, and the inputs of one run.
Run = tuple[int, Tensors]


def group_runs(ends: Iterable[tuple[int, Tensors]], inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[Run]:
    """Runs of about the batch size that the model is tuned for, from runs of as few samples as it takes.

    ends: the number of samples up to the end of each run, and its inputs. Consecutive runs of equal shape are joined
    where all inputs lead with the same dynamic dim and none has it elsewhere; an unoptimized graph dequantizes its
    weights anew in every run.
    """
    size, held, before, count = _joinable(inputs, dims), list[Tensors](), 0, 0
    for end, tensors in ends:
        if held and (count >= size or _shape(held[0]) != _shape(tensors)):
            yield count, _join(held)
            held, count = [], 0
        held.append(tensors)
        count += end - before
        before = end
    if held:
        yield count, _join(held)


@dataclass(frozen=True)
class ScoredRuns:
    """A run to judge the model on. start, stop: its samples in the data set."""

    inputs: Tensors
    start: int
    stop: int


@dataclass(frozen=True)
class RunLabels:
    """The right answers of all samples, in order. output: whose argmax over the last axis is the answer."""

    output: str
    values: Array

    def of(self, run: ScoredRuns) -> Array:
        """Those of one run, flat."""
        return self.values[run.start : run.stop].reshape(-1)


def divide_runs(runs: Iterable[Run]) -> tuple[list[Run], list[ScoredRuns]]:
    """Runs to fit settings on, and others to judge the model on: every fourth, until there are enough.

    With fewer than four runs, they are the same.
    """
    fitted, judged = list[ScoredRuns](), list[ScoredRuns]()
    counts, start = [0, 0], 0
    for index, (count, inputs) in enumerate(runs):
        run = ScoredRuns(inputs, start, start := start + count)
        if index % 4 == 3 and counts[1] < JUDGED:
            judged.append(run)
            counts[1] += count
        elif counts[0] < FITTED:
            fitted.append(run)
            counts[0] += count
        if counts[0] >= FITTED and counts[1] >= JUDGED:
            break
    return [(run.stop - run.start, run.inputs) for run in fitted], judged or fitted


def _joinable(inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> int:
    """How many samples may go into one run; 1 where runs must stay as they are."""
    leading = {spec.shape[0] if spec.shape else 1 for spec in inputs}
    inner = {size for spec in inputs for size in spec.shape[1:]}
    if len(leading) != 1 or leading & inner:
        return 1
    return next((dim.opt for dim in dims if dim.name in leading), 1)


def _shape(tensors: Tensors) -> Mapping[str, tuple[int, ...]]:
    return {name: values.shape for name, values in tensors.items()}


def _join(held: Sequence[Tensors]) -> Tensors:
    return {name: np.concatenate([tensors[name] for tensors in held]) for name in held[0]} if held[1:] else held[0]


class SessionRunner:
    """A graph in the reference interpreter, for named outputs. optimized: whether it may fuse (off for exact Q/DQ)."""

    def __init__(self, model: ModelProto, outputs: Sequence[str] | None = None, optimized: bool = True) -> None:
        self._session = open_interpreter(
            model.SerializeToString(), "the model that is being tried", optimized=optimized
        )
        self._inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = list(outputs or [value.name for value in model.graph.output])

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs by name. Raises ModelError when the graph does not run on these inputs."""
        fed = {name: inputs[name] for name in self._inputs}
        try:
            return dict(zip(self.outputs, self._session.run(self.outputs, fed), strict=True))
        except Exception as error:  # the interpreter's errors share no base class of their own
            raise ModelError(f"the model does not run on its calibration samples: {words_of(error)}") from error


def downstream(model: ModelProto, nodes: Collection[str]) -> set[str]:
    """Names of all tensors that depend on the results of these nodes."""
    readers, reached = consumers(model.graph), set[str]()
    waiting = [name for node in model.graph.node if node.name in nodes for name in node.output]
    while waiting:
        name = waiting.pop()
        if name and name not in reached:
            reached.add(name)
            waiting += [result for node in readers.get(name, ()) for result in node.output]
    return reached


def tail(model: ModelProto, known: Mapping[str, int]) -> ModelProto:
    """The part of a model behind `known` tensors (name -> element type): those it reads become its inputs.

    Its outputs are those of the model's that are not known themselves.
    """
    maker = {name: node for node in model.graph.node for name in node.output}
    outputs = [value for value in model.graph.output if value.name not in known]
    chosen, wanted, seen = dict[str, NodeProto](), [value.name for value in outputs], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen or name in known or name not in maker:
            seen.add(name)
            continue
        seen.add(name)
        node = maker[name]
        if node.name not in chosen:
            chosen[node.name] = node
            wanted += list_reads(node)
    nodes = [node for node in model.graph.node if node.name in chosen]
    read = {name for node in nodes for name in list_reads(node)}
    starts = [value for value in model.graph.input if value.name in read and value.name not in known]
    starts += [helper.make_tensor_value_info(name, kind, None) for name, kind in known.items() if name in read]
    weights = [item for item in model.graph.initializer if item.name in read]
    graph = helper.make_graph(nodes, "tail", starts, outputs, weights)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def with_outputs(model: ModelProto, names: Mapping[str, int]) -> ModelProto:
    """The model with these tensors (name -> element type) as its only outputs."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in names.items())
    return copy


def set_ranks(model: ModelProto, values: Tensors) -> None:
    """Give the model's inputs the ranks that these values have, with all sizes open: a valid model needs ranks."""
    for value in model.graph.input:
        kind, rank = value.type.tensor_type.elem_type, values[value.name].ndim
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, [None] * rank))
