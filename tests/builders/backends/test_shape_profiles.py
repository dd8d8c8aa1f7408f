from dataclasses import replace

from builders.backends.request_checks import profiles, sum_refusal
from enginesmith.core.types import BuildRequest, Dim, Target, TensorSpec


def test_profiles_combine_the_buckets_of_all_dims() -> None:
    inputs = (TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("scale", "float32", (1,)))
    dims = (Dim("batch", 1, 2, 4), Dim("seq", 1, 64, 64, (32, 64)))
    actual = list(profiles(inputs, dims))
    assert [profile.inputs[0][1:] for profile in actual] == [((1, 1), (2, 32), (4, 32)), ((1, 33), (2, 64), (4, 64))]
    assert all(profile.inputs[1] == ("scale", (1,), (1,), (1,)) for profile in actual)
    assert list(profiles(inputs[1:], ())) == []


def test_a_sum_follows_in_every_profile_and_symbolic_sizes_are_refused() -> None:
    inputs = (TensorSpec("ids", "int64", ("tokens",)), TensorSpec("mask", "int64", ("past + tokens",)))
    dims = (Dim("tokens", 1, 2, 4), Dim("past", 1, 8, 16))
    (profile,) = profiles(inputs, dims)
    assert profile.inputs[1] == ("mask", (2,), (10,), (20,))
    request = BuildRequest("", "fp32", Target("cpu"), "xla", inputs, (), (profile,))
    assert sum_refusal(request, "XLA") == (
        "input 'mask' has the size past + tokens, and XLA does not support sums of dims; use onnxruntime"
    )
    assert sum_refusal(replace(request, inputs=inputs[:1]), "XLA") is None
