"""Profiles from buckets."""

from builders.backends.shape_profiles import profiles
from enginery.core.types import Dim, TensorSpec


def test_profiles_combine_the_buckets_of_all_dims() -> None:
    inputs = (TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("scale", "float32", (1,)))
    dims = (Dim("batch", 1, 2, 4), Dim("seq", 1, 64, 64, (32, 64)))
    found = list(profiles(inputs, dims))
    assert [profile.inputs[0][1:] for profile in found] == [((1, 1), (2, 32), (4, 32)), ((1, 33), (2, 64), (4, 64))]
    assert all(profile.inputs[1] == ("scale", (1,), (1,), (1,)) for profile in found)
    assert list(profiles(inputs[1:], ())) == []
