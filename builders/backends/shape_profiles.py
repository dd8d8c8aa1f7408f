"""The optimization profiles of a model: a combination of the buckets of its dynamic dims each."""

import itertools
from collections.abc import Iterator, Sequence

from enginery.core.types import Dim, ShapeProfile, TensorSpec


def profiles(inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[ShapeProfile]:
    """One optimization profile for every combination of buckets; none for a model without dynamic dims."""
    if not dims:
        return
    for buckets in itertools.product(*(dim.buckets() for dim in dims)):
        low, opt, high = (
            dict(zip((dim.name for dim in dims), sizes, strict=True)) for sizes in zip(*buckets, strict=True)
        )
        yield ShapeProfile(tuple((item.name, item.at(low), item.at(opt), item.at(high)) for item in inputs))
