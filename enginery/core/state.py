"""State between calls: inputs of a model that take what its outputs gave in the call before. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from enginery.core import parsing
from enginery.core.types import BuildRequest, ShapeProfile, TensorSpec


@dataclass(frozen=True)
class State:
    """An input that takes what an output gave in the call before. initial: each of its elements in the first call."""

    input: str
    output: str
    initial: float = 0.0


def without_states(inputs: Sequence[TensorSpec], states: Sequence[State]) -> tuple[TensorSpec, ...]:
    """The inputs that a caller gives in each step, in order."""
    held = {state.input for state in states}
    return tuple(spec for spec in inputs if spec.name not in held)


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


def states_of(spec: Mapping[str, object]) -> tuple[State, ...]:
    """The states of a version, from the spec that its manifest holds. Raises `parsing.Malformed` for what is none."""
    found = parsing.mapping(spec.get("state", {}), "spec.state")

    def read(name: str, value: object) -> State:
        where = f"spec.state.{name}"
        item = parsing.mapping(value, where)
        output = parsing.field(item, "output", parsing.text, where)
        return State(name, output, float(parsing.field(item, "initial", parsing.number, where)))

    return tuple(read(name, value) for name, value in found.items())
