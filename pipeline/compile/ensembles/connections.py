"""Whether what a graph gives can be what another takes: dtypes, and sizes as far as they are known."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

from enginesmith.core.ensemble import list_inputs, name_dims, name_states, split_source
from enginesmith.core.errors import ModelError
from enginesmith.core.state import State
from enginesmith.core.text import suggest
from enginesmith.core.types import PLUS, Dim, TensorSpec, rename_dims
from pipeline.compile.ensembles.whole import WholeData
from pipeline.sources.onnx_header import HeaderTensor, format_shape, read_header
from pipeline.spec.ensembles.model import EnsembleData, LoadedEnsemble
from pipeline.spec.model import ModelSpec
from pipeline.spec.value_types import Loc

Tensor = HeaderTensor | TensorSpec


def check_connections(loaded: LoadedEnsemble, known: Mapping[str, Sequence[Tensor]] | None = None) -> None:
    """Raise SpecError, a line for each connection between tensors that cannot meet.

    known: outputs by graph, of those that were exported; of the others what the headers of ONNX files say.
    """
    outputs: dict[str, Sequence[Tensor] | None] = {
        **{name: _header_outputs(graph) for name, graph in loaded.graphs.items()},
        **{name: function.gives() for name, function in loaded.spec.functions.items()},
        **(known or {}),
    }
    if found := [*_wrong_connections(loaded, outputs), *_wrong_outputs(loaded, outputs), *_wrong_dims(loaded)]:
        raise loaded.locate(found)


def _header_outputs(graph: ModelSpec) -> Sequence[Tensor] | None:
    """The outputs of an ONNX source; None of another, and where the file cannot be read, which its own build says."""
    if graph.source.kind != "onnx":
        return None
    try:
        return read_header(graph.file(graph.source_file)).gives
    except ModelError:
        return None


def _wrong_connections(
    loaded: LoadedEnsemble, outputs: Mapping[str, Sequence[Tensor] | None]
) -> Iterator[tuple[Loc, str]]:
    inputs = {name: {spec.name: spec for spec in loaded.tensors(name)} for name in loaded.wiring()}
    for key, source in loaded.spec.connections.items():
        graph, _, name = key.partition(".")
        giver = split_source(source, inputs)
        if giver is None or (known := outputs[giver[0]]) is None:
            continue
        found = next((item for item in known if item.name == giver[1]), None)
        if found is None:
            text = f"{giver[0]!r} has no output {giver[1]!r}; {suggest(giver[1], [item.name for item in known])}"
            yield ("connections", key), text
        elif told := _mismatch(found, inputs[graph][name]):
            yield ("connections", key), f"{source} is {told}"
    for source, takers in list_inputs(loaded.wiring()).items():
        first, *others = (inputs[graph][name] for graph, name in takers)
        for (graph, name), other in zip(takers[1:], others, strict=True):
            if told := _mismatch(first, other):
                yield ("connections", f"{graph}.{name}"), f"{source} is {told}"


def _wrong_outputs(loaded: LoadedEnsemble, outputs: Mapping[str, Sequence[Tensor] | None]) -> Iterator[tuple[Loc, str]]:
    for loc, source in loaded.spec.named_outputs():
        graph, _, name = source.partition(".")
        names = [item.name for item in outputs[graph] or ()]
        if names and name not in names:
            yield loc, f"{graph!r} has no output {name!r}; {suggest(name, names)}"


def _wrong_dims(loaded: LoadedEnsemble) -> Iterator[tuple[Loc, str]]:
    """Dims of axis 0 that several graphs have, and that no size suits all of them."""
    for dim in _shared_dims(loaded).values():
        if dim.min > dim.max:
            name = next(name for name in loaded.wiring() if dim.name in [item.name for item in loaded.named_dims(name)])
            yield (
                ("graphs" if name in loaded.graphs else "functions", name),
                f"no size of {dim.name} suits all graphs that have it; widen it, or rename one",
            )


def _mismatch(given: Tensor, taken: TensorSpec) -> str | None:
    """'float32 [batch, 4], and the input is float32 [batch, 8]' where one cannot be the other; else None."""
    shape = given.shape
    fits = shape is None or (
        len(shape) == len(taken.shape)
        and all(
            left == right or str in (type(left), type(right)) for left, right in zip(shape, taken.shape, strict=True)
        )
    )
    if given.dtype == taken.dtype and fits:
        return None
    left = f"{given.dtype} {format_shape(shape) if shape is not None else 'of any shape'}"
    return f"{left}, and the input is {taken.dtype} {format_shape(taken.shape)}; they must be the same"


def read_data(
    loaded: LoadedEnsemble, section: EnsembleData, file: tuple[Path, str], labels: str | None = None
) -> WholeData:
    """The data that a section of the spec names. file: where it lies, and its digest."""
    inputs, dims = whole_inputs(loaded)
    states = whole_states(loaded, inputs)
    return WholeData(*file, inputs, dims, labels or "", states, section.sequence or "", section.joined)


def whole_inputs(loaded: LoadedEnsemble) -> tuple[tuple[TensorSpec, ...], tuple[Dim, ...]]:
    """The inputs of the whole under their names, and their dims.

    A dim of axis 0 keeps its name, so that samples of all inputs are grouped together, in sizes that every graph with
    such a dim takes; others are 'GRAPH.DIM'.
    """
    shared = _shared_dims(loaded)
    specs, dims = list[TensorSpec](), dict[str, Dim]()
    for source, ((graph, name), *_) in list_inputs(loaded.wiring()).items():
        taken = next(spec for spec in loaded.tensors(graph) if spec.name == name)
        own = {dim.name: dim for dim in loaded.named_dims(graph)}
        used = {dim: shared.get(dim) or replace(own[dim], name=f"{graph}.{dim}") for dim in own}
        names = {dim: used[dim].name for dim in used}
        shape = tuple(rename_dims(dim, names) if isinstance(dim, str) else dim for dim in taken.shape)
        specs.append(TensorSpec(source, taken.dtype, shape))
        dims |= {used[dim].name: used[dim] for size in taken.shape for dim in str(size).split(PLUS) if dim in used}
    return tuple(specs), tuple(dims.values())


def whole_states(loaded: LoadedEnsemble, inputs: Sequence[TensorSpec]) -> tuple[State, ...]:
    """The states of all graphs as those of the whole. inputs: of the whole."""
    found, names = list[State](), [spec.name for spec in inputs]
    for graph, sources in loaded.wiring().items():
        if graph in loaded.graphs:
            dims = name_dims(loaded.tensors(graph), sources, inputs)
            found += name_states(graph, loaded.graphs[graph].states(), sources, dims, names)
    return tuple(found)


def _shared_dims(loaded: LoadedEnsemble) -> dict[str, Dim]:
    """The dims of axis 0 of all graphs, those of one name with the sizes that all of them take, as far as there are."""
    found: dict[str, Dim] = {}
    for name in loaded.wiring():
        states = loaded.graphs[name].state if name in loaded.graphs else {}
        leading = {spec.shape[0] for spec in loaded.tensors(name) if spec.shape and spec.name not in states}
        for dim in (dim for dim in loaded.named_dims(name) if dim.name in leading):
            known = found.get(dim.name, dim)
            step = lcm(known.multiple, dim.multiple)
            low, high = -(-max(known.min, dim.min) // step) * step, min(known.max, dim.max) // step * step
            opt = min(max(known.opt // step * step, low), high)
            found[dim.name] = Dim(dim.name, low, opt, high, multiple=step)
    return found


def whole_outputs(loaded: LoadedEnsemble, outputs: Mapping[str, Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """The outputs of the whole under their names, those among them that its states take. outputs: of the exported
    graphs."""
    taken = set(loaded.spec.connections.values())
    every = {f"{graph}.{item.name}": item for graph, items in outputs.items() for item in items}
    names = loaded.spec.outputs or [name for name in every if name not in taken]
    left = [f"{graph}.{state.output}" for graph, own in loaded.graphs.items() for state in own.states()]
    return tuple(TensorSpec(name, every[name].dtype, every[name].shape) for name in dict.fromkeys((*names, *left)))
