"""The specs of several ONNX files that make one model: one for each, and one that says how they connect, as far as
names and shapes show it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from enginery.core.errors import InputError
from enginery.core.state import step_inputs
from enginery.core.types import TensorSpec
from pipeline.drafts.found import FoundModel, model_name
from pipeline.drafts.text import quote, write_spec
from pipeline.sources.onnx_header import HeaderTensor, format_shape
from pipeline.spec.source import FILL_IN

_HEAD = """\
# Written by `enginery init`: several graphs as one model (docs/guides/ensembles.md). What was found stands in the
# comments. `enginery plan THIS_FILE` shows what would be built and why.
"""
# Inputs of such names go to several graphs, where their shapes are the same.
_SHARED = re.compile(r"mask|len(gth)?s?$", re.IGNORECASE)

# Keys of a task metric that name outputs.
_OUTPUTS = ("output", "scores", "classes")


@dataclass(frozen=True)
class FoundGraph:
    """A graph as it was found. key: its name in the ensemble.  gives: its outputs."""

    key: str
    model: FoundModel
    gives: tuple[HeaderTensor, ...]


@dataclass(frozen=True)
class FoundConnection:
    """What gives an input of a graph, with the reason. source: None where nothing shows it."""

    key: str
    source: str | None
    why: str


def graph_key(stem: str, taken: Sequence[str]) -> str:
    """A graph's name out of its file's; with a number where another has it."""
    plain = re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-_")[:28] or "graph"
    return next(name for name in (plain, *(f"{plain}-{at}" for at in range(2, 99))) if name not in taken)


def name_graphs(whole: str, graphs: Sequence[FoundGraph]) -> list[FoundGraph]:
    """The graphs with models called 'WHOLE-GRAPH'."""
    return [replace(graph, model=replace(graph.model, name=model_name(f"{whole}-{graph.key}"))) for graph in graphs]


def _steps(graph: FoundGraph) -> tuple[TensorSpec, ...]:
    """What a graph is given in each step: its inputs without its states."""
    return step_inputs(graph.model.inputs, graph.model.states)


def find_connections(graphs: Sequence[FoundGraph]) -> list[FoundConnection]:
    """What gives each input that takes an output of a graph before it, or shares an input of the whole with one."""
    found = list[FoundConnection]()
    for index, graph in enumerate(graphs):
        for item in _steps(graph):
            key = f"{graph.key}.{item.name}"
            given = _find_giver(item, graphs[:index])
            shared = _find_shared(item, graphs[:index])
            if shared is not None:
                name = _plain(shared[1])
                first = FoundConnection(f"{shared[0]}.{shared[1]}", name, "an input of the whole that goes to several")
                found += [first] * (first not in found) + [FoundConnection(key, name, "the same, by name and shape")]
            elif given is not None:
                found.append(FoundConnection(key, *given))
    return found


def find_unconnected(graphs: Sequence[FoundGraph]) -> list[FoundGraph]:
    """The graphs of which nothing shows what they take from others, or give to them."""
    sources = {item.key: item.source for item in find_connections(graphs) if item.source}
    reached = {text.partition(".")[0] for pair in sources.items() for text in pair}
    return [graph for graph in graphs if graph.key not in reached]


def _find_giver(item: TensorSpec, before: Sequence[FoundGraph]) -> tuple[str | None, str] | None:
    """The output that an input takes, with the reason; None as the source where several could be it."""
    fitting = [(graph.key, out) for graph in before for out in graph.gives if _fits(out, item)]
    named = [(key, out) for key, out in fitting if out.name == item.name]
    for chosen, why in ((named, "by name and shape"), (fitting, "the only output of this type and shape")):
        if len(chosen) == 1 and (named or _says_much(item)):
            return f"{chosen[0][0]}.{chosen[0][1].name}", f"{why}, {item.dtype} {format_shape(item.shape)}"
    if len(fitting) > 1 and _says_much(item):
        return None, f"one of {', '.join(f'{key}.{out.name}' for key, out in fitting)}, or an input of the whole"
    return None


def _fits(out: HeaderTensor, item: TensorSpec) -> bool:
    if out.dtype != item.dtype or out.shape is None or len(out.shape) != len(item.shape):
        return False
    pairs = zip(out.shape, item.shape, strict=True)
    return all(left == right or isinstance(left, str) or isinstance(right, str) for left, right in pairs)


def _says_much(item: TensorSpec) -> bool:
    """Whether an equal type and shape is no chance: floats with a fixed size behind axis 0."""
    return item.dtype.startswith("float") and any(isinstance(dim, int) and dim > 1 for dim in item.shape[1:])


def _find_shared(item: TensorSpec, before: Sequence[FoundGraph]) -> tuple[str, str] | None:
    """(graph, input) of a mask or length before it of the same type and shape, where one's name ends with the other."""
    if not _SHARED.search(item.name):
        return None
    for graph in before:
        for other in _steps(graph):
            alike = other.dtype == item.dtype and other.shape == item.shape
            if alike and (item.name.endswith(other.name) or other.name.endswith(item.name)):
                return graph.key, other.name
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64]


def write_ensemble(whole: str, graphs: Sequence[FoundGraph], files: Mapping[str, str]) -> str:
    """The text of the ensemble's spec. files: of the specs of its graphs, by their names."""
    return _HEAD + "\n" + "\n".join(_sections(whole, graphs, files)) + "\n"


def write_graph(graph: FoundGraph) -> str:
    """The text of a graph's own spec."""
    return write_spec(graph.model)


def _sections(whole: str, graphs: Sequence[FoundGraph], files: Mapping[str, str]) -> Iterator[str]:
    connections = find_connections(graphs)
    yield f"model: {quote(whole)}"
    yield "graphs:                       # in the order of the data flow"
    yield from (f"  {graph.key}: {quote(files[graph.key])}" for graph in graphs)
    yield "connections:                  # GRAPH.INPUT: what gives it"
    for item in connections:
        if item.source is None:
            yield f"  # {FILL_IN}? {item.key}: {item.why}"
        else:
            yield f"  {quote(item.key)}: {quote(item.source)}   # {item.why}"
    sources = {item.key: item.source for item in connections if item.source}
    for graph in find_unconnected(graphs):
        yield f"  # {FILL_IN}: nothing shows what connects {graph.key}; it takes {_list(graph.model.inputs)}"
        yield f"  #   and gives {_list(graph.gives)}"
    yield ""
    steps = ", sequence: sequence" if any(graph.model.states for graph in graphs) else ""
    why = "real inputs of the whole, with which it and its graphs are proven; arrays:"
    yield f"golden: {{data: golden.npz{steps}}}    # {why}"
    yield from (f"#   {line}" for line in _wanted(graphs, sources))
    if steps:
        yield "#   sequence: int64; of each sample, which is a step, the number of its sequence (docs/guides/state.md)"
    yield from _suggest_metric(graphs[-1])
    yield f"# calibration: {{data: calibration.npz{steps}}}   # the same arrays of other samples, for int8"
    yield "publication: {channel: candidate}"


def _suggest_metric(last: FoundGraph) -> Iterator[str]:
    """A task metric of the whole, that of its last graph."""
    if found := last.model.metric:
        metric = {key: f"{last.key}.{text}" if key in _OUTPUTS else text for key, text in found.items()}
        yield "# in golden, with right answers, which alone show a connection to a wrong output:"
        yield f"#   labels: ARRAY, metric: {quote(metric)}"


def _list(tensors: Sequence[TensorSpec] | Sequence[HeaderTensor]) -> str:
    return ", ".join(
        f"{item.name} {item.dtype} {format_shape(item.shape) if item.shape is not None else '[?]'}" for item in tensors
    )


def _wanted(graphs: Sequence[FoundGraph], sources: Mapping[str, str]) -> list[str]:
    """The inputs of the whole: name, type and shape, each once."""
    found = dict[str, str]()
    for graph in graphs:
        for item in _steps(graph):
            source = sources.get(f"{graph.key}.{item.name}", f"{graph.key}.{item.name}")
            if source == f"{graph.key}.{item.name}" or "." not in source:
                found.setdefault(source, f"{source}: {item.dtype} {format_shape(item.shape)}")
    return [*found.values()]


def check_unknown(graphs: Sequence[FoundGraph]) -> None:
    """Raise InputError for an input of which a file does not say what it is: its shape connects it."""
    for graph in graphs:
        for name, why in graph.model.unknown.items():
            raise InputError(f"{graph.key}: input {name!r}: {why}; export it with shapes, or write the spec by hand")
