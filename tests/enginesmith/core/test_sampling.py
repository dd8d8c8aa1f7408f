"""What a sampler adds to a request, and how a request with one is written."""

from dataclasses import replace

from enginesmith.core.codec import decode, encode
from enginesmith.core.sampling import as_built, sampling_states
from enginesmith.core.types import BuildRequest
from tests.decoding import REQUEST, SAMPLING, VOCABULARY


def test_the_compiler_gets_inputs_outputs_and_profiles_of_the_sampler():
    built = as_built(REQUEST)
    added = {spec.name: (spec.dtype, spec.shape) for spec in built.inputs[2:]}
    assert added["temperature"] == ("float32", ("batch",))
    assert added["allowed"] == ("bool", ("batch", VOCABULARY))
    assert [spec.name for spec in built.outputs] == ["logits", "present", "next_token", "seen_next"]
    ranges = {name: shapes for name, *shapes in built.profiles[0].inputs}
    assert ranges["uniform"] == [(1,), (2,), (3,)]
    assert ranges["seen"] == [(1, VOCABULARY), (2, VOCABULARY), (3, VOCABULARY)]
    assert as_built(built) == built


def test_rows_that_are_multiples_are_so_in_the_sampler():
    profile = replace(REQUEST.profiles[0], multiples=(("ids", (2, 1)),))
    (built,) = as_built(replace(REQUEST, profiles=(profile,))).profiles
    assert dict(built.multiples)["allowed"] == (2, 1)


def test_a_request_is_written_with_its_sampler_and_as_before_without():
    assert decode(encode(REQUEST), BuildRequest) == REQUEST
    plain = replace(REQUEST, sampling=None)
    assert "sampling" not in plain.to_json()
    assert plain.key != REQUEST.key != replace(REQUEST, sampling=replace(SAMPLING, revision=SAMPLING.revision + 1)).key
    assert sampling_states(None) == ()
    assert [state.input for state in sampling_states(SAMPLING)] == ["seen"]
