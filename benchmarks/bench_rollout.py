"""Rollouts on simulated fleets: whom a bad engine reaches, how long a good one takes, what reports cost.

    python -m benchmarks.bench_rollout [--nodes 10000] [--large 50000] [--seeds 5] [--only PART ...]

Nodes look every 30 s, a fifth more or less, swap and report by the real code over a store in memory, in simulated time;
the controller looks every 15 s (`tests/pipeline/rollout/fleet.py`). The waves are 1 %, 5 %, 25 %, 100 % with 10 min
each and the gate health=95%; the plan says how many nodes there are, so that waves are limits (`--nodes`). Prints
Markdown tables, of which docs/scale.md has the main columns, and exits 1 where a bar is not met.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from enginesmith.client.locate import VersionLocator
from enginesmith.client.watching.server import Reporter
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.names import parse_reference
from enginesmith.registry.gc import collect
from enginesmith.registry.rollouts.reports import MOST_REPORTERS, Heard, NodeReport
from enginesmith.registry.rollouts.rollout_state import ServingNode, format_time, open_wave
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.channel_writes import read_rollout
from pipeline.rollout.advance import judge_gates
from pipeline.rollout.operations import read_serving
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.counting import CountingStore
from tests.enginesmith.registry.memory import Actor, Choose, interleave
from tests.pipeline.rollout.fleet import WHERE, Fleet, at, begin, plan, registry

WAVES = ("1%", "5%", "25%", "100%")
SOAK_S = 600


def seeded(seed: int) -> Choose:
    """At random, in runs of random length, so that both long and short stretches come up."""
    rng = random.Random(seed)
    stay = rng.choice((0.5, 0.8, 0.95))
    last_actors: list[Actor] = []

    def choose(waiting: Sequence[Actor]) -> Actor:
        if not last_actors or last_actors[0] not in waiting or rng.random() > stay:
            last_actors[:] = [rng.choice(list(waiting))]
        return last_actors[0]

    return choose


def run_fleet(nodes: int, seed: int, *, waves: tuple[str, ...] = WAVES, **given: object) -> tuple[Fleet, str]:
    """A fleet at the end of its rollout, and the rollout's state. given: bad, step, regions, cut, health_ppm."""
    is_bad, step, cut_size = bool(given.get("bad")), given.get("step"), given.get("cut")
    store, _, second = registry()
    health = given.get("health_ppm", 950_000)
    begin(store, second, plan(*waves, soak=SOAK_S, step=step, nodes=nodes, health_ppm=health))  # type: ignore[arg-type]
    regions = int(str(given.get("regions", 1)))
    fleet = Fleet.of(store, nodes, regions=regions, is_bad=lambda _: is_bad, seed=seed)
    for watcher in fleet.watchers:
        watcher.cut_off = watcher.node.region == cut_size
    return fleet, fleet.run(4 * 3600)


def measure_bad(nodes: int, seeds: int) -> bool:
    """An engine that fails on every node, with whole waves and in steps of 0.25 % a look."""
    print("| waves open | nodes reached | share | halted after the first swap | all back |")
    print("|---|---:|---:|---:|---:|")
    is_good = True
    for name, step in (("at once", None), ("in steps of 0.25 %", 2_500)):
        reached_counts, halted_ends = [], []
        for seed in range(seeds):
            fleet, state = run_fleet(nodes, seed, bad=True, step=step)
            swaps = [watcher.swaps for watcher in fleet.watchers if watcher.swaps]
            first, end = min(min(item) for item in swaps), fleet.actions[-1][0]
            reached_counts.append(len(swaps))
            halted_ends.append(end - first)
            is_everybody = fleet.serving("1") == nodes
            in_first = read_rollout(fleet.store, *WHERE).wave == 0  # type: ignore[union-attr]
            is_good = is_good and state == "halted" and is_everybody and in_first and end - first <= 2 * 36 + 2 * 15
        count = max(reached_counts)
        is_good = is_good and count <= nodes / 100
        spread, back = f"{min(reached_counts)} to {count}", "yes" if is_everybody else "NO"
        print(f"| {name} | {spread} | {count / nodes:.2%} at most | {max(halted_ends):.0f} s at most | {back} |")
    return is_good


def measure_good(nodes: int, seeds: int) -> bool:
    """An engine that is well everywhere."""
    swaps, items, back = [], [], 0
    for seed in range(min(seeds, 2)):
        fleet, state = run_fleet(nodes, seed)
        if state != "done" or fleet.serving("2") != nodes:
            return False
        swaps.append(max(watcher.swaps[0] for watcher in fleet.watchers))
        items.append(next(action_time for action_time, action, _ in fleet.actions if action == "done"))
        back += sum(len(watcher.swaps) > 1 for watcher in fleet.watchers)
    print(f"the waves say {3 * SOAK_S} s until the last opens, {4 * SOAK_S} s to the end; the last of {nodes} nodes")
    print(f"swapped after {max(swaps):.0f} s, the channel was promoted after {max(items):.0f} s; swapped twice: {back}")
    return max(swaps) <= 3 * SOAK_S + 3 * 15 + 36 and max(items) <= 4 * SOAK_S + 5 * 15 and back == 0


def measure_regions(nodes: int, _: int) -> bool:
    """One of 20 regions without the registry for the whole rollout."""
    fleet, state = run_fleet(nodes, 0, regions=20, cut="region-7", health_ppm=900_000)
    cut = [watcher for watcher in fleet.watchers if watcher.cut_off]
    is_served = all(watcher.version == "1" and not watcher.swaps for watcher in cut)
    for watcher in cut:
        watcher.cut_off = False
    is_others = fleet.serving("2") == nodes - len(cut)
    fleet.run(fleet.second + 40, ends=False)
    print(f"{len(cut)} nodes cut off: the rollout is {state} on the others; they keep version 1: {is_served}; ", end="")
    print(f"36 s after they are back all {nodes} serve 2: {fleet.serving('2') == nodes}")
    return state == "done" and is_served and is_others and fleet.serving("2") == nodes


def measure_races(_: int, seeds: int) -> bool:
    """Two operators who start different rollouts of one channel at once, in many interleavings."""
    wins = {"ada": 0, "bob": 0}
    for seed in range(20 * seeds):
        store, _one, two = registry()
        works: list[tuple[Actor, Callable[[], object]]] = []
        for name in wins:
            seen = store.seen_by(actor := Actor(name))
            works.append((actor, lambda seen=seen, two=two, name=name: begin(seen, two, plan(), by=name)))  # type: ignore[misc]
        interleave(works, seeded(seed))
        winner = read_rollout(store, *WHERE).history[0].by  # type: ignore[union-attr]
        names_winner = [isinstance(actor.error, EnginesmithError) and winner in str(actor.error) for actor, _ in works]
        if sorted(names_winner) != [False, True]:
            return False
        wins[winner] += 1
    print(f"{20 * seeds} interleavings: ada won {wins['ada']}, bob {wins['bob']}; the other was told each time")
    return True


def measure_halts(_: int, seeds: int) -> bool:
    """How often the gate health=95% halts a wave whose nodes fail with a given probability, looked at every 15 s."""
    print("| nodes of the wave | probability | waves halted before their end | waves halted in all |")
    print("|---:|---:|---:|---:|")
    store, _, second_manifest = registry()
    rollout = open_wave(begin(store, second_manifest, plan("50%", "100%", soak=SOAK_S, health_ppm=950_000)), 0, at(0))
    rng, rounds, worst_value = random.Random(0), 40 * seeds, 0.0
    for nodes in (20, 100, 500):
        for share in (0.01, 0.025, 0.05, 0.1, 0.3):
            early_number = late_number = 0
            for _round in range(rounds):
                arrays = [(rng.uniform(0, 36), rng.random() < share, rng.uniform(20, SOAK_S)) for _node in range(nodes)]
                first_s = next((s for s in range(0, SOAK_S + 1, 15) if _fails(rollout, arrays, s)), None)
                early_number += first_s is not None and first_s < SOAK_S
                late_number += first_s is not None
            worst_value = max(worst_value, early_number / rounds) if share <= 0.05 else worst_value
            print(f"| {nodes} | {share:.1%} | {early_number / rounds:.1%} | {late_number / rounds:.1%} |")
    return worst_value <= 0.1


def _fails(rollout: object, when: list[tuple[float, bool, float]], second: int) -> bool:
    """Whether the gate fails at a second. when: of each node its swap, whether it fails, and from when on."""
    time_ = format_time(at(second))
    reports = [
        NodeReport(str(number), "", "2", time_, time_, "unhealthy" if bad_flag and second >= since_time else "")
        for number, (swap, bad_flag, since_time) in enumerate(when)
        if swap <= second
    ]
    (gate,) = judge_gates(rollout, Heard(len(reports), tuple(reports)), (), at(second))  # type: ignore[arg-type]
    return gate.verdict == "fail"


def measure_large(nodes: int, _: int) -> bool:
    """What reports cost a large fleet, in the usual waves and in one."""
    columns = (
        "nodes",
        "waves",
        "that report, at most",
        "reports a second, busiest 10 s",
        "mean",
        "read a look, at most",
    )
    print(f"| {' | '.join(columns)} |\n|---:|---|---:|---:|---:|---:|")
    is_good = True
    for waves in (WAVES, ("100%",)):
        fleet, state = run_fleet(nodes, 0, waves=waves)
        writes, looks = fleet.report_writes, fleet.read_by_looks
        max_writes, mean = max(writes.values()) / 10, sum(writes.values()) / fleet.second
        most = [max(look[index] for look in looks) for index in (0, 1)]
        print(f"| {nodes} | {', '.join(waves)} | {most[0]} | {max_writes:.0f} | {mean:.1f} | {most[1]} |")
        is_good = is_good and state == "done" and most[1] <= 2_000 and max_writes < 3_500
    return is_good


def measure_outside(nodes: int, _: int) -> bool:
    """Reports outside of a rollout: nodes poll every 2 min; a collection after two hours; all swap after four."""
    clock = [at(0).timestamp()]
    store = CountingStore(keep_keys=False)
    versions = [
        publish_engines(store, [engine(store, data=data)], data.decode(), channel=None) for data in (b"1", b"2")
    ]
    channels.promote(store, versions[0].manifest, "stable")
    reference, quiet_fields = parse_reference("digits:stable"), {"say": len, "clock": lambda: clock[0]}
    fleet = [
        (Reporter(**quiet_fields), VersionLocator(store, node=ServingNode(f"node-{number}")))  # type: ignore[arg-type]
        for number in range(nodes)
    ]
    print("| hour | GET | PUT | reports that are read |")
    print("|---|---:|---:|---:|")
    max_puts = 0
    for hour, note in enumerate(("the first reports", "a collection at its end", "", "", "all swap", ""), 1):
        with store.counted() as requests:
            for minute in range(0, 60, 2):
                clock[0] = at(3600 * (hour - 1) + 60 * minute).timestamp()
                if note == "all swap" and minute == 0:
                    channels.promote(store, versions[1].manifest, "stable")
                    requests.kinds.clear()
                channel = read_channel(store, *WHERE)
                requests.kinds["GET"] -= 1  # which is the poll, and conditional
                facts = {"version": channel.version, "digest": "0" * 64, "unit": "u", "machine": "m"}  # type: ignore[union-attr]
                for reporter, locator in fleet:
                    reporter.look(locator, reference, channel, facts, None)
        max_puts = max(max_puts, requests.kinds["PUT"]) if hour > 2 else max_puts
        with store.counted() as reads:
            read_serving(store, channel, at(0))  # type: ignore[arg-type]
        print(
            f"| {hour} {note} | {requests.kinds['GET']} | {requests.kinds['PUT']} | {reads.kinds['GET']} |", flush=True
        )
        if hour == 2:
            collect(store, delete=True)
    return max_puts <= 2 * 1.25 * MOST_REPORTERS


PARTS = {
    "bad": measure_bad,
    "good": measure_good,
    "regions": measure_regions,
    "races": measure_races,
    "halts": measure_halts,
    "large": measure_large,
    "outside": measure_outside,
}


def main() -> int:
    """Run the parts; exit code 1 where one does not meet its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_rollout", description="Rollouts, simulated.")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    failed_names = []
    for name in options.only:
        start_s = time.process_time()
        print(f"\n### {(PARTS[name].__doc__ or name).splitlines()[0]}\n")
        part_result = PARTS[name](options.large if name == "large" else options.nodes, options.seeds)
        print(f"\nbar met: {'yes' if part_result else 'NO'} ({time.process_time() - start_s:.0f} s of CPU)", flush=True)
        failed_names += [] if part_result else [name]
    return 1 if failed_names else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
