"""Simulated canaries with several requests in flight: queues of several servers, on a machine whose speed changes."""

from heapq import heapreplace

import numpy as np

from enginesmith.arrays import Array
from tests.validation.canary.latencies import Rng
from tests.validation.canary.sides import side
from validation.canary.judging.pairing import design_block
from validation.canary.replay import segments
from validation.statistics.rates import CanaryEvidence

# How long the machine keeps its speed, in requests (AR(1)), and by how much it varies.
MACHINES = {"steady": (0.0, 0.0), "noisy": (0.9, 0.1), "throttling": (0.99, 0.1), "drifting": (0.999, 0.1)}
# They share the device: by how much a request is slower for each other one that runs.
SHARED = 0.1


def in_flight_evidence(
    rng: Rng, count: int, servers: int, machine: str = "steady", load: float = 0.7, slower: float = 0.0
) -> CanaryEvidence:
    """Both sides of a replay in turns. Each engine has `servers` servers and one queue, Poisson arrivals.

    load: arrivals, of those that would keep all servers busy; above 1 the queue grows as long as it lasts.
    slower: the candidate's latencies are all longer by that share.
    """
    single_values = np.exp(0.5 * 0.3**2)  # seconds that a request takes by itself, on average
    busiest_servers = servers / (single_values * (1.0 + SHARED * (servers - 1)))
    arrivals = np.cumsum(rng.exponential(1.0 / (busiest_servers * load), count))
    latencies = np.empty((2, count))
    state, first_number = 0.0, 0
    keeps, sd = MACHINES[machine]
    cut_segments = list(segments(count, servers))
    for number, (start, stop) in enumerate(cut_segments):
        first_number = 1 - first_number if number % 2 else int(rng.integers(2))
        lead = min(start, servers)
        for turn in (first_number, 1 - first_number):
            state, result = _segment(rng, arrivals[start - lead : stop], servers, state, keeps, sd)
            latencies[turn, start:stop] = result[lead:]
    our_side, their_side = (side(latency, time=arrivals) for latency in (latencies[0] * (1 + slower), latencies[1]))
    segment = [number for number, (start, stop) in enumerate(cut_segments) for _ in range(start, stop)]
    same_array = np.zeros(count, bool)
    return CanaryEvidence(our_side, their_side, True, same_array, design_block=design_block(segment))


def _segment(
    rng: Rng, arrivals: Array, servers: int, state: float, keeps: float, sd: float
) -> tuple[float, list[float]]:
    """The machine's state behind it, and latencies: first come, first served by whichever server is free."""
    free_values = [0.0] * servers
    noise, news = rng.normal(0, 0.3, len(arrivals)), rng.normal(0, sd * np.sqrt(1 - keeps**2), len(arrivals))
    items = []
    for arrival, item, new_value in zip(arrivals, noise, news, strict=True):
        state = keeps * state + new_value
        busy_total = sum(1 for end in free_values if end > arrival)
        service = np.exp(item + state) * (1.0 + SHARED * busy_total)
        end = max(arrival, free_values[0]) + service
        heapreplace(free_values, end)
        items.append(end - arrival)
    return state, items
