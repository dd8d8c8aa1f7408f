"""What ten thousand models and fifty thousand nodes cost in requests, bytes and seconds; docs/scale.md has the figures.

    python -m benchmarks.bench_scale                       # all parts, as JSON lines; some minutes on a core
    python -m benchmarks.bench_scale --models 100 --nodes 500 --minutes 2

Parts: `one`: a node's requests, over a counting store and over moto's S3 on loopback (which must agree).  `writer`: a
move of a channel with 20 moves.  `idle`, `moves`, `outage`: simulated nodes in 20 regions, each of which looks by the
real code.

Models that do not move have a channel and no version, since nothing reads it; those that move are published by the real
code with 12 engines, 12 attestations and 12 latency reports.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale.nodes import Node, Traffic, channel_node, simulate
from benchmarks.scale.registry import publish_version
from enginesmith.client.client import Client
from enginesmith.client.watching.server import INTERVAL_S
from enginesmith.core.hardware.machine import Machine
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import channel_history_key, channel_key
from enginesmith.registry.store.s3.requests import client as s3_client
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.lookup import load
from tests.enginesmith.registry.counting import CountingStore
from tests.enginesmith.s3_server import BUCKET, ENVIRONMENT, serving

REGIONS, VERSIONS = 20, 20
MACHINE = "sm_90"


def main() -> None:
    """Measure the parts, and print each as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    options = parser.parse_args()
    for name in options.part or PARTS:
        used_usage = [resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()]
        result = PARTS[name](options)
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        cost = {
            "driver_cpu_s": round(cpu.ru_utime + cpu.ru_stime - used_usage[0].ru_utime - used_usage[0].ru_stime, 1),
            "driver_s": round(time.perf_counter() - used_usage[1], 1),
            "driver_peak_mib": cpu.ru_maxrss >> 10,
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps({"part": name, **result, **cost}), flush=True)


def one_node(_given: argparse.Namespace) -> dict[str, Any]:
    """A node's requests, and over how many round trips, from memory and from a server."""
    memory = CountingStore()
    results = {"memory": measure_node(memory, lambda _: _counting(memory))}
    os.environ.update(ENVIRONMENT)
    with serving() as url:
        bucket = open_store(f"s3://{BUCKET}/scale?endpoint={url}", create=True)
        results["server"] = measure_node(bucket, _sniffing)
    return results


def measure_node(store: Any, counting: Callable[[Store], Any]) -> dict[str, Any]:
    """Requests by kind, and seconds, of what a node does; each pull is that of a fresh client."""
    publish_version(store, "m", 1)
    totals: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:

        def client() -> Client:
            new_client = Client(store.uri, cache=Path(folder) / "cache")
            new_client.__dict__["store"] = store
            return new_client

        works: dict[str, Callable[[], object]] = {
            "pull": lambda: client().pull("m:stable", Path(folder) / "e", target=MACHINE),
            "pull again": lambda: client().pull("m:stable", Path(folder) / "e", target=MACHINE),
            "move": lambda: client().pull("m:stable", Path(folder) / "e", target=MACHINE),
            "resolve": lambda: client().resolve("m:stable", MACHINE),
        }
        for name, work in works.items():
            if name == "move":
                publish_version(store, "m", 2)
            with counting(store) as kinds:
                start_s = time.perf_counter()
                work()
                seconds = time.perf_counter() - start_s
            totals[name] = {**dict(kinds), "seconds": round(seconds, 3)}
    return totals


@contextmanager
def _counting(store: CountingStore) -> Iterator[Counter[str]]:
    kinds: Counter[str] = Counter()
    with store.counted() as counts:
        yield kinds
    for kind, count in counts.kinds.items():
        kinds["GET" if kind == "UNCHANGED" else kind] += count


@contextmanager
def _sniffing(store: Any) -> Iterator[Counter[str]]:
    kinds: Counter[str] = Counter()

    def note(request: Any, **_: object) -> None:
        kinds["LIST" if request.method == "GET" and "list-type" in request.url else request.method] += 1

    events = s3_client(store.place).meta.events
    events.register("before-send.s3", note)
    try:
        yield kinds
    finally:
        events.unregister("before-send.s3", note)


def writer(given: argparse.Namespace) -> dict[str, Any]:
    """The requests of a move (a rollback, between two versions with all evidence)."""
    store = fill(given.models, 1)
    with store.counted() as sent_count:
        channels.rollback(store, "m0", "stable")
    return {
        "move": {**sent_count.kinds, "sent": sent_count.sent},
        "channel_bytes": len(store.objects[channel_key("m0", "stable")]),
        "history_bytes": len(store.objects[channel_history_key("m0", "stable")]),
    }


def fill(models: int, real: int) -> CountingStore:
    """A registry: `real` models with two versions of 12 engines each with evidence and a channel of 20 moves, and the
    others with their channel alone."""
    store = CountingStore(keep_keys=False)
    for number in range(real):
        for version in (1, 2):
            publish_version(store, f"m{number}", version)
        manifests = [load(store, f"m{number}", str(version)) for version in (1, 2)]
        for turn in range(VERSIONS - 2):
            channels.promote(store, manifests[turn % 2], "stable")
    channel = read_channel(store, "m0", "stable")
    assert channel is not None
    for number in range(real, models):
        model = f"m{number}"
        store._write(channel_key(model, "stable"), replace(channel, model=model).to_bytes())
    return store


def _channel_nodes(store: CountingStore, given: argparse.Namespace, real: int) -> list[Node]:
    """Nodes in all regions; half of them follow one of the models that move, the others one of the rest each."""
    rest = given.models - real
    names = [f"m{number % real if number % 2 else real + number % rest}" for number in range(given.nodes)]
    return [channel_node(store, number % REGIONS, name, INTERVAL_S) for number, name in enumerate(names)]


def _move_costs(store: CountingStore) -> tuple[int, int]:
    """Requests and bytes of a node that found a move, beside its look, by a real pull of the model m0."""
    with tempfile.TemporaryDirectory() as folder, store.counted() as sent_count:
        client = Client(store.uri, cache=Path(folder) / "cache")
        client.__dict__["store"] = store
        client.pull("m0:stable", Path(folder) / "e", target=Machine.from_name(MACHINE))
    return sent_count.count - 1, sent_count.received - len(store.objects[channel_key("m0", "stable")])


def _shown(found: Traffic, given: argparse.Namespace) -> dict[str, Any]:
    seconds = 60 * given.minutes
    total = found.kinds.total()
    return {
        "kinds": dict(found.kinds),
        "requests_a_second": round(total / seconds, 1),
        "requests_a_second_and_node": round(total / seconds / given.nodes, 5),
        "peak_requests_a_second": max(found.by_second.values()),
        "busiest_region_a_second": round(max(found.by_region.values()) / seconds, 1),
        "received_mib": round(found.received / (1 << 20), 1),
        "swaps": found.swaps,
        "slowest_swap_s": round(found.slowest_s, 1),
    }


def idle(given: argparse.Namespace) -> dict[str, Any]:
    """Nothing moves."""
    store = fill(given.models, 4)
    return _shown(simulate(store, _channel_nodes(store, given, 4), 60 * given.minutes, [], (0, 0)), given)


def moves(given: argparse.Namespace) -> dict[str, Any]:
    """Each of four channels, which an eighth of the nodes follow, moves once, five minutes after the other."""
    store = fill(given.models, 4)
    costs, nodes = _move_costs(store), _channel_nodes(store, given, 4)
    events = [
        (60.0 + given.minutes * 12.0 * number, lambda number=number: channels.rollback(store, f"m{number}", "stable"))
        for number in range(4)
    ]
    return {"costs": costs, **_shown(simulate(store, nodes, 60 * given.minutes, events, costs), given)}


def outage(given: argparse.Namespace) -> dict[str, Any]:
    """The registry is away for the second quarter of the time."""
    store, seconds = fill(given.models, 4), 60 * given.minutes
    nodes = _channel_nodes(store, given, 4)
    events = [
        (seconds * 0.25, lambda: setattr(store, "down", True)),
        (seconds * 0.5, lambda: setattr(store, "down", False)),
    ]
    simulation = simulate(store, nodes, seconds, events, (0, 0))
    quarters = [range(int(seconds * part), int(seconds * (part + 0.25))) for part in (0, 0.25, 0.5, 0.75)]
    rates = [sum(simulation.by_second[time_s] for time_s in quarter) / len(quarter) for quarter in quarters]
    return {"requests_a_second_by_quarter": [round(rate, 1) for rate in rates], **_shown(simulation, given)}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "one": one_node, "writer": writer, "idle": idle, "moves": moves, "outage": outage,
}  # fmt: skip

if __name__ == "__main__":
    main()
