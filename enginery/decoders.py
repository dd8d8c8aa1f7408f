"""A decoder as the JSON beside its engine describes it: its token ids, its logits, its caches, its sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.core.codec import decode
from enginery.core.errors import DataError, IntegrityError
from enginery.core.parsing import field, many, mapping, mapping_of, pair
from enginery.core.sampling import sampling_inputs
from enginery.core.state import State
from enginery.core.types import Sampling, ShapeProfile, TensorSpec
from enginery.streams import read_description


@dataclass(frozen=True)
class CacheBound:
    """How long an answer can be. whole: the most tokens of it and its prompt.  takes: what the cache takes.  remedy:
    how it would take more."""

    whole: int
    takes: str
    remedy: str


@dataclass(frozen=True)
class Decoder:
    """A decoder as it is described beside its engine. inputs, outputs: of the engine.  ends: as in `Streams`.

    sampling: of its sampler, or, where `drawn_here`, what takes its place.  rows, places: the most that a call takes;
    None without a bound.
    """

    inputs: tuple[TensorSpec, ...]
    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    sampling: Sampling
    drawn_here: bool
    rows: int | None
    places: int | None

    @property
    def ids(self) -> TensorSpec:
        """The input of token ids."""
        return next(spec for spec in self.inputs if spec.name == self.sampling.ids)

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
        inputs = tuple(decode(item, TensorSpec) for item in field(found, "inputs", many(mapping)))
        outputs = {
            spec.name: spec for spec in (decode(item, TensorSpec) for item in field(found, "outputs", many(mapping)))
        }
        states = tuple(decode(item, State) for item in field(found, "state", many(mapping)))
        profiles = [decode(item, ShapeProfile) for item in field(found, "profiles", many(mapping))]
        ends = field(found, "ends", mapping_of(pair))
        sampling = decode(found["sampling"], Sampling) if found.get("sampling") else None
    except IntegrityError as error:
        raise DataError(f"{description} describes no decoder: {error}") from error
    drawn_here = sampling is None
    if sampling is None:
        vocabulary = outputs[logits].shape[-1] if logits in outputs and outputs[logits].shape else None
        if not isinstance(vocabulary, int) or ids not in {spec.name for spec in inputs}:
            raise DataError(f"{description}: no input {ids!r} or no output {logits!r} of one vocabulary; name them")
        sampling = Sampling(ids, logits, "", vocabulary, vocabulary)
    own = {sampling.ids, *(state.input for state in states), *(item.name for item in sampling_inputs(sampling, 1))}
    if others := [spec.name for spec in inputs if spec.name not in own]:
        raise DataError(f"{description}: the model takes {', '.join(others)} beside its ids; run it by Streams")
    rows, places = (_most(inputs, profiles, sampling.ids, axis) for axis in (0, 1))
    return Decoder(inputs, states, ends, sampling, drawn_here, rows, places)


def _most(inputs: Sequence[TensorSpec], profiles: Sequence[ShapeProfile], name: str, axis: int) -> int | None:
    """The greatest size of an axis of an input; None where it has no bound or no such axis."""
    shape = next(spec.shape for spec in inputs if spec.name == name)
    if axis >= len(shape):
        return 1
    sizes = [high[axis] for profile in profiles for each, _, _, high in profile.inputs if each == name]
    size = shape[axis]
    return size if isinstance(size, int) else max(sizes, default=None)
