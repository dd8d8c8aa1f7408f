"""Facts from a model for the draft of its spec: axes, metrics, states."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import onnx

from builders.onnx_graphs.weights import is_external, to_array
from enginesmith.core.errors import DataError
from enginesmith.core.state import State, without_states
from enginesmith.core.types import PLUS, TensorSpec
from pipeline.sources.onnx_header import can_be_equal

# (axis of an operator's first input, axis of its weight that determines the size).
_WEIGHTED: Mapping[str, tuple[int, int]] = {
    "BatchNormalization": (1, 0),
    "Conv": (1, 1),
    "ConvTranspose": (1, 0),
    "MatMul": (-1, -2),
}
_SAME_AXES = frozenset({"Cast", "Identity"})
# Operators that read shapes, among other numbers.
_SHAPING = frozenset({"Reshape", "Expand", "ConstantOfShape", "Concat", "Tile"})


def fixed_axes(graph: onnx.GraphProto) -> dict[tuple[str, int], int]:
    """(input, axis) -> the only size with which the graph can run: the channels of a convolution, the features of a
    matrix product. The first weight that an input meets, also after casts and transpositions, determines it."""
    weights = {name: tuple(tensor.dims) for name, tensor in _constants(graph).items()}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        users.setdefault(node.input[0] if node.input else "", []).append(node)
    axis_sizes: dict[tuple[str, int], int] = {}
    for value in graph.input:
        axes = range(len(value.type.tensor_type.shape.dim))
        for axis, size in _sizes(value.name, [*axes], users, weights):
            axis_sizes.setdefault((value.name, axis), size)
    return axis_sizes


def _sizes(
    name: str, axes: Sequence[int], users: Mapping[str, list[onnx.NodeProto]], weights: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, int]]:
    """(axis of the input, size) for each weight that a tensor meets. axes: the input's axes in the tensor's order."""
    for node in users.get(name, ()):
        if node.op_type in _SAME_AXES:
            yield from _sizes(node.output[0], axes, users, weights)
        elif node.op_type == "Transpose":
            permutation = next(
                (attribute.ints for attribute in node.attribute if attribute.name == "perm"),
                [*reversed(range(len(axes)))],
            )
            yield from _sizes(node.output[0], [axes[axis] for axis in permutation], users, weights)
        elif node.op_type in _WEIGHTED and len(node.input) > 1 and (dims := weights.get(node.input[1])):
            axis, weight_index = _WEIGHTED[node.op_type]
            if -len(axes) <= axis < len(axes) and -len(dims) <= weight_index < len(dims):
                groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
                yield axes[axis], dims[weight_index] * (groups if node.op_type == "Conv" else 1)


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    constant_nodes = [node for node in graph.node if node.op_type == "Constant"]
    return tensors | {node.output[0]: attribute.t for node in constant_nodes for attribute in node.attribute}


def find_sizes(graph: onnx.GraphProto) -> list[int]:
    """Up to six sizes that an exporter may have written into the graph from its example inputs.

    The most frequent sizes in constant shapes are first. Then follow the sizes of constants with two or more axes that
    are added or multiplied."""
    tensors = _constants(graph)
    shape_counts, table_counts = Counter[int](), Counter[int]()
    for node in graph.node:
        for tensor in (tensors[name] for name in node.input if name in tensors):
            if node.op_type in _SHAPING and tensor.data_type == onnx.TensorProto.INT64 and not is_external(tensor):
                shape_counts.update({*to_array(tensor).ravel().tolist()})
            elif node.op_type in ("Add", "Sub", "Mul") and len(tensor.dims) > 1:
                table_counts.update({*tensor.dims})
    ranked_counts = (*shape_counts.most_common(), *table_counts.most_common())
    return [*dict.fromkeys(size for size, _ in ranked_counts if size > 1)][:6]


# The greatest size of a batch dim, and of any other dim, if nothing in the model limits it.
LARGEST_BATCH = 8
LARGEST_SIZE = 128


@dataclass(frozen=True)
class FoundDim:
    """A dynamic dim: the sizes that the spec will allow, which are multiples of `multiple`, and the reason.

    guessed: no run of the model confirmed any of these sizes.
    """

    min: int
    opt: int
    max: int
    why: str
    multiple: int = 1
    guessed: bool = False


@dataclass(frozen=True)
class FoundModel:
    """Facts about a model, for the draft of its spec.

    name: for the registry.  source: the spec's `source`, with the paths that the spec will have.
    inputs, outputs: in the model's order, with names of dims that a spec accepts.
    precisions: (suitable precision, reason).  notes: on the whole model, each one line of a comment.
    unknown: input whose meaning is unknown -> why; a person has to describe it.
    left_out: output of the model that a spec cannot have -> why; `outputs` are the others.
    metric: the likeliest task metric, in the spec's form; empty if none is evident.
    states: inputs that seem to take an output of the previous call.
    targets: the spec's targets; 'cpu' if nothing else is known.
    refused: why the model does not accept the given requests, as far as they were tried.
    serve, triton: the spec's values of that name.  version: of the spec.
    deciding: scalar inputs that decide which branch of an If runs."""

    name: str
    source: Mapping[str, object]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, FoundDim] = field(default_factory=dict)
    precisions: tuple[tuple[str, str], ...] = (("fp32", ""),)
    notes: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    metric: Mapping[str, object] = field(default_factory=dict)
    states: tuple[State, ...] = ()
    targets: tuple[str, ...] = ("cpu",)
    refused: str = ""
    serve: str = ""
    triton: Mapping[str, object] = field(default_factory=dict)
    version: str = ""
    deciding: frozenset[str] = frozenset()

    def hold_sizes(self, sizes: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]) -> "FoundModel":
        """The model with dims that include the sizes of requests and, except batches, are tuned for the usual ones. A
        guessed dim has only the usual size. Any other dim except a batch has at least half of the least size: a much
        smaller image is all border, and no data shows the right answer.  sizes: the usual ones.  ranges: the least and
        the greatest size of all requests.

        Raises DataError for a size that is not a multiple of the dim's `multiple`.
        """
        dims = dict(self.dims)
        for name, dim in self.dims.items():
            size, (least, greatest) = sizes[name], ranges[name]
            if bad_edge := next((edge for edge in (size, least, greatest) if edge % dim.multiple), None):
                raise DataError(
                    f"the requests have {name} {bad_edge}; the model takes multiples of {dim.multiple}: pad them"
                )
            reason = (
                f"{dim.why}; requests have {size if least == greatest else f'{least} to {greatest}, mostly {size}'}"
            )
            if dim.guessed:
                dims[name] = FoundDim(size, size, size, reason)
            elif is_batch(name):
                dims[name] = replace(dim, min=min(dim.min, least), max=max(dim.max, greatest), why=reason)
            else:
                half_size = max(least // 2 // dim.multiple * dim.multiple, dim.multiple)
                low = min(max(dim.min, half_size), least)
                reason += f", and {low} is half of the least" if low > dim.min else ""
                dims[name] = replace(dim, min=low, opt=size, max=max(dim.max, greatest), why=reason)
        return replace(self, dims=dims)


@dataclass(frozen=True)
class FoundEnsemble:
    """A Triton ensemble. graphs: configuration files by the graphs' names, in the order of the data flow.
    connections: 'GRAPH.INPUT' -> its source.  outputs: as 'GRAPH.OUTPUT'."""

    name: str
    graphs: Mapping[str, Path]
    connections: Mapping[str, str]
    outputs: tuple[str, ...]


def is_batch(name: str) -> bool:
    """Whether a dim of this name counts the samples of a batch."""
    return "batch" in name.lower() or name.lower() in ("n", "b", "bs")


def model_name(text: str) -> str:
    """A registry name made from a file's name: lower case, every run of other characters as one '-'."""
    slug = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")
    return re.sub(r"\.{2,}", ".", slug)[:63].rstrip("-._") or "model"


def graph_key(stem: str, keys: Sequence[str]) -> str:
    """A graph's name from its file's name, with a number if the name is taken."""
    slug = re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-_")[:28] or "graph"
    return next(name for name in (slug, *(f"{slug}-{number}" for number in range(2, 99))) if name not in keys)


def input_name(text: str) -> str:
    """A name for an input of an ensemble, from a tensor's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text)[:64]


def name_axes(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The inputs with names of dims that a spec accepts; dims with equal names in the model get equal names.

    Axis 0 becomes `batch` if its name says that it counts samples (`N`, `batch_size`). An axis without a name ('?')
    gets a usual name of its own: `batch` for axis 0, `height` and `width` of [n, c, h, w] and of [n, h, w, 3],
    `length` of a sequence. If a name is taken, the input's name precedes it. A sum of other dims stays a sum.
    """
    names_by_dim: dict[str, str] = {}
    named_specs = []
    leading_dims = {spec.shape[0] for spec in inputs if spec.shape}
    all_dims = {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)}
    for spec in inputs:
        shape: list[int | str] = []
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) or _terms(dim, all_dims):
                shape.append(dim)
            elif dim != "?" and dim in names_by_dim:
                shape.append(names_by_dim[dim])
            else:
                own_name = _identifier(dim) if dim != "?" else None
                if own_name and is_batch(own_name) and "batch" not in own_name.lower() and dim not in leading_dims:
                    own_name = None  # an n that is never axis 0 counts samples of a signal, or points
                if own_name and axis == 0 and is_batch(own_name) and "batch" not in all_dims:
                    own_name = "batch"
                name = _free(own_name or _usual_name(spec, axis), spec.name, names_by_dim)
                names_by_dim[dim if dim != "?" else f"{spec.name}\0{axis}"] = name
                shape.append(name)
        named_specs.append(replace(spec, shape=tuple(shape)))

    def rename(dim: int | str) -> int | str:
        terms = () if isinstance(dim, int) else _terms(dim, all_dims)
        return PLUS.join(names_by_dim.get(term, term) for term in terms) if terms else dim

    return tuple(replace(spec, shape=tuple(map(rename, spec.shape))) for spec in named_specs)


def _terms(dim: str, every: Collection[str]) -> list[str]:
    """The terms of a dim whose name is a sum of other dims, 'past_length + length' or 'past_length + 1', or the total
    of two, 'total_length'; else none."""
    total_match = re.fullmatch(r"total_(\w+)", dim)
    terms = [f"past_{total_match[1]}", total_match[1]] if total_match else re.split(r"\s*\+\s*", dim)
    dim_terms = [term for term in terms if term in every and term != dim]
    return (
        terms if dim_terms and all(term in dim_terms or re.fullmatch("[1-9][0-9]{,8}", term) for term in terms) else []
    )


def _identifier(text: str) -> str | None:
    """A dim's own name as an identifier; None for a numbered name, as converters generate them."""
    word = re.sub(r"\W+", "_", text).strip("_")
    counter_match = re.fullmatch(r"(?:unk_+|dynamic_axes_|(?:p2o_)?DynamicDimension_|s|d|dim_?)\d+", word)
    return word if word.isidentifier() and not counter_match else None


def _usual_name(spec: TensorSpec, axis: int) -> str:
    rank = len(spec.shape)
    if axis == 0:
        return "batch"
    height_axis = 1 if spec.shape[-1] in (1, 3, 4) and isinstance(spec.shape[1], str) else 2  # 1: [n, h, w, c]
    if rank == 4 and height_axis <= axis <= height_axis + 1 and spec.dtype.startswith(("float", "uint8")):
        return ("height", "width")[axis - height_axis]
    return "length" if axis == 1 or rank == 3 else f"axis{axis}"


def _free(name: str, owner: str, names: Mapping[str, str]) -> str:
    used_names = set(names.values())
    if name not in used_names:
        return name
    base_name = re.sub(r"\W+", "_", f"{owner}_{name}").strip("_")
    base_name = base_name if base_name.isidentifier() else f"_{base_name}"
    return next(text for text in (base_name, *(f"{base_name}_{n}" for n in range(2, 1000))) if text not in used_names)


# Words that distinguish a state's input name from its output name: `state` and `stateN`, `h0` and `hn`, `hidden_in`
# and `hidden_out`, `past_key_values.0.key` and `present.0.key`, as exporters and audio libraries write them.
_WAYS = r"past_key_values?|past|present|prev(?:ious)?|next|new|last|old|cur(?:rent)?|input|output|in|out|cache|n"
# A name of such words alone is a state if it has one of these: `past` and `present`, `cache` and `cache_out`.
_CACHE = re.compile("past|present|cache", re.I)
_WORD = re.compile(rf"(?:^|(?<=[^A-Za-z0-9]))(?:{_WAYS})(?=$|[^A-Za-z0-9])", re.I)


def find_states(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], sources: Mapping[str, str] = MappingProxyType({})
) -> tuple[State, ...]:
    """States, which begin with zeros: pairs of an input and an output with different names of the same `stem_of`, the
    same dtype and shapes that can be equal. An ambiguous name is no state; () if every input would be a state.

    A bool input (a mask) is no state, nor is an input that the model returns unchanged: it would keep its first value.
    sources: output -> the input that it repeats (`find_source`), if any."""
    states = []
    for input_spec in inputs:
        namesakes = [spec for spec in outputs if stem_of(spec.name) == stem_of(input_spec.name)]
        matches = [
            spec for spec in namesakes if spec.dtype == input_spec.dtype and can_be_equal(spec.shape, input_spec.shape)
        ]
        rivals = [spec for spec in inputs if stem_of(spec.name) == stem_of(input_spec.name)]
        is_changed = input_spec.dtype != "bool" and all(sources.get(spec.name) != input_spec.name for spec in matches)
        if (
            stem_of(input_spec.name)
            and len(matches) == len(rivals) == 1
            and matches[0].name != input_spec.name
            and is_changed
        ):
            states.append(State(input_spec.name, matches[0].name))
    return tuple(states) if len(states) < len(inputs) else ()


def begin_empty(facts: FoundModel, outputs: Sequence[TensorSpec]) -> FoundModel:
    """The model with 0 as the least size of dims that only states have and that grow. A dim grows if the state's output
    has another dim on that axis."""
    input_dims = {dim for spec in without_states(facts.inputs, facts.states) for dim in spec.shape}
    input_shapes, output_shapes = ({spec.name: spec.shape for spec in specs} for specs in (facts.inputs, outputs))
    axis_pairs = (zip(input_shapes[state.input], output_shapes[state.output], strict=True) for state in facts.states)
    grown_dims = {
        dim for pairs in axis_pairs for dim, output_dim in pairs if isinstance(dim, str) and output_dim != dim
    } - input_dims
    reason = "the length that earlier calls left; 0 before the first call"
    dims = {name: replace(dim, min=0, multiple=1, why=reason) for name, dim in facts.dims.items() if name in grown_dims}
    return replace(facts, dims={**facts.dims, **dims})


def as_inputs(facts: FoundModel, states: Collection[State] | None = None) -> FoundModel:
    """The model with all states, or the chosen ones, as ordinary inputs, which are never empty. Used if requests
    contain states."""
    remaining_states = tuple(state for state in facts.states if states is not None and state not in states)
    names = {state.input for state in remaining_states}
    state_dims = {dim for spec in facts.inputs if spec.name in names for dim in spec.shape}
    empty_dims = {
        name: replace(dim, min=1, why="what calls have left")
        for name, dim in facts.dims.items()
        if not dim.min and name not in state_dims
    }
    return replace(facts, states=remaining_states, dims={**facts.dims, **empty_dims})


def stem_of(name: str) -> tuple[str, ...]:
    """The words of a name without those for a direction (in, out); numbers are words, and 'h0' and 'hn' become 'h'."""
    split_name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", _WORD.sub("_", split_name)) if word]
    return tuple(re.sub(r"^([a-z])[0n]$", r"\1", word) for word in words) or (("cache",) if _CACHE.search(name) else ())


# A last axis of at least this size is a vocabulary.
_VOCABULARY = 1000
# Names of token ids; not `position_ids`, `token_type_ids`.
_IDS = re.compile(r"^(?:(?:decoder_)?input_)?ids$|^tokens?$", re.I)


def suggest_metric(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, object]:
    """A task metric in the spec's form, with an initial limit; empty if none is evident."""
    return next(_suggestions(inputs, outputs), {})


def _suggestions(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Iterator[dict[str, object]]:
    states = find_states(inputs, outputs)
    inputs = without_states(inputs, states)  # caches of keys and values have 4 axes, like images
    images = [spec for spec in inputs if len(spec.shape) == 4 and spec.dtype != "int64"]
    integer_inputs = [spec for spec in inputs if spec.dtype in ("int64", "int32")]
    is_text = any(len(spec.shape) == 2 for spec in integer_inputs)
    has_token_ids = len([spec for spec in integer_inputs if _IDS.search(spec.name)]) == 1
    for spec in outputs:
        name, shape = spec.name, spec.shape
        last_size = shape[-1] if shape and isinstance(shape[-1], int) else 0
        if "float" not in spec.dtype:
            continue
        if images and last_size == 4 and "box" in name.lower():
            scores = next((output_spec.name for output_spec in outputs if "score" in output_spec.name.lower()), None)
            score_options = {"scores": scores, "least_score": 0.25} if scores else {}
            yield {"name": "detection", "output": name, **score_options, "floor": 0.95}
        elif images and len(shape) == 3 and _is_head(shape, images):
            metric_options = {"form": "cxcywh", "head": True, "least_score": 0.25, "nms": 0.45}
            yield {"name": "detection", "output": name, **metric_options, "floor": 0.95}
        elif images and len(shape) == 3 and last_size > 10:
            yield {"name": "ctc", "output": name, "floor": 0.98}
        elif states and has_token_ids and "logits" in name.lower() and last_size > 1:
            yield {"name": "perplexity", "output": name, "floor": 0.95}
        elif is_text and len(shape) == 3 and last_size >= _VOCABULARY:
            yield {"name": "tokens", "output": name, "floor": 0.99}
        elif is_text and (name == "last_hidden_state" or "embedding" in name.lower()):
            pool_options = {"pool": "mean"} if len(shape) == 3 else {}
            yield {"name": "embeddings", "output": name, **pool_options, "floor": 0.99}
        elif images and len(shape) == 2 and last_size > 2:
            yield {"name": "top_k", "output": name, "k": 1, "floor": 0.99}


def _is_head(shape: Sequence[int | str], images: Sequence[TensorSpec]) -> bool:
    """Whether [batch, 4 + classes, anchors] is a detector's head: with an anchor for each 8, 16 and 32 pixels of an
    image. For images of dynamic size, the axis is named by an expression with `floor`."""
    rows, anchor_count = shape[1:]
    if isinstance(anchor_count, str):
        return isinstance(rows, int) and rows > 4 and "floor" in anchor_count
    sizes = [[size for size in spec.shape[2:] if isinstance(size, int)] for spec in images]
    anchor_counts = {
        sum((size[0] // stride) * (size[1] // stride) for stride in (8, 16, 32)) for size in sizes if len(size) == 2
    }
    return isinstance(rows, int) and rows > 4 and anchor_count in anchor_counts
