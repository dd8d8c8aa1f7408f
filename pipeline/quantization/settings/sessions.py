"""Running graphs and tails of graphs: a tail starts at tensors that are known and ends at the model's outputs."""

from collections.abc import Collection, Mapping, Sequence

from onnx import ModelProto, NodeProto, helper

from builders.onnx_graphs.bodies import list_reads
from builders.reference import open_interpreter, words_of
from enginery.arrays.arrays import Array
from enginery.core.errors import ModelError
from enginery.core.types import Tensors
from pipeline.graphs.graph import consumers


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
