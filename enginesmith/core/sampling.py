"""Sampling as part of a graph: which inputs and outputs it adds to a model. Standard library only.

A version's graphs, their proofs and its golden set are those of the model alone. What is compiled is the graph with the
sampler behind it (`as_built`); a session shows the model alone again where nobody asks for the token.
"""

from dataclasses import dataclass, replace

from enginesmith.core.state import State, with_int8_states
from enginesmith.core.types import BuildRequest, Sampling, Shape, ShapeProfile, TensorSpec

# Inputs of a row each, which a caller gives in every step: (name, dtype, axes after the batch).
_GIVEN = (
    ("temperature", "float32", False),
    ("top_k", "int64", False),
    ("top_p", "float32", False),
    ("repetition_penalty", "float32", False),
    ("uniform", "float32", False),
    ("allowed", "bool", True),
)
SEEN, SEEN_NEXT = "seen", "seen_next"
# What a graph must not have of its own beside a sampler.
TAKEN_INPUTS = (*(name for name, _, _ in _GIVEN), SEEN)


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is drawn. temperature: 0 takes the likeliest.  top_k: 0 for all.  top_p: 1 for all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


GREEDY = SamplingSettings()


def sampling_inputs(sampling: Sampling, batch: int | str) -> tuple[TensorSpec, ...]:
    """The inputs that a sampler adds, its state last. batch: the first axis of the model's token ids."""
    given = tuple(
        TensorSpec(name, dtype, (batch, sampling.vocabulary) if wide else (batch,)) for name, dtype, wide in _GIVEN
    )
    return *given, TensorSpec(SEEN, "float32", (batch, sampling.vocabulary))


def sampling_outputs(sampling: Sampling, batch: int | str) -> tuple[TensorSpec, ...]:
    """The outputs that a sampler adds: the token [batch] and the state."""
    return (
        TensorSpec(sampling.token, "int64", (batch,)),
        TensorSpec(SEEN_NEXT, "float32", (batch, sampling.vocabulary)),
    )


def sampling_states(sampling: Sampling | None) -> tuple[State, ...]:
    """The state that a sampler adds: which tokens were read."""
    return (State(SEEN, SEEN_NEXT, 0.0),) if sampling else ()


def as_built(request: BuildRequest) -> BuildRequest:
    """The request that a compiler gets: with states of int8, and the inputs, outputs and profiles of the sampler, where
    there are some."""
    return _with_sampler(with_int8_states(request))


def _with_sampler(request: BuildRequest) -> BuildRequest:
    sampling = request.sampling
    if sampling is None:
        return request
    batch = next(spec.shape[0] for spec in request.inputs if spec.name == sampling.ids)
    added = sampling_inputs(sampling, batch)
    return replace(
        request,
        inputs=(*request.inputs, *added),
        outputs=(*request.outputs, *sampling_outputs(sampling, batch)),
        profiles=tuple(_widen(profile, sampling, added) for profile in request.profiles),
        sampling=None,
    )


def _widen(profile: ShapeProfile, sampling: Sampling, added: tuple[TensorSpec, ...]) -> ShapeProfile:
    """The profile with the sampler's inputs, whose rows are those of the ids."""
    ranges = next((ranges for name, *ranges in profile.inputs if name == sampling.ids), None)
    if ranges is None:
        return profile
    low, opt, high = (shape[0] for shape in ranges)

    def at(spec: TensorSpec, size: int) -> Shape:
        return (size, *(int(axis) for axis in spec.shape[1:]))

    inputs = tuple((spec.name, at(spec, low), at(spec, opt), at(spec, high)) for spec in added)
    multiple = dict(profile.multiples).get(sampling.ids, (1,))[0]
    multiples = tuple((spec.name, at(replace(spec, shape=(1,) * len(spec.shape)), multiple)) for spec in added)
    return ShapeProfile((*profile.inputs, *inputs), (*profile.multiples, *(multiples if multiple > 1 else ())))
