"""Runs of a model over calibration samples: many samples in a run, and sessions over a graph or a part of it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from builders.onnx_graphs.bodies import drop_unread, list_reads, set_items
from builders.onnx_graphs.outline import link_shards
from builders.onnx_graphs.weights import LOOSE, embed, find_external, is_external, may_lie_outside, place_of, set_place
from builders.reference import open_interpreter, words_of
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError
from enginesmith.core.types import Dim, Tensors, TensorSpec
from pipeline.quantization.graph import consumers

# Samples to fit settings on, and samples to judge the model on.
FITTED, JUDGED = 384, 96
# Weights begin at page boundaries of a file, because memory-mapped files are read fastest from there.
_ALIGNED = 4096

# Number of samples, and the inputs of one run.
Run = tuple[int, Tensors]


def group_runs(ends: Iterable[tuple[int, Tensors]], inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[Run]:
    """Join small runs into runs of about the batch size that the model is tuned for.

    Fewer runs save time: an unoptimized graph dequantizes its weights in every run. ends: for each small run, the
    number of samples up to its end, and its inputs. Consecutive runs of equal shapes are joined if the first axis of
    all inputs is the same dynamic dim, and no other axis has this dim.
    """
    leading_dims = {spec.shape[0] if spec.shape else 1 for spec in inputs}
    is_joinable = len(leading_dims) == 1 and not leading_dims & {size for spec in inputs for size in spec.shape[1:]}
    batch_size = next((dim.opt for dim in dims if is_joinable and dim.name in leading_dims), 1)
    group_tensors, shapes, last_end, count = list[Tensors](), dict[str, tuple[int, ...]](), 0, 0
    for end, tensors in ends:
        tensor_shapes = {name: values.shape for name, values in tensors.items()}
        if group_tensors and (count >= batch_size or shapes != tensor_shapes):
            yield count, _join(group_tensors)
            group_tensors, count = [], 0
        group_tensors.append(tensors)
        shapes, count, last_end = tensor_shapes, count + end - last_end, end
    if group_tensors:
        yield count, _join(group_tensors)


@dataclass(frozen=True)
class ScoredRun:
    """A run for judging the model. start, stop: its samples in the data set."""

    inputs: Tensors
    start: int
    stop: int


@dataclass(frozen=True)
class RunLabels:
    """The right answers of all samples, in order. output: its argmax over the last axis is the answer."""

    output: str
    values: Array

    def of(self, run: ScoredRun) -> Array:
        """The labels of one run, [n]."""
        return self.values[run.start : run.stop].reshape(-1)


def divide_runs(runs: Iterable[Run], filled: bool = False) -> tuple[list[Run], list[ScoredRun]]:
    """Runs for fitting settings, and others for judging the model: every fourth, until these have `JUDGED` samples.

    With fewer than four runs, both are the same. filled: whether fitting runs are also used for judging, until
    `JUDGED` samples are reached: a dozen samples hardly show errors that few samples have.
    """
    fitting_runs, judged_runs = list[ScoredRun](), list[ScoredRun]()
    fitted_samples = judged_samples = start = 0
    for index, (count, inputs) in enumerate(runs):
        run = ScoredRun(inputs, start, start := start + count)
        if index % 4 == 3 and judged_samples < JUDGED:
            judged_runs.append(run)
            judged_samples += count
        elif fitted_samples < FITTED:
            fitting_runs.append(run)
            fitted_samples += count
        if fitted_samples >= FITTED and judged_samples >= JUDGED:
            break
    sized_runs = [(run.stop - run.start, run.inputs) for run in fitting_runs]
    while filled and judged_samples < JUDGED and fitting_runs:
        judged_runs.append(fitting_runs.pop())
        judged_samples += judged_runs[-1].stop - judged_runs[-1].start
    return sized_runs, judged_runs or fitting_runs


class JoinedTensors(dict[str, Array]):
    """The inputs of runs of equal shapes, concatenated along the first axis. parts: number of runs."""

    def __init__(self, arrays: Mapping[str, Array], parts: int) -> None:
        super().__init__(arrays)
        self.parts = parts

    def first(self, parts: int) -> "JoinedTensors":
        """The first `parts` of the runs, joined."""
        return JoinedTensors({name: array[: len(array) // self.parts * parts] for name, array in self.items()}, parts)


def _join(runs: Sequence[Tensors]) -> Tensors:
    if len(runs) == 1:
        return runs[0]
    return JoinedTensors({name: np.concatenate([tensors[name] for tensors in runs]) for name in runs[0]}, len(runs))


# Waiting threads sleep, and Q/DQ is computed as written, without integer kernels.
_ENTRIES = {"session.intra_op.allow_spinning": "0", "session.disable_quant_qdq": "1"}


def with_weights_inside(model: ModelProto) -> ModelProto:
    """A copy of the model that contains the weights that it reads, in place of names of files."""
    copy = deepcopy(model)
    drop_unread(copy.graph)
    for tensor in copy.graph.initializer:
        if is_external(tensor):
            embed(tensor)
    return copy


def with_weights_outside(model: ModelProto, folder: Path) -> ModelProto:
    """A copy whose large weights are in one file of `folder`, which many graphs then share.

    Weights computed from these are there, too, until `SessionRunner` has opened the graph that reads them.
    """
    copy = deepcopy(model)
    path = folder / "weights"
    with path.open("wb") as stream:
        for tensor in copy.graph.initializer:
            if may_lie_outside(tensor):
                start = stream.seek(-(-stream.tell() // _ALIGNED) * _ALIGNED)
                set_place(tensor, str(path), start, stream.write(tensor.raw_data))
    return copy


@contextmanager
def _openable(model: ModelProto) -> Iterator[Path | bytes]:
    """The model as a session opens it: bytes, or a file beside its weights if these are in a file."""
    external_names = find_external(model.graph)
    if not is_external(external_names):
        yield model.SerializeToString()
        return
    folder, copy = Path(place_of(external_names)[0]).parent, deepcopy(model)
    link_shards(copy, folder)
    model_path = folder / "tried.onnx"
    model_path.write_bytes(copy.SerializeToString())
    try:
        yield model_path
    finally:  # open files stay mapped
        for model_file in (model_path, *folder.glob(f"{LOOSE}*")):
            model_file.unlink()


class SessionRunner:
    """A graph in the reference interpreter, with unfused Q/DQ.

    exact: whether no other nodes may be fused either, so that rounding is the same as in the graph's own checks. In any
    case weights are dequantized once, not in each run."""

    def __init__(self, model: ModelProto, exact: bool = False) -> None:
        title = "the model that is being tried"
        with _openable(model) as content:
            self._session = open_interpreter(content, title, optimized="constants" if exact else True, entries=_ENTRIES)
        self._inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in model.graph.output]

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs by name. Raises ModelError when the graph does not run on these inputs."""
        session_inputs = {name: inputs[name] for name in self._inputs}
        try:
            return dict(zip(self.outputs, self._session.run(self.outputs, session_inputs), strict=True))
        except Exception as error:  # the interpreter's errors share no base class of their own
            raise ModelError(f"the model does not run on its calibration samples: {words_of(error)}") from error


def find_mask(runner: SessionRunner, runs: Sequence[Run]) -> str | None:
    """The input of zeros and ones whose zeros mark padding, tested on the first four runs. runner: of the model.

    Integer inputs of the mask's shape are ids. With the largest id at the mask's zeros, all outputs stay exactly the
    same; with the largest id at its ones, a floating output changes. If the outputs for each token change with ids of
    padding, the model has no mask.
    """
    for _, inputs in runs[:4]:
        for name in (name for name, values in inputs.items() if np.array_equal(np.unique(values), (0, 1))):
            expected_outputs = runner.run(inputs)
            mask, others = inputs[name] != 0, {key: inputs[key] for key in inputs.keys() - {name}}
            ids = {key: item for key, item in others.items() if item.shape == mask.shape and item.dtype.kind in "iu"}
            padded, other = ({key: np.where(keep, ids[key], ids[key].max()) for key in ids} for keep in (mask, ~mask))
            try:
                outputs, other_outputs = runner.run({**inputs, **padded}), runner.run({**inputs, **other})
            except ModelError:  # not every model runs on any ids
                continue
            is_same = all(np.array_equal(outputs[key], values) for key, values in expected_outputs.items())
            floats = [key for key, values in outputs.items() if values.dtype.kind == "f"]
            is_read = not all(np.array_equal(other_outputs[key], outputs[key]) for key in floats)
            if is_same and is_read and any((padded[key] != values).any() for key, values in ids.items()):
                return name
    return None


def downstream(model: ModelProto, nodes: Collection[str]) -> set[str]:
    """Names of all tensors that depend on the results of these nodes."""
    readers, reached_names = consumers(model.graph), set[str]()
    pending_names = [name for node in model.graph.node if node.name in nodes for name in node.output]
    while pending_names:
        name = pending_names.pop()
        if name and name not in reached_names:
            reached_names.add(name)
            pending_names += [result for node in readers.get(name, ()) for result in node.output]
    return reached_names


def tail(model: ModelProto, tensor_types: Mapping[str, int], ends: Mapping[str, int] | None = None) -> ModelProto:
    """The part of a model behind the tensors of `tensor_types` (name -> element type), which become its inputs if read.

    Its outputs are the `ends` (name -> element type), by default the model's outputs that are not in `tensor_types`.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    outputs = [value for value in model.graph.output if value.name not in tensor_types]
    if ends is not None:
        outputs = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in ends.items()]
    node_names, pending_names = set[str](), [value.name for value in outputs]
    while pending_names:
        name = pending_names.pop()
        if name in tensor_types or name not in producers or producers[name].name in node_names:
            continue
        node_names.add(producers[name].name)
        pending_names += list_reads(producers[name])
    nodes = [node for node in model.graph.node if node.name in node_names]
    operand_names = {name for node in nodes for name in list_reads(node)}
    starts = [value for value in model.graph.input if value.name in operand_names and value.name not in tensor_types]
    starts += [
        helper.make_tensor_value_info(name, dtype, None)
        for name, dtype in tensor_types.items()
        if name in operand_names
    ]
    weights = [tensor for tensor in model.graph.initializer if tensor.name in operand_names]
    graph = helper.make_graph(nodes, "tail", starts, outputs, weights)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def with_outputs(model: ModelProto, names: Mapping[str, int]) -> ModelProto:
    """The model with these tensors (name -> element type) as its only outputs."""
    copy = deepcopy(model)
    set_items(copy.graph.output, [helper.make_tensor_value_info(name, dtype, None) for name, dtype in names.items()])
    return copy


def set_ranks(model: ModelProto, runs: Sequence[Tensors]) -> None:
    """In place: give the model's inputs, and outputs without a rank, their ranks in these runs, with all sizes open; a
    valid model needs ranks. A vector of int64 with one length in all runs keeps its length: onnxruntime does not load a
    Resize without the number of its sizes."""
    outputs = [value for value in model.graph.output if not value.type.tensor_type.HasField("shape")]
    for value in (*model.graph.input, *(value for value in outputs if all(value.name in values for values in runs))):
        dtype, shapes = value.type.tensor_type.elem_type, {values[value.name].shape for values in runs}
        shape, is_row = next(iter(shapes)), dtype == TensorProto.INT64 and len(shapes) == 1
        open_shape = [*shape] if is_row and len(shape) == 1 else [None] * len(shape)
        value.CopyFrom(helper.make_tensor_value_info(value.name, dtype, open_shape))
