"""State between calls, and ensembles: several graphs that form one model."""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.errors import Digest
from enginesmith.core.names import Name, NodeName, is_path
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Count, JsonObject
from enginesmith.core.types import PLUS, BuildRequest, ShapeProfile, TensorSpec, list_sums

# State between calls: inputs that take the values of outputs in the previous call. Standard library only.


@dataclass(frozen=True)
class Places:
    """The places that a step writes in a state of fixed size. axis: of the places.  at: an input (a caller's or a
    state) with the places; if `count`, a dim of a step's inputs, is their number, `at` has only the first."""

    axis: Count
    at: str
    count: str = ""


@dataclass(frozen=True)
class State:
    """An input that takes the value of an output in the last call. initial: its elements' value in the first call.

    places: for a state of fixed size that steps fill place by place.
    """

    input: str
    output: str
    initial: float = 0.0
    places: Places | None = None


def without_states(inputs: Sequence[TensorSpec], states: Sequence[State]) -> tuple[TensorSpec, ...]:
    """The inputs that a caller gives in each step, in order."""
    state_inputs = {state.input for state in states}
    return tuple(spec for spec in inputs if spec.name not in state_inputs)


def step_inputs(inputs: Sequence[TensorSpec], states: Sequence[State]) -> tuple[TensorSpec, ...]:
    """The inputs that a caller gives, with the sizes of one step. An input that also covers past steps, such as an
    attention mask over `past + tokens`, has the size `tokens`."""
    stateless_inputs = without_states(inputs, states)
    axis_sizes = grown_axes(stateless_inputs)
    return tuple(
        replace(spec, shape=tuple(axis_sizes.get((spec.name, axis), size) for axis, size in enumerate(spec.shape)))
        for spec in stateless_inputs
    )


def grown_axes(inputs: Sequence[TensorSpec]) -> dict[tuple[str, int], int | str]:
    """The axes that grow with the states: (input, axis) -> its size without the growing dims. The size of such an axis
    is a sum with a dim that no input of the caller has."""
    input_dims = {size for spec in inputs for size in spec.shape}
    axis_sizes: dict[tuple[str, int], int | str] = {}
    for spec, axis, sum_dim in list_sums(inputs):
        base_terms = [term for term in sum_dim.split(PLUS) if term.isdecimal() or term in input_dims]
        if len(base_terms) < len(sum_dim.split(PLUS)):
            axis_sizes[spec.name, axis] = (
                sum(map(int, base_terms)) if all(map(str.isdecimal, base_terms)) else PLUS.join(base_terms)
            )
    return axis_sizes


def state_ends(
    inputs: Sequence[TensorSpec], states: Sequence[State], profiles: Sequence[ShapeProfile]
) -> dict[str, tuple[int, int]]:
    """The smallest and the largest size, over all profiles, of dims that only states have, such as a growing cache."""
    input_dims = {dim for spec in without_states(inputs, states) for dim in spec.shape}
    shapes = {spec.name: spec.shape for spec in inputs}
    dim_ranges: dict[str, tuple[int, int]] = {}
    for name, low, _, high in (ranges for profile in profiles for ranges in profile.inputs):
        for dim, min_size, max_size in zip(shapes.get(name, ()), low, high, strict=False):
            if isinstance(dim, str) and dim not in input_dims:
                old_range = dim_ranges.get(dim, (min_size, max_size))
                dim_ranges[dim] = min(min_size, old_range[0]), max(max_size, old_range[1])
    return dim_ranges


def with_int8_states(request: BuildRequest) -> BuildRequest:
    """The request as the compiler gets it: its quantized states are int8, as inputs and as outputs."""
    if not request.quantized_states:
        return request
    state_names = {name for state in request.quantized_states for name in (state.input, state.output)}

    def ends(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(spec, dtype="int8") if spec.name in state_names else spec for spec in specs)

    return replace(request, inputs=ends(request.inputs), outputs=ends(request.outputs), quantized_states=())


@dataclass(frozen=True)
class _StateRule(Excerpt):
    output: str
    initial: float
    places: Places | None = None


@dataclass(frozen=True)
class _StatefulSpec(Excerpt):
    state: Mapping[str, _StateRule] = field(default_factory=dict)


def states_of(spec: Mapping[str, object]) -> tuple[State, ...]:
    """The states of a version, from the spec in its manifest. Raises `parsing.Malformed` for an invalid state."""
    state_specs = decode(spec, _StatefulSpec, "spec").state
    return tuple(
        State(name, state_spec.output, state_spec.initial, state_spec.places)
        for name, state_spec in state_specs.items()
    )


# Ensembles: several graphs, each a version of its own model, that form one model. Standard library only.
#
# Between graphs may be functions: the user's Python code, such as cropping a detector's boxes from a picture. A
# function runs right before the first graph that uses its outputs; a function whose outputs no graph uses runs last.
#
# The value of a graph's input has a source: 'GRAPH.OUTPUT' of an earlier graph, or the name of an ensemble's input,
# which is 'GRAPH.INPUT' unless the spec names it.

# The backend of an ensemble's engines. Such an engine is a document that names an engine of each graph.
ENSEMBLE = "ensemble"
# The prefix, among a manifest's sources, of the files of functions.
FUNCTION = "function"


@dataclass(frozen=True)
class PinnedGraph:
    """A graph of an ensemble. model, version, manifest: its version, and the digest of the version's manifest."""

    name: NodeName
    model: Name
    version: Name
    manifest: Digest
    sources: Mapping[str, str]

    @property
    def reference(self) -> str:
        """'model@version'."""
        return f"{self.model}@{self.version}"


@dataclass(frozen=True)
class EnsembleFunction:
    """A function between graphs. file, function: the Python file, relative to the ensemble's spec, and its name.

    inputs, outputs: its tensors.  sources: of each input.  files: digests by path, of the file and of every local
    module that it imports.
    """

    name: NodeName
    file: str
    function: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sources: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True)
class _Tensor(Excerpt):
    dtype: str
    shape: tuple[Count | str, ...]


@dataclass(frozen=True)
class _Function(Excerpt):
    """function: 'FILE:NAME'."""

    function: str
    inputs: Mapping[str, _Tensor]
    outputs: Mapping[str, _Tensor]


@dataclass(frozen=True)
class _Wiring(Excerpt):
    """The functions in a spec. connections: 'FUNCTION.INPUT' -> its source."""

    functions: Mapping[NodeName, _Function] = field(default_factory=dict)
    connections: Mapping[str, str] = field(default_factory=dict)


def read_functions(spec: Mapping[str, object], sources: Mapping[str, str]) -> list[EnsembleFunction]:
    """The functions of a version, from its manifest's spec and sources. Raises Malformed for a function whose file is
    not among the sources."""
    wiring = decode(spec, _Wiring, "spec")
    return [_make_function(name, function, wiring.connections, sources) for name, function in wiring.functions.items()]


def _make_function(
    name: str, function_spec: _Function, connections: Mapping[str, str], sources: Mapping[str, str]
) -> EnsembleFunction:
    file, _, function = function_spec.function.partition(":")
    prefix, spec_path = f"{FUNCTION} {name} ", f"spec.functions.{name}"
    files = {key.removeprefix(prefix): digest for key, digest in sources.items() if key.startswith(prefix)}
    if bad_paths := [path for path in files if not is_path(path)]:
        raise Malformed(
            f"sources of {spec_path} has {bad_paths[0]!r:.80}; it must be a relative path without '.' and '..'"
        )
    if file not in files:
        raise Malformed(f"{spec_path}.function is {file!r:.80}, but no source is named {prefix}{file[:80]}")
    inputs, outputs = (
        tuple(TensorSpec(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items())
        for tensors in (function_spec.inputs, function_spec.outputs)
    )
    input_sources = {spec.name: connections.get(f"{name}.{spec.name}", f"{name}.{spec.name}") for spec in inputs}
    return EnsembleFunction(name, file, function, inputs, outputs, input_sources, files)


# The format of the JSON beside a pulled engine; here, because a pull must not import the code that opens engines.
DESCRIPTION_FORMAT = 1


def parts_folder(model: str, version: str) -> str:
    """The folder of a pulled ensemble's graphs and functions. It is unique, since no name contains '@'."""
    return f"{model}@{version}"


def order_nodes(
    graphs: Mapping[str, Mapping[str, str]], functions: Mapping[str, Mapping[str, str]]
) -> dict[str, Mapping[str, str]]:
    """All nodes in the order of execution, each with the sources of its inputs: graphs in their own order, functions
    before their first user, or last. In a circle of functions, one comes before a function that it depends on."""
    ordered_nodes: dict[str, Mapping[str, str]] = {}

    def place(name: str, waiting: tuple[str, ...] = ()) -> None:
        for source in functions[name].values() if name not in (*ordered_nodes, *waiting) else ():
            if (source_node := source.partition(".")[0]) in functions:
                place(source_node, (*waiting, name))
        if name not in waiting:
            ordered_nodes.setdefault(name, functions[name])

    for graph, sources in graphs.items():
        for provider in (source.partition(".")[0] for source in sources.values()):
            if provider in functions:
                place(provider)
        ordered_nodes[graph] = sources
    for name in sorted(functions):
        place(name)
    return ordered_nodes


def split_source(source: str, before: Container[str]) -> tuple[str, str] | None:
    """(graph, output) if a source is an output of a graph; None for an input of the ensemble. before: names of the
    earlier graphs."""
    graph, separator, output = source.partition(".")
    return (graph, output) if separator and graph in before else None


def list_inputs(wiring: Mapping[str, Mapping[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """The inputs of the ensemble, in order, each with the (graph, input) pairs that use it. wiring: input sources."""
    consumers: dict[str, list[tuple[str, str]]] = {}
    earlier_graphs: list[str] = []
    for graph, inputs in wiring.items():
        for name, source in inputs.items():
            if split_source(source, earlier_graphs) is None:
                consumers.setdefault(source, []).append((graph, name))
        earlier_graphs.append(graph)
    return consumers


def name_dims(inputs: Sequence[TensorSpec], sources: Mapping[str, str], whole: Sequence[TensorSpec]) -> dict[str, str]:
    """The ensemble's names of a graph's dims, for inputs of the graph that are inputs of the ensemble. sources: of the
    graph's inputs.  whole: the inputs of the ensemble."""
    whole_shapes = {spec.name: spec.shape for spec in whole}
    axis_pairs = (zip(spec.shape, whole_shapes.get(sources[spec.name], ()), strict=False) for spec in inputs)
    dim_pairs = ((dim, name) for axes in axis_pairs for dim, name in axes if isinstance(dim, str) and PLUS not in dim)
    return {dim: str(name) for dim, name in dim_pairs}


def name_states(
    graph: str, states: Sequence[State], sources: Mapping[str, str], dims: Mapping[str, str], whole: Collection[str]
) -> tuple[State, ...]:
    """A graph's states as states of the ensemble, which stores them: 'GRAPH.INPUT' takes 'GRAPH.OUTPUT'.

    sources: of the graph's inputs.  dims: from `name_dims`.  whole: names of the ensemble's inputs. If an earlier graph
    computes the places that a step writes, they are unknown before the step and are not checked.
    """

    def name_places(places: Places | None) -> Places | None:
        if places is None or sources[places.at] not in whole or (places.count and places.count not in dims):
            return None
        return replace(places, at=sources[places.at], count=dims.get(places.count, ""))

    return tuple(
        replace(
            state, input=f"{graph}.{state.input}", output=f"{graph}.{state.output}", places=name_places(state.places)
        )
        for state in states
    )


# The padding of requests to sizes that an engine takes, as data of a version.
#
# A dim may be padded if every input that has it names a pad value. Outputs are cropped on its axes.

REPEAT: Literal["repeat"] = "repeat"
# A number; or 'repeat', which repeats the last entry along the axis, and so keeps a tensor's extremes.
PadValue = float | Literal["repeat"]


@dataclass(frozen=True)
class Padding:
    """The padding rules of a version. inputs: input -> dim -> the pad value on that dim's axis.

    edges: dim -> sizes that it is padded up to, rising. Without edges, a dim is padded to the smallest size that an
    engine takes.
    """

    inputs: Mapping[str, Mapping[str, PadValue]] = field(default_factory=dict)
    edges: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)

    @property
    def dims(self) -> frozenset[str]:
        """The dims that may be padded."""
        return frozenset(dim for rules in self.inputs.values() for dim in rules)


@dataclass(frozen=True)
class _PaddedInput(Excerpt):
    pad: Mapping[str, PadValue] | None = None


@dataclass(frozen=True)
class _PaddedDim(Excerpt):
    buckets: tuple[Count, ...] | None = None


@dataclass(frozen=True)
class _PaddedSpec(Excerpt):
    inputs: Mapping[str, _PaddedInput] = field(default_factory=dict)
    dims: JsonObject = field(default_factory=dict)


def padding_of(spec: Mapping[str, object]) -> Padding:
    """The padding of a version, from the spec in its manifest. Raises `parsing.Malformed` for an invalid padding."""
    padded_spec = decode(spec, _PaddedSpec, "spec")
    padding = Padding({name: input_spec.pad for name, input_spec in padded_spec.inputs.items() if input_spec.pad})
    dim_items = ((name, padded_spec.dims[name]) for name in sorted(padding.dims & padded_spec.dims.keys()))
    edges = {name: decode(dim, _PaddedDim, f"spec.dims.{name}").buckets for name, dim in dim_items}
    return replace(padding, edges={name: sizes for name, sizes in edges.items() if sizes})
