from dataclasses import replace
from functools import partial

import pytest

from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.reports.latency import timed_alike
from enginesmith.core.requirements import Cpu
from enginesmith.core.state import Padding
from enginesmith.core.types import TensorSpec
from enginesmith.registry.evidence.latencies import speeds_of
from enginesmith.registry.manifest import EngineEntry
from enginesmith.serving.buckets import DimBounds, RoutedEngine, cheapest, list_buckets, measured_seconds
from tests.enginesmith.serving.engines import PADDING, engine, profile
from tests.validation.latency.reports import latency_report

EDGES = Padding(PADDING.inputs, {"sequence": (8, 16)})


def found(buckets, batch, sequence):
    bucket = cheapest(buckets, {"batch": batch, "sequence": sequence})
    return bucket and (buckets[bucket[0]].name, bucket[1]["batch"], bucket[1]["sequence"])


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
def test_a_size_becomes_one_of_the_bucket(bounds, fits):
    assert {size: bounds.fit(size) for size in fits} == fits


def test_a_dim_with_edges_is_padded_to_them_and_one_without_minimally():
    buckets = list_buckets([engine("a", profile((2, 4), (1, 16)))], EDGES)
    assert [bucket.name for bucket in buckets] == ["a: batch 2..4, sequence <= 8", "a: batch 2..4, sequence <= 16"]
    assert found(buckets, 1, 5) == ("a: batch 2..4, sequence <= 8", 2, 8)
    assert found(buckets, 3, 9) == ("a: batch 2..4, sequence <= 16", 3, 16)
    assert found(buckets, 5, 9) is None and found(buckets, 1, 17) is None


def test_beyond_the_last_edge_a_request_keeps_its_size():
    buckets = list_buckets([engine("a", profile((1, 4), (1, 32)))], EDGES)
    assert found(buckets, 1, 20) == ("a: batch 1..4, sequence 17..32", 1, 20)


def test_a_dim_without_a_rule_is_never_padded():
    buckets = list_buckets([engine("a", profile((4, 4), (8, 8)))], Padding())
    assert found(buckets, 4, 8) and found(buckets, 3, 8) is None and found(buckets, 4, 7) is None


def test_a_dim_is_padded_to_its_multiple_within_a_bucket():
    buckets = list_buckets([engine("a", profile((1, 4), (4, 16), 4))], PADDING)
    assert found(buckets, 1, 5) == ("a: batch 1..4, sequence 4..16", 1, 8)


def test_a_measurably_faster_engine_answers_and_else_the_first_one():
    def about(seconds):
        return lambda sizes: (0.95 * seconds(sizes), 1.05 * seconds(sizes))

    slow_slices, fast_slices = about(lambda _: 2.0), about(lambda sizes: 0.1 * sizes["sequence"])
    small, large = profile((1, 4), (8, 8)), profile((1, 4), (64, 64))
    assert found(list_buckets([engine("a", small, large)], PADDING), 1, 3) == ("a: batch 1..4, sequence 8..8", 1, 8)
    measured_engines = [engine("a", large, seconds=slow_slices), engine("b", small, large, seconds=fast_slices)]
    assert found(list_buckets(measured_engines, PADDING), 1, 3)[0].startswith("b")
    assert found(list_buckets(measured_engines, PADDING), 1, 30)[0].startswith("a")
    partly_engines = [engine("a", large), engine("b", small, seconds=fast_slices)]
    assert found(list_buckets(partly_engines, PADDING), 1, 3)[0].startswith("a")
    close = [engine("a", large, seconds=about(lambda _: 1.0)), engine("b", large, seconds=about(lambda _: 0.95))]
    assert found(list_buckets(close, PADDING), 1, 3)[0].startswith("a"), "their intervals overlap"


def test_intervals_between_and_beyond_timed_sizes_follow_the_rules():
    report = latency_report()
    inputs = [TensorSpec("x", "float32", ("batch", 10))]
    intervals = {item.sizes["batch"]: item.interval("session") for item in report.buckets}
    seconds = measured_seconds(report, inputs, "session")
    assert seconds({"batch": 1}) == intervals[1] and seconds({"batch": 64}) == tuple(2 * end for end in intervals[32])
    low, high = seconds({"batch": 16})
    assert intervals[8][0] < low < intervals[32][0] and intervals[8][1] < high < intervals[32][1]
    few_report = replace(
        report,
        buckets=tuple(
            replace(item, quantiles=tuple(replace(q, value=None, low=None, high=None) for q in item.quantiles))
            for item in report.buckets
        ),
    )
    assert measured_seconds(few_report, inputs, "session") is None


@pytest.mark.parametrize(("factor", "expected"), [(0.5, "int8"), (0.99, "fp32"), (1.54, "fp32")])
def test_pulls_and_routers_choose_alike_from_the_same_reports(factor, expected):
    inputs, usual = [TensorSpec("x", "float32", ("batch", 10))], latency_report(others=0.5)
    reports = {"fp32": usual, "int8": replace(usual, buckets=tuple(map(partial(scale, factor), usual.buckets)))}
    speeds = speeds_of({name * 8: report for name, report in reports.items()})
    entries = [EngineEntry("cpu", name, "any", "proven", digest=name * 8, requires=(Cpu("cpu"),)) for name in reports]
    pulled_ranked = rank_engines(entries, Machine(), Policy(), timed=lambda _: speeds).resolution().ranked
    assert pulled_ranked[0].precision == expected
    timed = timed_alike(reports.values())
    routed = [
        RoutedEngine(item.precision, dict, inputs, seconds=measured_seconds(reports[item.precision], inputs, timed))
        for item in pulled_ranked
    ]
    for engines in (routed, routed[::-1] if factor != 0.99 else routed):
        buckets = list_buckets(engines, Padding())
        number, _ = cheapest(buckets, {"batch": 8})
        assert buckets[number].engine.name == expected


def scale(factor, bucket):
    def times(item):
        return item and replace(item, value=factor * item.value, low=factor * item.low, high=factor * item.high)

    quantiles = tuple(times(item) if item.value else item for item in bucket.quantiles)
    return replace(bucket, quantiles=quantiles, runtime=times(bucket.runtime))
