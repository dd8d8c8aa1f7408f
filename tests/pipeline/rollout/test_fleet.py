"""Rollouts on a simulated fleet with the real code: small sizes of what `benchmarks/bench_rollout.py` measures."""

import math
from itertools import count
from types import SimpleNamespace

import pytest

from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.channel_writes import read_rollout
from pipeline.rollout import operations
from pipeline.rollout.advance import LEAST_ALL
from tests.pipeline.rollout.fleet import WHERE, Fleet, begin, plan, registry

NODES = 1_000


@pytest.fixture(autouse=True)
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of rollouts, by which nodes come into waves, are the same in every run."""
    names = (f"rollout{number}" for number in count(1))
    monkeypatch.setattr(operations, "secrets", SimpleNamespace(token_hex=lambda _: next(names)))


def test_a_bad_engine_reaches_only_the_first_wave():
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("5%", "100%", nodes=NODES, health_ppm=950_000))
    fleet = Fleet.of(store, NODES, is_bad=lambda node: True)
    assert fleet.run(3600) == "halted"
    third_swap = sorted(min(watcher.swaps) for watcher in fleet.watchers if watcher.swaps)[LEAST_ALL - 1]
    halted_action = fleet.actions[-1][0]
    # A node says that its server is unwell at its second look; the controller sees at its next that all three fail.
    assert halted_action - third_swap <= 2 * 36 + 2 * 15
    assert 0 < fleet.most["2"] <= 50 and fleet.serving("1") == NODES
    assert read_channel(store, *WHERE).version == "1"


def test_in_steps_a_bad_engine_reaches_a_part_of_the_first_wave():
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("10%", "100%", step=10_000, health_ppm=950_000))
    fleet = Fleet.of(store, NODES, is_bad=lambda node: True)
    assert fleet.run(3600) == "halted" and fleet.most["2"] < 0.08 * NODES


def test_a_good_engine_reaches_all_nodes_in_the_planned_time():
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("2%", "10%", "100%", soak=120, health_ppm=950_000))
    fleet = Fleet.of(store, NODES)
    assert fleet.run(3600) == "done" and fleet.serving("2") == NODES
    assert all(len(watcher.swaps) == 1 for watcher in fleet.watchers)  # nobody went back and forth
    assert max(watcher.swaps[0] for watcher in fleet.watchers) <= 2 * 120 + 3 * 15 + 36
    assert fleet.second <= 3 * 120 + 4 * 15 + 40


@pytest.mark.slow
def test_swaps_per_poll_stay_near_the_requested_share():
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("100%", soak=0, step=50_000))
    fleet = Fleet.of(store, NODES)
    assert fleet.run(3600) == "done"
    swaps = sorted(watcher.swaps[0] for watcher in fleet.watchers)
    max_total = max(sum(start <= swap < start + 30 for swap in swaps) for start in range(0, int(swaps[-1]), 5))
    assert max_total <= 50 + 4 * math.sqrt(50)


def test_a_disconnected_region_serves_its_version_and_catches_up():
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("10%", "100%", soak=120, health_ppm=850_000))
    fleet = Fleet.of(store, NODES, regions=10)
    cut_watchers = [watcher for watcher in fleet.watchers if watcher.node.region == "region-3"]
    for watcher in cut_watchers:
        watcher.cut_off = True
    assert fleet.run(3600) == "done"
    assert fleet.serving("1") == len(cut_watchers) == NODES // 10 and not any(watcher.swaps for watcher in cut_watchers)
    for watcher in cut_watchers:
        watcher.cut_off = False
    fleet.run(fleet.second + 40, ends=False)
    assert fleet.serving("2") == NODES


@pytest.mark.parametrize("gone_s", [200, 2000])
def test_without_a_controller_nothing_moves_and_the_next_one_continues(gone_s):
    store, _, second_manifest = registry()
    begin(store, second_manifest, plan("10%", "100%", soak=120))
    fleet = Fleet.of(store, NODES, controller_s=1e9)
    fleet.run(gone_s, ends=False)
    assert fleet.most.get("2", 0) == 0 and 50 < fleet.serving("2") < 150
    fleet.controller_s = 15.0
    assert fleet.run(gone_s + 400) == "done" and fleet.serving("2") == NODES
    assert read_rollout(store, *WHERE).state == "done"
