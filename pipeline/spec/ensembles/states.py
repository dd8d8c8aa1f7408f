"""What the spec of an ensemble says of graphs with state, and cannot say."""

from collections.abc import Collection, Iterator, Mapping

from enginesmith.core.state import grown_axes, without_states
from enginesmith.core.text import suggest
from pipeline.spec.sections import SpecSections
from pipeline.spec.sequences import EnsembleArrays
from pipeline.spec.value_types import Loc


def find_state_mistakes(
    graphs: Mapping[str, SpecSections],
    connections: Mapping[str, str],
    functions: Collection[str],
    data: Mapping[str, EnsembleArrays],
) -> Iterator[tuple[Loc, str]]:
    """Mistakes: (key that it is about, message). functions: names of those between graphs.  data: by section."""
    stateful = [name for name, own in graphs.items() if own.state]
    for key, source in connections.items():
        graph, _, name = key.partition(".")
        if graph in stateful:
            yield from _wrong_connection(key, source, name, graphs[graph])
    for function in functions if stateful else ():
        text = f"{stateful[0]!r} has state, and functions are not run along sequences; export it as a graph"
        yield ("functions", function), f"{text}, or call it before the whole"
    for section, arrays in data.items():
        yield from _wrong_arrays(section, arrays, graphs, connections)


def _wrong_connection(key: str, source: str, name: str, own: SpecSections) -> Iterator[tuple[Loc, str]]:
    if name in own.state:
        text = f"{name!r} is a state of {own.model}, which takes what its own {own.state[name].output!r} gave"
        yield ("connections", key), f"{text}; remove the connection, or the state from its spec"
    grown = {item for item, _ in grown_axes(without_states(own.tensors(), own.states()))}
    if name in grown and "." in source:
        text = f"{name!r} covers what states hold too, and {source!r} gives one step alone"
        yield ("connections", key), f"{text}; let it be an input of the whole"


def _wrong_arrays(
    section: str, arrays: EnsembleArrays, graphs: Mapping[str, SpecSections], connections: Mapping[str, str]
) -> Iterator[tuple[Loc, str]]:
    if arrays.orders and not any(own.state for own in graphs.values()):
        key = "sequence" if arrays.sequence else "steps"
        yield (section, key), f"{section}.{key} is for ensembles with state, and no graph has one; remove it"
        return
    taken = {f"{graph}.{item}" for graph, own in graphs.items() for item in own.inputs} | {*connections.values()}
    for name in (name for name in arrays.orders if name in taken):
        key = "sequence" if name == arrays.sequence else "steps"
        yield (section, key), f"array {name!r} is an input of the whole; give the array of numbers a name of its own"
    if arrays.joined:
        yield from _wrong_steps((section, "steps"), arrays.joined[0], graphs, connections)


def _wrong_steps(
    place: Loc, dim: str, graphs: Mapping[str, SpecSections], connections: Mapping[str, str]
) -> Iterator[tuple[Loc, str]]:
    """A dim that samples of a step cannot be joined along: (key, message)."""
    known = []
    for graph, own in graphs.items():
        held = {axis for name in own.state if name in own.inputs for axis in own.inputs[name].shape}
        given = (item for name, item in own.inputs.items() if name not in own.state)
        free = [item for name, item in own.inputs.items() if "." not in connections.get(f"{graph}.{name}", "")]
        leading = {item.shape[0] for item in given if item.shape}
        axes = {axis for item in free for axis in item.shape if isinstance(axis, str) and axis.isidentifier()}
        known += [f"{graph}.{axis}" for axis in sorted(axes - held - leading)] if own.state else []
    if dim not in known:
        text = (
            f"samples of a step are joined along a dim that a graph with state has in inputs of the whole, and {dim!r}"
        )
        yield place, f"{text} is none; {suggest(dim, known)}"
