"""State between calls: inputs of a model that take what its outputs gave in the call before. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.core import parsing
from enginery.core.types import ShapeProfile, TensorSpec


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


def least_sizes(
    inputs: Sequence[TensorSpec], states: Sequence[State], profiles: Sequence[ShapeProfile]
) -> dict[str, int]:
    """The sizes in the first call of dims that states alone have, as a cache that grows: the least of all profiles."""
    given = {dim for spec in without_states(inputs, states) for dim in spec.shape}
    found: dict[str, int] = {}
    for name, low, *_ in (ranges for profile in profiles for ranges in profile.inputs):
        shape = next((spec.shape for spec in inputs if spec.name == name), ())
        for dim, size in zip(shape, low, strict=True):
            if isinstance(dim, str) and dim not in given:
                found[dim] = min(size, found.get(dim, size))
    return found


def states_of(spec: Mapping[str, object]) -> tuple[State, ...]:
    """The states of a version, from the spec that its manifest holds. Raises `parsing.Malformed` for what is none."""
    found = parsing.mapping(spec.get("state", {}), "spec.state")

    def read(name: str, value: object) -> State:
        where = f"spec.state.{name}"
        item = parsing.mapping(value, where)
        output = parsing.field(item, "output", parsing.text, where)
        return State(name, output, float(parsing.field(item, "initial", parsing.number, where)))

    return tuple(read(name, value) for name, value in found.items())
