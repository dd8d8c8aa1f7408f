import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import InputError
from enginesmith.registry.rollouts.reports import SILENT_S, NodeReport, report_key, write_report
from enginesmith.registry.rollouts.rollout_state import WHOLE, ServingNode, Slice, format_time, is_reached, parse_wave
from pipeline.rollout.operations import LEVEL, Operator, abort, count_nodes, limit_share, limit_waves
from tests.pipeline.rollout.fleet import at, begin, plan, registry


def tail(most: int, nodes: int, share: float) -> float:
    """P(Binomial(nodes, share) > most), by its terms, those beyond it that matter."""
    log = (
        math.lgamma(nodes + 1) - math.lgamma(k + 1) - math.lgamma(nodes - k + 1)
        + k * math.log(share) + (nodes - k) * math.log1p(-share)
        for k in range(most + 1, min(nodes, most + 400) + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, log))


@settings(max_examples=60, deadline=None)
@example(10_000, 10_000, 0)
@example(10_000, 10_000, 99)
@given(st.integers(20, 200_000), st.integers(1_000, 500_000), st.integers(0, 300_000))
def test_the_share_of_the_given_or_more_nodes_is_kept(nodes, share_ppm, more):
    result = limit_share(share_ppm, nodes)
    for total in (nodes, nodes + more):
        assert not result or tail(share_ppm * total // WHOLE, total, result / WHOLE) <= LEVEL * 1.001


def test_the_limit_is_the_largest_that_keeps_the_share():
    result = limit_share(10_000, 10_000)
    assert 0.0058 < result / WHOLE < 0.0061
    assert tail(100, 10_099, (result + 1) / WHOLE) > LEVEL


@settings(max_examples=60, deadline=None)
@given(st.integers(1_900, 100_000), st.lists(st.integers(10_000, WHOLE), min_size=1, max_size=5, unique=True))
def test_waves_stay_nested_and_below_their_shares(nodes, shares):
    waves = [Slice(share) for share in sorted(shares)]
    actual = limit_waves(waves, nodes)
    assert list(actual) == sorted(actual)
    assert all(limit <= wave.share_ppm for limit, wave in zip(actual, waves, strict=True))


def test_no_first_wave_of_forty_rollouts_has_more_than_its_share():
    nodes = [ServingNode(f"node-{number}") for number in range(2_000)]

    def sizes(share):
        return [sum(is_reached(node, f"rollout-{n}", [Slice(share)]) for node in nodes) for n in range(40)]

    limited_sizes, average = sizes(limit_share(20_000, len(nodes))), sizes(20_000)
    assert 0 < min(limited_sizes) <= max(limited_sizes) <= 40 < max(average)


def test_a_rollout_opens_its_waves_within_their_limits():
    store, _, second_manifest = registry()
    rollout = begin(store, second_manifest, plan("1%", "5%", "100%", nodes=10_000))
    assert (rollout.nodes, rollout.shares_ppm[-1]) == (10_000, WHOLE)
    assert rollout.reach == (Slice(rollout.shares_ppm[0]),) == (rollout.aim,)
    assert rollout.shares_ppm[0] < rollout.shares_ppm[1] < 50_000 and rollout.target == Slice(10_000)


@pytest.mark.parametrize("wave", ["region=eu", "region=eu:1%", "label=canary:1%", "100%"])
def test_waves_of_a_region_or_label_keep_their_share(wave):
    assert limit_waves([parse_wave(wave)], 10_000) == (parse_wave(wave).share_ppm,)


def test_a_fleet_that_is_too_small_for_a_limit_is_refused_with_the_remedy():
    store, _, second_manifest = registry()
    with pytest.raises(InputError, match=r"wave 1% of 300 nodes: a hash picks them: at most 3 means .* name the first"):
        begin(store, second_manifest, plan("1%", "100%", nodes=300))


def _report(store, rollout, count, seconds=0, start=0):
    store.clock.now = at(seconds)
    for number in range(start, start + count):
        name, time = f"node-{number}", format_time(at(seconds))
        report = NodeReport(name, "", "2", time, time)
        write_report(store, report_key("digits", "stable", rollout.id, name), report, None)


def test_reports_of_the_last_rollout_give_the_least_number_of_nodes():
    store, _, second_manifest = registry()
    rollout = begin(store, second_manifest, plan("100%"))
    assert count_nodes(store, None) == count_nodes(store, rollout) == 0
    _report(store, rollout, 500, seconds=SILENT_S + 2)
    _report(store, rollout, 100, start=500)  # silent by then
    assert count_nodes(store, rollout) == 500


def test_a_sample_of_reports_gives_a_lower_bound():
    store, _, second_manifest = registry()
    rollout = begin(store, second_manifest, plan("100%"))
    _report(store, rollout, 1_000)
    assert 500 < count_nodes(store, replace(rollout, reporters_ppm=200_000)) < 1_000
    # Half of the places were reached: those that reported are about half of the nodes.
    assert 1_300 < count_nodes(store, replace(rollout, reach=(Slice(500_000),))) < 2_000
    assert count_nodes(store, replace(rollout, reach=(parse_wave("label=canary"),))) == 0


def test_the_next_rollout_keeps_the_reported_number_and_a_small_fleet_the_average():
    for count, wave, is_limited in ((600, "10%", True), (100, "1%", False)):
        store, _, second_manifest = registry()
        _report(store, begin(store, second_manifest, plan("100%", soak=0)), count)
        abort(store, "digits", "stable", Operator("ada", at(1)))
        result = begin(store, second_manifest, plan(wave, "100%"), 9)
        assert (result.nodes == count) == is_limited == bool(result.shares_ppm)
        assert (result.aim.share_ppm < result.target.share_ppm) == is_limited
