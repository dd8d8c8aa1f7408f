"""Which inputs of a model take what its outputs gave in the call before, as far as names, types and shapes say it."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from enginesmith.core.state import State, without_states
from enginesmith.core.types import TensorSpec
from pipeline.drafts.found import FoundModel

# What distinguishes the name of a state on its way in from that on its way out: `state` and `stateN`, `h0` and `hn`,
# `hidden_in` and `hidden_out`, `past_key_values.0.key` and `present.0.key`, as exporters and audio libraries write.
_WAYS = r"past_key_values?|past|present|prev(?:ious)?|next|new|last|old|cur(?:rent)?|input|output|in|out|cache|n"
# Names of nothing but such words that name a state all the same: `past` and `present`, `cache` and `cache_out`.
_CACHE = re.compile("past|present|cache", re.I)
_WORD = re.compile(rf"(?:^|(?<=[^A-Za-z0-9]))(?:{_WAYS})(?=$|[^A-Za-z0-9])", re.I)


def find_states(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], sources: Mapping[str, str] = MappingProxyType({})
) -> tuple[State, ...]:
    """Pairs of inputs and outputs that differ in such words alone and have one dtype and shapes that can be equal; they
    begin with zeros. None where a pair is not the only one of its name, or where every input would be a state.

    A mask (bool) is none, nor is an input that the model hands on as it is: it would stay as it began. sources: by
    output, the input that it is (`find_source`), where it is one.
    """
    found = []
    for given in inputs:
        alike = [item for item in outputs if stem_of(item.name) == stem_of(given.name) and _can_meet(given, item)]
        rivals = [item for item in inputs if stem_of(item.name) == stem_of(given.name)]
        changes = given.dtype != "bool" and all(sources.get(item.name) != given.name for item in alike)
        if stem_of(given.name) and len(alike) == len(rivals) == 1 and alike[0].name != given.name and changes:
            found.append(State(given.name, alike[0].name))
    return tuple(found) if len(found) < len(inputs) else ()


def begin_empty(found: FoundModel, outputs: Sequence[TensorSpec]) -> FoundModel:
    """The same with 0 as the least size of dims that states alone have and that grow: the output does not give its axis
    the input's name."""
    given = {dim for spec in without_states(found.inputs, found.states) for dim in spec.shape}
    into, out = ({spec.name: spec.shape for spec in specs} for specs in (found.inputs, outputs))
    axes = (zip(into[state.input], out[state.output], strict=True) for state in found.states)
    grown = {dim for pairs in axes for dim, after in pairs if isinstance(dim, str) and after != dim} - given
    why = "what calls have left; none before the first"
    dims = {name: replace(dim, min=0, multiple=1, why=why) for name, dim in found.dims.items() if name in grown}
    return found.with_dims({**found.dims, **dims})


def as_inputs(found: FoundModel, chosen: Collection[State] | None = None) -> FoundModel:
    """The same with its states, or the chosen ones, as inputs like others, which are never empty: as in requests that
    hold them."""
    left = tuple(state for state in found.states if chosen is not None and state not in chosen)
    names = {state.input for state in left}
    held = {dim for spec in found.inputs if spec.name in names for dim in spec.shape}
    empty = {
        name: replace(dim, min=1, why="what calls have left")
        for name, dim in found.dims.items()
        if not dim.min and name not in held
    }
    return replace(found, states=left).with_dims({**found.dims, **empty})


def stem_of(name: str) -> tuple[str, ...]:
    """The words of a name that do not say which way it goes; numbers are words, and a 0 at the end of a letter goes."""
    spread = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", _WORD.sub("_", spread)) if word]
    return tuple(re.sub(r"^([a-z])[0n]$", r"\1", word) for word in words) or (("cache",) if _CACHE.search(name) else ())


def _can_meet(given: TensorSpec, found: TensorSpec) -> bool:
    both = zip(given.shape, found.shape, strict=False)
    alike = all(left == right for left, right in both if isinstance(left, int) and isinstance(right, int))
    return given.dtype == found.dtype and len(given.shape) == len(found.shape) and alike
