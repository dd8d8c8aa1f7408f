"""The text of a draft of a spec, of one model or of several graphs."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import yaml

from enginesmith.core.errors import InputError
from enginesmith.core.state import State, step_inputs
from enginesmith.core.types import TensorSpec
from pipeline.drafts.facts import FoundEnsemble, FoundModel, as_inputs, input_name, stem_of
from pipeline.sources.onnx_header import HeaderTensor, can_be_equal, format_shape
from pipeline.spec.source import FILL_IN

_HEAD = """\
# Written by `enginesmith init`; what was found stands in the comments. Every path is relative to this file.
# `enginesmith plan THIS_FILE` shows what would be built and why; `enginesmith debug schema` prints all keys.
"""
_CALIBRATION = "real inputs that int8 is measured and, if need be, searched on: add int8"
# The comment on golden data. Without golden data, every engine is proven on random inputs.
REAL = (
    "real inputs, others than those: 100 or more that the model is used on, each class among them; without them "
    "engines are only `proven on random inputs`, which no channel of proven engines takes"
)


def write_spec(facts: FoundModel, calibration: str | None = None, golden: str | None = None) -> str:
    """The text of the spec. calibration, golden: files of samples; without calibration, only a comment names int8."""
    return _HEAD + "\n" + "\n".join(_sections(facts, calibration, golden)) + "\n"


def quote(value: object) -> str:
    """A value as YAML in one line, quoted if YAML would read it as something else."""
    quote_style = '"' if isinstance(value, str) and not value.isprintable() else None  # a line end would end the key
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=quote_style, width=1 << 30, allow_unicode=False, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("...").rstrip("\n")


def _sections(facts: FoundModel, calibration: str | None, golden: str | None) -> Iterator[str]:
    yield from (f"# {note}" for note in facts.notes)
    yield f"model: {quote(facts.name)}"
    if facts.version:
        yield f"version: {quote(facts.version)}   # as it is served now; without it versions are numbered from 1"
    yield f"source: {quote(dict(facts.source))}"
    yield ""
    yield from _tensors(facts)
    yield ""
    names = [name for name, _ in facts.precisions]
    if calibration and "fp16" in names:
        names.append("int8")
    reason = "; ".join(f"{name}: {reason}" for name, reason in facts.precisions if reason)
    yield f"precisions: [{', '.join(names)}]" + (f"   # {reason}" if reason else "")
    targets_line = f"targets: [{', '.join(facts.targets)}]"
    yield f"{targets_line:<29} # or a generation (ampere), a product (l4), sm_89, gpu (each generation), all"
    if facts.serve:
        yield f"serve: {facts.serve:<22} # what opens the engines (docs/guides/serving-layouts.md)"
    if facts.triton:
        yield f"triton: {quote(dict(facts.triton))}"
    yield ""
    for key, path, reason in (("calibration", calibration, _CALIBRATION), ("golden", golden, REAL)):
        yield f"{key}: {{data: {quote(path)}}}" if path else f"# {key}: {{data: {key}.npz}}   # {reason}"
    if facts.metric:
        reason = "in golden: what the model is for (docs/guides/bring-a-model.md#add-a-task-metric)"
        yield f"# metric: {quote(dict(facts.metric))}   # {reason}"


def _tensors(facts: FoundModel) -> Iterator[str]:
    """Inputs, outputs, states and dims."""
    yield "inputs:                       # numbers are fixed sizes, names are dims"
    for spec in facts.inputs:
        if reason := facts.unknown.get(spec.name):
            yield f"  # {FILL_IN}: dtype, and sizes or names of dims: {reason}"
        yield f"  {quote(spec.name)}: {{dtype: {spec.dtype}, shape: [{', '.join(map(quote, spec.shape))}]}}"
    if facts.left_out:
        yield from (f"# left out: {reason}" for reason in facts.left_out.values())
        yield f"outputs: [{', '.join(map(quote, facts.outputs))}]"
    elif facts.outputs:
        yield f"# outputs: [{', '.join(map(quote, facts.outputs))}]   # the model's own; or other names, in this order"
    if facts.states:
        yield ""
        yield "state:                        # taken from the call before, not from data: remove what is not a state"
        for state in facts.states:
            yield f"  {quote(state.input)}: {{output: {quote(state.output)}, initial: 0}}"
    if facts.dims:
        yield ""
        yield "dims:                         # sizes that engines must take; the smaller the range, the faster they are"
        for name, dim in facts.dims.items():
            name = quote(name)
            multiple_text = f", multiple: {dim.multiple}" if dim.multiple > 1 else ""
            yield f"  {name}: {{min: {dim.min}, opt: {dim.opt}, max: {dim.max}{multiple_text}}}   # {dim.why}"


_ENSEMBLE_HEAD = """\
# Written by `enginesmith init`: several graphs as one model (docs/guides/ensembles.md). What was found stands in the
# comments. `enginesmith plan THIS_FILE` shows what would be built and why.
"""
# Several graphs share inputs with such names if their shapes are equal.
_SHARED = re.compile(r"mask|len(gth)?s?$", re.IGNORECASE)

# Keys of a task metric that name outputs.
_OUTPUTS = ("output", "scores", "classes")


@dataclass(frozen=True)
class FoundGraph:
    """A graph of an ensemble. key: its name in the ensemble.  gives: its outputs."""

    key: str
    model: FoundModel
    gives: tuple[HeaderTensor, ...]


@dataclass(frozen=True)
class FoundConnection:
    """The source of a graph's input, with the reason. source: None if unknown."""

    key: str
    source: str | None
    why: str


def _steps(graph: FoundGraph) -> tuple[TensorSpec, ...]:
    """The inputs of a graph in each step: all except its states."""
    return step_inputs(graph.model.inputs, graph.model.states)


def find_connections(graphs: Sequence[FoundGraph], ensemble: FoundEnsemble | None = None) -> list[FoundConnection]:
    """The source of each input that takes an output of an earlier graph, or shares an input of the ensemble with an
    earlier graph. ensemble: of a config.pbtxt; its connections are then the result."""
    if ensemble:
        return [FoundConnection(key, source, "as in config.pbtxt") for key, source in ensemble.connections.items()]
    connections = list[FoundConnection]()
    for index, graph in enumerate(graphs):
        for spec in _steps(graph):
            key = f"{graph.key}.{spec.name}"
            source_match = _find_giver(graph, spec, graphs[:index])
            shared_input = _find_shared(spec, graphs[:index])
            if shared_input is not None:
                name = input_name(shared_input[1])
                reason = "an input of the ensemble that goes to several graphs"
                connections.append(FoundConnection(".".join(shared_input), name, reason))
                connections.append(FoundConnection(key, name, "the same, by name and shape"))
            elif source_match is not None:
                connections.append(FoundConnection(key, *source_match))
    return [*dict.fromkeys(connections)]


def find_unconnected(graphs: Sequence[FoundGraph]) -> dict[str, bool]:
    """Key of each graph without a known connection -> whether a connection is impossible: no output or input fits
    another graph's by type and shape."""
    sources = {connection.key: connection.source for connection in find_connections(graphs) if connection.source}
    connected_keys = {text.partition(".")[0] for pair in sources.items() for text in pair}
    fitting_keys = {
        key
        for giver, taker in permutations(graphs, 2)
        if any(_fits(output, spec) for output in giver.gives for spec in _steps(taker))
        for key in (giver.key, taker.key)
    }
    return {graph.key: graph.key not in fitting_keys for graph in graphs if graph.key not in connected_keys}


def connect_states(graphs: Sequence[FoundGraph]) -> list[FoundGraph]:
    """The graphs without states that are connections: inputs that take an output of an earlier graph. The output has
    the input's name, and is no state of its own graph. If it is a state there too (`hidden` and `hidden_out` in both),
    it is a connection only if nothing else connects the graphs; it is then a state of neither graph.
    """
    new_graphs = list(graphs)
    for index, graph in enumerate(new_graphs):
        earlier_graphs = new_graphs[:index]
        states = {state: _find_namesake(graph, state.input, earlier_graphs) for state in graph.model.states}
        free_states = {state for state, pair in states.items() if pair and not _own_state(pair)}
        is_alone = not free_states and not any(_find_named(spec, earlier_graphs) for spec in _steps(graph))
        shared_states = {state: pair for state, pair in states.items() if pair and _own_state(pair) and is_alone}
        new_graphs[index] = _without(graph, {*free_states, *shared_states})
        for source, output_name in shared_states.values():
            position = next(position for position, candidate in enumerate(new_graphs) if candidate.key == source.key)
            new_graphs[position] = _without(
                new_graphs[position],
                {state for state in new_graphs[position].model.states if state.output == output_name},
            )
    return new_graphs


def _without(graph: FoundGraph, states: Collection[State]) -> FoundGraph:
    return replace(graph, model=as_inputs(graph.model, states)) if states else graph


def _own_state(giver: tuple[FoundGraph, str]) -> bool:
    return any(state.output == giver[1] for state in giver[0].model.states)


def _find_namesake(graph: FoundGraph, name: str, before: Sequence[FoundGraph]) -> tuple[FoundGraph, str] | None:
    """The only output of an earlier graph with a name like that of an input; None for none or several."""
    tensor = next(spec for spec in graph.model.inputs if spec.name == name)
    namesakes = [
        (source, output.name) for source, output in _list_fitting(tensor, before) if _alike(source, output, tensor)
    ]
    return namesakes[0] if len(namesakes) == 1 else None


def _alike(graph: FoundGraph, out: HeaderTensor, spec: TensorSpec) -> bool:
    """Whether an output and an input have the same name, except for words such as `out`, `next` and `past` and the name
    of the output's graph: `hidden_out` and `hidden`, `last_hidden_state` and `encoder_hidden_states`."""
    graph_words = {*stem_of(graph.key), "enc", "encoder"}
    stems = [
        tuple(word.rstrip("s") for word in stem_of(name) if word not in graph_words) for name in (out.name, spec.name)
    ]
    return bool(stems[0]) and stems[0] == stems[1]


def _find_giver(graph: FoundGraph, spec: TensorSpec, before: Sequence[FoundGraph]) -> tuple[str | None, str] | None:
    """The output that an input of a graph takes, with the reason; the source is None if several outputs are possible.
    An output that another input takes by name is no candidate by type and shape.
    """
    tensor_text = f"{spec.dtype} {format_shape(spec.shape)}"
    if source_text := _find_named(spec, before):
        state = next(
            (output.name for output in graph.gives if _fits(output, spec) and _alike(graph, output, spec)), None
        )
        hint = f"; it could be a state that takes {graph.key}.{state}" if state else ""
        return source_text, f"by name and shape, {tensor_text}{hint}"
    named_sources = {_find_named(step, before) for step in _steps(graph)}
    pairs = [f"{source.key}.{output.name}" for source, output in _list_fitting(spec, before)]
    # Floats with a fixed size behind axis 0: an equal type and shape is then unlikely to be a coincidence.
    is_specific = spec.dtype.startswith("float") and any(isinstance(dim, int) and dim > 1 for dim in spec.shape[1:])
    fitting_pairs = [pair for pair in pairs if pair not in named_sources] if is_specific else []
    if len(fitting_pairs) == 1:
        return fitting_pairs[0], f"the only output of this type and shape, {tensor_text}"
    return (None, f"one of {', '.join(fitting_pairs)}, or an input of the ensemble") if fitting_pairs else None


def _find_named(spec: TensorSpec, before: Sequence[FoundGraph]) -> str | None:
    """The only output with an input's name, else the only one with a similar name; None for none or several."""
    fitting_pairs = _list_fitting(spec, before)
    namesakes = [pair for pair in fitting_pairs if pair[1].name == spec.name]
    alike_pairs = [(graph, output) for graph, output in fitting_pairs if _alike(graph, output, spec)]
    candidates = next((pairs for pairs in (namesakes, alike_pairs) if len(pairs) == 1), ())
    return next((f"{graph.key}.{output.name}" for graph, output in candidates), None)


def _list_fitting(spec: TensorSpec, before: Sequence[FoundGraph]) -> list[tuple[FoundGraph, HeaderTensor]]:
    return [(graph, output) for graph in before for output in graph.gives if _fits(output, spec)]


def _fits(out: HeaderTensor, spec: TensorSpec) -> bool:
    return out.dtype == spec.dtype and out.shape is not None and can_be_equal(out.shape, spec.shape)


def _find_shared(spec: TensorSpec, before: Sequence[FoundGraph]) -> tuple[str, str] | None:
    """(graph, input) of an earlier mask or length of the same type and shape, if one name ends with the other."""
    if not _SHARED.search(spec.name):
        return None
    for graph in before:
        for step in _steps(graph):
            same_type = step.dtype == spec.dtype and step.shape == spec.shape
            if same_type and (spec.name.endswith(step.name) or step.name.endswith(spec.name)):
                return graph.key, step.name
    return None


def write_ensemble(
    name: str, graphs: Sequence[FoundGraph], files: Mapping[str, str], ensemble: FoundEnsemble | None = None
) -> str:
    """The text of an ensemble's spec. files: of its graphs' specs, by graph.  ensemble: of a config.pbtxt, if any."""
    return _ENSEMBLE_HEAD + "\n" + "\n".join(_sections_ensemble(name, graphs, files, ensemble)) + "\n"


def _sections_ensemble(
    name: str, graphs: Sequence[FoundGraph], files: Mapping[str, str], ensemble: FoundEnsemble | None
) -> Iterator[str]:
    connections = find_connections(graphs, ensemble)
    yield f"model: {quote(name)}"
    yield "graphs:                       # in the order of the data flow"
    yield from (f"  {graph.key}: {quote(files[graph.key])}" for graph in graphs)
    loose_graphs = {} if ensemble else find_unconnected(graphs)
    has_lines = bool(connections) or not all(loose_graphs.values())
    yield f"connections:{'   ' if has_lines else ' {}'}               # GRAPH.INPUT: what gives it"
    for connection in connections:
        if connection.source is None:
            yield f"  # {FILL_IN}? {connection.key}: {connection.why}"
        else:
            yield f"  {quote(connection.key)}: {quote(connection.source)}   # {connection.why}"
    sources = {connection.key: connection.source for connection in connections if connection.source}
    for graph in graphs:
        if not loose_graphs.get(graph.key, True):
            yield f"  # {FILL_IN}: nothing shows what connects {graph.key}; it takes {_list(graph.model.inputs)}"
            yield f"  #   and gives {_list(graph.gives)}"
    if ensemble:
        yield f"outputs: [{', '.join(map(quote, ensemble.outputs))}]"
    if any(loose_graphs.values()):
        inner = {
            *sources.values(),
            *(f"{graph.key}.{state.output}" for graph in graphs for state in graph.model.states),
        }
        outputs = [f"{graph.key}.{output.name}" for graph in graphs for output in graph.gives]
        names_text = ", ".join(quote(output) for output in outputs if output not in inner)
        yield f"outputs: [{names_text}]   # also of graphs that do not feed each other"
    yield ""
    steps_text = ", sequence: sequence" if any(graph.model.states for graph in graphs) else ""
    comment = "real inputs of the ensemble, which prove it and its graphs; arrays:"
    yield f"golden: {{data: golden.npz{steps_text}}}    # {comment}"
    yield from (f"#   {line}" for line in _wanted(graphs, sources))
    if steps_text:
        yield "#   sequence: int64; of each sample, which is a step, the number of its sequence (docs/guides/state.md)"
    if suggestion := graphs[-1].model.metric:
        metric = {key: f"{graphs[-1].key}.{text}" if key in _OUTPUTS else text for key, text in suggestion.items()}
        yield "# in golden, with right answers: only these show that a connection uses the wrong output:"
        yield f"#   labels: ARRAY, metric: {quote(metric)}"
    yield f"# calibration: {{data: calibration.npz{steps_text}}}   # the same arrays of other samples, for int8"
    yield "publication: {channel: candidate}"


def _list(tensors: Sequence[TensorSpec] | Sequence[HeaderTensor]) -> str:
    return ", ".join(
        f"{spec.name} {spec.dtype} {format_shape(spec.shape) if spec.shape is not None else '[?]'}" for spec in tensors
    )


def _wanted(graphs: Sequence[FoundGraph], sources: Mapping[str, str]) -> list[str]:
    """The inputs of the ensemble: name, type and shape, each once."""
    input_lines = dict[str, str]()
    for graph in graphs:
        for spec in _steps(graph):
            source = sources.get(f"{graph.key}.{spec.name}", f"{graph.key}.{spec.name}")
            if source == f"{graph.key}.{spec.name}" or "." not in source:
                input_lines.setdefault(source, f"{source}: {spec.dtype} {format_shape(spec.shape)}")
    return [*input_lines.values()]


def check_unknown(graphs: Sequence[FoundGraph]) -> None:
    """Raise InputError for an input whose shape its file does not state: connections need shapes."""
    for graph in graphs:
        for name, reason in graph.model.unknown.items():
            raise InputError(f"{graph.key}: input {name!r}: {reason}; export it with shapes, or write the spec by hand")
