"""State between calls: inputs of a model that take what its outputs gave in the call before. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from enginesmith.core.codec import OMIT_DEFAULT, OMIT_NONE, Excerpt, decode
from enginesmith.core.constraints import Count
from enginesmith.core.types import PLUS, BuildRequest, ShapeProfile, TensorSpec, list_sums


@dataclass(frozen=True)
class Places:
    """Where a step writes into a state of a fixed size. axis: of its places.  at: the input, a caller's or a state,
    whose values are the places that are written; or, with a dim of a step's inputs (`count`), the first of so many."""

    axis: Count
    at: str
    count: str = field(default="", metadata=OMIT_DEFAULT)


@dataclass(frozen=True)
class State:
    """An input that takes what an output gave in the call before. initial: each of its elements in the first call.

    places: of a state of a fixed size that steps fill place by place.
    """

    input: str
    output: str
    initial: float = 0.0
    places: Places | None = field(default=None, metadata=OMIT_NONE)


def without_states(inputs: Sequence[TensorSpec], states: Sequence[State]) -> tuple[TensorSpec, ...]:
    """The inputs that a caller gives in each step, in order."""
    held = {state.input for state in states}
    return tuple(spec for spec in inputs if spec.name not in held)


def step_inputs(inputs: Sequence[TensorSpec], states: Sequence[State]) -> tuple[TensorSpec, ...]:
    """What a step adds to the inputs that a caller gives: of one that covers what states hold too, as an attention mask
    over `past + tokens`, the rest of the sum."""
    given = without_states(inputs, states)
    axes = grown_axes(given)
    return tuple(
        replace(spec, shape=tuple(axes.get((spec.name, axis), size) for axis, size in enumerate(spec.shape)))
        for spec in given
    )


def grown_axes(given: Sequence[TensorSpec]) -> dict[tuple[str, int], int | str]:
    """(input, axis) of each axis that grows with the states: its size is a sum with a dim that is no axis of any input
    that a caller gives. And what is left of the sum without such dims."""
    own = {size for item in given for size in item.shape}
    found: dict[tuple[str, int], int | str] = {}
    for spec, axis, total in list_sums(given):
        left = [term for term in total.split(PLUS) if term.isdecimal() or term in own]
        if len(left) < len(total.split(PLUS)):
            found[spec.name, axis] = sum(map(int, left)) if all(map(str.isdecimal, left)) else PLUS.join(left)
    return found


def state_ends(
    inputs: Sequence[TensorSpec], states: Sequence[State], profiles: Sequence[ShapeProfile]
) -> dict[str, tuple[int, int]]:
    """The least and the greatest size, over all profiles, of dims that states alone have, as a cache that grows."""
    given = {dim for spec in without_states(inputs, states) for dim in spec.shape}
    shapes = {spec.name: spec.shape for spec in inputs}
    found: dict[str, tuple[int, int]] = {}
    for name, low, _, high in (ranges for profile in profiles for ranges in profile.inputs):
        for dim, least, most in zip(shapes.get(name, ()), low, high, strict=False):
            if isinstance(dim, str) and dim not in given:
                before = found.get(dim, (least, most))
                found[dim] = min(least, before[0]), max(most, before[1])
    return found


def with_int8_states(request: BuildRequest) -> BuildRequest:
    """The request as a compiler gets it: its quantized states are int8 at both ends."""
    if not request.quantized_states:
        return request
    names = {name for state in request.quantized_states for name in (state.input, state.output)}

    def ends(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(spec, dtype="int8") if spec.name in names else spec for spec in specs)

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
    """The states of a version, from the spec that its manifest holds. Raises `parsing.Malformed` for what is none."""
    found = decode(spec, _StatefulSpec, "spec").state
    return tuple(State(name, item.output, item.initial, item.places) for name, item in found.items())
