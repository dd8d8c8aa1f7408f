"""Simulated nodes: each looks by the real code (`VersionLocator`, `looking.pause_s`) at a counting store,
at simulated times; what a look that finds a move costs besides is measured once by a real pull, and added for each."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from enginesmith.client.locate import VersionLocator
from enginesmith.client.watching.server import pause_s
from enginesmith.core.errors import EnginesmithError
from enginesmith.registry.versions.channel_state import Channel
from tests.enginesmith.registry.counting import CountingStore

Look = Callable[[], Channel | None]


@dataclass
class Node:
    """A node. look: the real look; what it gives is compared with the last."""

    region: int
    look: Look
    interval_s: float
    last: object = None
    failures: int = 0


@dataclass
class Traffic:
    """Requests of all nodes: by kind, and by second and region; bytes that came. swaps: nodes that found a move."""

    kinds: Counter[str] = field(default_factory=Counter)
    by_second: Counter[int] = field(default_factory=Counter)
    by_region: Counter[int] = field(default_factory=Counter)
    received: int = 0
    swaps: int = 0
    slowest_s: float = 0.0


def channel_node(store: CountingStore, region: int, model: str, interval_s: float) -> Node:
    """A node that follows the channel `stable` of a model."""
    locator = VersionLocator(store, checked=True)
    return Node(region, lambda: locator.read_channel(model, "stable"), interval_s)


def simulate(
    store: CountingStore, nodes: list[Node], seconds: float, events: list[tuple[float, Callable[[], object]]],
    move_costs: tuple[int, int], seed: int = 1,
) -> Traffic:  # fmt: skip
    """The traffic of nodes for so many simulated seconds, from looks spread over the first interval.

    events: (second, what happens then), such as a move or an outage, not counted.  move_costs: requests and bytes of a
    node that found a move, beside its look.
    """
    rng, traffic, moved_at = random.Random(seed), Traffic(), 0.0
    random.seed(seed)
    queue = [(rng.uniform(0, node.interval_s), number) for number, node in enumerate(nodes)]
    heapq.heapify(queue)
    pending_events = sorted(events, key=lambda event: event[0])
    for node in nodes:  # what they know when the simulation begins
        node.last = node.look()
    while queue and queue[0][0] < seconds:
        current_s, number = heapq.heappop(queue)
        while pending_events and pending_events[0][0] <= current_s:
            moved_at = pending_events[0][0]
            pending_events.pop(0)[1]()
        node = nodes[number]
        with store.counted() as sent_count:
            try:
                seen_look, node.failures = node.look(), 0
            except EnginesmithError:
                seen_look, node.failures = node.last, node.failures + 1
        extra_cost = 0
        if seen_look != node.last:
            extra_cost, node.last = move_costs[0], seen_look
            traffic.swaps += 1
            traffic.slowest_s = max(traffic.slowest_s, current_s - moved_at)
            traffic.kinds["GET"] += extra_cost
            traffic.received += move_costs[1]
        traffic.kinds += sent_count.kinds
        traffic.received += sent_count.received
        traffic.by_second[int(current_s)] += sent_count.count + extra_cost
        traffic.by_region[node.region] += sent_count.count + extra_cost
        heapq.heappush(queue, (current_s + pause_s(node.interval_s, node.failures), number))
    return traffic
