"""Which bucket holds a request, what it is padded to there, and which is the cheapest."""

import pytest

from enginery.serving.buckets import DimBounds, cheapest, list_buckets
from enginery.serving.padding import Padding
from tests.enginery.serving.engines import PADDING, engine, profile

EDGES = Padding(PADDING.inputs, {"sequence": (8, 16)})


def found(buckets, batch, sequence):
    held = cheapest(buckets, {"batch": batch, "sequence": sequence})
    return held and (buckets[held[0]].name, held[1]["batch"], held[1]["sequence"])


@pytest.mark.parametrize(
    ("bounds", "fits"),
    [
        (DimBounds(2, 8), {1: None, 2: 2, 8: 8, 9: None}),
        (DimBounds(2, 8, 2), {3: None, 4: 4}),
        (DimBounds(3, 9, 3, padded=True), {1: 3, 4: 6, 9: 9, 10: None, 0: None}),
        (DimBounds(1, 16, padded=True, edge=8), {1: 8, 8: 8, 9: None}),
        (DimBounds(8, 8, padded=True), {5: 8, 8: 8, 9: None}),
        (DimBounds(9, 16, 4, padded=True), {1: 12, 13: 16, 17: None}),
    ],
)
def test_a_size_becomes_one_that_the_bucket_takes(bounds, fits):
    assert {size: bounds.fit(size) for size in fits} == fits


def test_a_dim_with_edges_is_padded_to_them_and_one_without_only_as_far_as_needed():
    buckets = list_buckets([engine("a", profile((2, 4), (1, 16)))], EDGES)
    assert [bucket.name for bucket in buckets] == ["a: batch 2..4, sequence <= 8", "a: batch 2..4, sequence <= 16"]
    assert found(buckets, 1, 5) == ("a: batch 2..4, sequence <= 8", 2, 8)
    assert found(buckets, 3, 9) == ("a: batch 2..4, sequence <= 16", 3, 16)
    assert found(buckets, 5, 9) is None and found(buckets, 1, 17) is None


def test_behind_the_last_edge_a_request_keeps_its_size():
    buckets = list_buckets([engine("a", profile((1, 4), (1, 32)))], EDGES)
    assert found(buckets, 1, 20) == ("a: batch 1..4, sequence 17..32", 1, 20)


def test_a_dim_without_a_rule_is_never_padded():
    buckets = list_buckets([engine("a", profile((4, 4), (8, 8)))], Padding())
    assert found(buckets, 4, 8) and found(buckets, 3, 8) is None and found(buckets, 4, 7) is None


def test_a_dim_that_only_some_rules_would_pad_is_a_matter_of_the_spec_and_multiples_are_kept():
    buckets = list_buckets([engine("a", profile((1, 4), (4, 16), 4))], PADDING)
    assert found(buckets, 1, 5) == ("a: batch 1..4, sequence 4..16", 1, 8)


def test_measured_seconds_decide_and_else_the_order_of_engines_then_elements():
    slow, fast = lambda _: 2.0, lambda sizes: 0.1 * sizes["sequence"]
    small, large = profile((1, 4), (8, 8)), profile((1, 4), (64, 64))
    assert found(list_buckets([engine("a", small, large)], PADDING), 1, 3) == ("a: batch 1..4, sequence 8..8", 1, 8)
    measured = [engine("a", large, seconds=slow), engine("b", small, large, seconds=fast)]
    assert found(list_buckets(measured, PADDING), 1, 3)[0].startswith("b")
    assert found(list_buckets(measured, PADDING), 1, 30)[0].startswith("a")
    partly = [engine("a", large), engine("b", small, seconds=fast)]
    assert found(list_buckets(partly, PADDING), 1, 3)[0].startswith("a")
