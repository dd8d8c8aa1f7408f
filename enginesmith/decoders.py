"""A decoder as the JSON beside its engine describes it: its ids, logits, caches, masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.codec import decode
from enginesmith.core.errors import DataError, IntegrityError
from enginesmith.core.state import State
from enginesmith.core.types import PLUS, ShapeProfile, TensorSpec
from enginesmith.descriptions import DescribedGraph, DescribedStates, read_description


@dataclass(frozen=True)
class CacheBound:
    """How long an answer can be. whole: the most tokens of it and its prompt.  takes: what the cache takes.  remedy:
    how it would take more."""

    whole: int
    takes: str
    remedy: str


@dataclass(frozen=True)
class Progress:
    """An input that follows from how many tokens were read: a mask of those that may be seen, or places.

    axis: of the tokens of a call, or of all so far; None of an input that holds the place of the first one alone.
    size: of that axis where it is fixed, as of a cache that is filled place by place.
    """

    spec: TensorSpec
    mask: bool
    axis: int | None
    size: int | None

    def value(self, rows: int, past: int, count: int) -> Array:
        """For a call with so many rows and tokens behind `past` of them."""
        dtype, total = dtype_of(self.spec.dtype), past + count
        if self.mask:
            found = (np.arange(total if self.size is None else self.size) < total).astype(dtype)
        else:
            found = np.arange(past, past + 1 if self.axis is None else total, dtype=dtype)
        shape = [size if isinstance(size, int) else rows for size in self.spec.shape]
        if self.axis is None:
            return np.full(shape, found[0], dtype)
        shape[self.axis] = len(found)
        along = [-1 if axis == self.axis else 1 for axis in range(len(shape))]
        return np.ascontiguousarray(np.broadcast_to(found.reshape(along), shape))


@dataclass(frozen=True)
class Decoder:
    """A decoder as it is described beside its engine. inputs, outputs: of the engine.  ends: as in `Streams`.

    ids: its input of token ids.  logits: name of its output [rows, vocabulary] or [rows, places, vocabulary].  rows,
    places: the most that a call takes; None without a bound.  progress: the other inputs, which follow from how far an
    answer is.
    """

    inputs: tuple[TensorSpec, ...]
    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    ids: TensorSpec
    logits: str
    vocabulary: int
    rows: int | None
    places: int | None
    progress: tuple[Progress, ...] = ()

    @property
    def bound(self) -> "CacheBound | None":
        """The bound of the cache that is full first: of those that begin empty, and of those of a fixed size."""
        found = [
            CacheBound(most + 2, f"{dim}={most} at most", f"build with a larger dims.{dim}.max")
            for dim, (least, most) in self.ends.items()
            if least == 0
        ]
        shapes = {spec.name: spec.shape for spec in self.inputs}
        for state in (state for state in self.states if state.places):
            size = shapes[state.input][state.places.axis] if state.places else 0
            remedy = "export the model with a larger cache"
            found.append(CacheBound(int(size) + 1, f"{size} places in {state.input!r}", remedy))
        return min(found, key=lambda bound: bound.whole, default=None)


def read_decoder(description: Path | str, ids: str = "ids", logits: str = "logits") -> Decoder:
    """The decoder that the JSON beside an engine describes. Raises DataError for one that is none."""
    found = read_description(description)
    try:
        graph, held = decode(found, DescribedGraph, ""), decode(found, DescribedStates, "")
    except IntegrityError as error:
        raise DataError(f"{description} describes no decoder: {error}") from error
    inputs, states, profiles, ends = graph.inputs, held.state, graph.profiles, held.ends
    outputs = {spec.name: spec for spec in graph.outputs}
    vocabulary = outputs[logits].shape[-1] if logits in outputs and outputs[logits].shape else None
    tokens = next((spec for spec in inputs if spec.name == ids), None)
    if not isinstance(vocabulary, int) or tokens is None:
        raise DataError(f"{description}: no input {ids!r} or no output {logits!r} of one vocabulary; name them")
    own = {state.input for state in states}
    progress, unknown = find_progress([spec for spec in inputs if spec.name not in own], ids, states)
    if unknown:
        raise DataError(
            f"{description}: the model takes {', '.join(unknown)} beside its ids, and that is neither a mask of the "
            "tokens so far nor their places; run it by Streams"
        )
    rows, places = (_most(inputs, profiles, ids, axis) for axis in (0, 1))
    return Decoder(inputs, states, ends, tokens, logits, vocabulary, rows, places, progress)


def find_progress(
    inputs: Sequence[TensorSpec], ids: str, states: Sequence[State]
) -> tuple[tuple[Progress, ...], list[str]]:
    """The inputs of a caller that follow from how many tokens were read, and the names of others beside the ids."""
    tokens = next(spec for spec in inputs if spec.name == ids)
    others = {spec.name: _find_one(spec, tokens, states) for spec in inputs if spec.name != ids}
    return tuple(found for found in others.values() if found), [name for name, found in others.items() if not found]


def _find_one(spec: TensorSpec, ids: TensorSpec, states: Sequence[State]) -> Progress | None:
    """What an input beside the ids is, by its name and shape, as HuggingFace's exporters write them; None where they do
    not say: a mask [rows, tokens so far], or the places of the tokens [rows, tokens], [tokens], [rows] or []."""
    written = {state.places.at for state in states if state.places}
    tokens = ids.shape[1] if len(ids.shape) > 1 else None
    axes = [axis for axis, size in enumerate(spec.shape) if tokens and str(tokens) in str(size).split(PLUS)]
    name, axis = spec.name.lower(), axes[0] if axes else None
    if "mask" in name and len(spec.shape) == 2:
        size = spec.shape[1]
        return Progress(spec, True, 1, size if isinstance(size, int) else None) if axis == 1 or axis is None else None
    places = spec.dtype in ("int32", "int64") and (spec.name in written or "position" in name)
    rest = [size for index, size in enumerate(spec.shape) if index != axis]
    if not places or any(size not in (1, ids.shape[0]) for size in rest):
        return None
    return Progress(spec, False, axis, None)


def _most(inputs: Sequence[TensorSpec], profiles: Sequence[ShapeProfile], name: str, axis: int) -> int | None:
    """The greatest size of an axis of an input; None where it has no bound or no such axis."""
    shape = next(spec.shape for spec in inputs if spec.name == name)
    if axis >= len(shape):
        return 1
    sizes = [high[axis] for profile in profiles for each, _, _, high in profile.inputs if each == name]
    size = shape[axis]
    return size if isinstance(size, int) else max(sizes, default=None)
