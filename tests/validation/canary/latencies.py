"""Simulated latencies of two equal engines, by name: how they are distributed, and what they remember."""

from collections.abc import Callable

import numpy as np

Rng = np.random.Generator
Pair = tuple[np.ndarray, np.ndarray]
Kind = Callable[[Rng, int], Pair]


def autoregressive(rng: Rng, count: int, memory: float, spread: float) -> np.ndarray:
    """AR(1), stationary: the sum of what each step leaves, in pieces that are short enough not to overflow."""
    steps = rng.normal(size=count) * spread * np.sqrt(1 - memory**2)
    values, last_value = np.empty(count), float(rng.normal() * spread)
    size = max(1, min(count, int(500 / -np.log(memory)))) if memory > 0 else count
    if memory == 0:
        return steps
    for start in range(0, count, size):
        piece = steps[start : start + size]
        powers = memory ** np.arange(1, len(piece) + 1)
        values[start : start + size] = powers * (last_value + np.cumsum(piece / powers))
        last_value = float(values[start + len(piece) - 1])
    return values


def each(draw: Callable[[Rng, int], np.ndarray]) -> Kind:
    """Two sides of one kind, each by itself."""
    return lambda rng, count: (draw(rng, count), draw(rng, count))


def noise(rng: Rng, count: int, spread: float) -> np.ndarray:
    """Independent lognormal factors."""
    return np.exp(rng.normal(size=count) * spread)


def heavy(rng: Rng, count: int) -> np.ndarray:
    """Pareto tails of index 2.5: the variance is finite, the third moment is not."""
    return 1 + rng.pareto(2.5, size=count)


def remembering(memory: float) -> Kind:
    """A correlation from one request to the next, on each side by itself."""
    return each(lambda rng, count: np.exp(autoregressive(rng, count, memory, 0.2)))


def shared(memory: float) -> Kind:
    """What the machine does happens to both."""

    def draw(rng: Rng, count: int) -> Pair:
        both_array = autoregressive(rng, count, memory, 0.3)
        return np.exp(both_array) * noise(rng, count, 0.05), np.exp(both_array) * noise(rng, count, 0.05)

    return draw


def humps(share: float, times: float, spread: float) -> Kind:
    """A share of the requests takes so many times as long."""
    return each(lambda rng, count: np.where(rng.random(count) < share, times, 1.0) * noise(rng, count, spread))


def load_steps(rng: Rng, count: int) -> np.ndarray:
    """Eight stretches of the run, each of its own level (standard deviation 10 %)."""
    edges = np.sort(rng.integers(0, count, 7))
    levels = rng.normal(size=8) * 0.1
    return np.exp(levels[np.searchsorted(edges, np.arange(count), side="right")]) * noise(rng, count, 0.1)


def regimes(rng: Rng, count: int) -> np.ndarray:
    """Two states of load, 20 % apart, that last 500 requests on average."""
    slow_sums = (np.cumsum(rng.random(count) < 1 / 500) + rng.integers(2)) % 2
    return (1 + 0.2 * slow_sums) * noise(rng, count, 0.1)


def sine(rng: Rng, count: int) -> np.ndarray:
    """One period over the run, at any phase, 20 % up and down."""
    return np.exp(0.2 * np.sin(2 * np.pi * (np.arange(count) / count + rng.random()))) * noise(rng, count, 0.1)


def warming(rng: Rng, count: int) -> np.ndarray:
    """30 % slower at the start, and ever less."""
    return (1 + 0.3 * np.exp(-5 * np.arange(count) / count)) * noise(rng, count, 0.1)


def slow_component(rng: Rng, count: int) -> np.ndarray:
    """A tenth of the variance is a load that remembers 1,000 requests."""
    return np.exp(autoregressive(rng, count, 0.999, 0.06) + rng.normal(size=count) * 0.19)


def outliers(rng: Rng, count: int) -> np.ndarray:
    """1 % of the requests take a hundred times as long."""
    return np.where(rng.random(count) < 0.01, 100.0, 1.0) * noise(rng, count, 0.2)


def queue(rng: Rng, count: int) -> np.ndarray:
    """From arrival to answer at a server that is busy for 80 % of the time; service is gamma (Lindley 1952)."""
    service = rng.gamma(4.0, 0.25, size=count)
    gaps = rng.exponential(1.25, size=count)
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    return walk - np.minimum.accumulate(walk) + service


KINDS: dict[str, Kind] = {
    "lognormal": each(lambda rng, count: noise(rng, count, 0.2)),
    "heavy": each(heavy),
    "remembering": remembering(0.9),
    "shared": shared(0.9),
    "two humps": humps(0.03, 3.0, 0.1),
    "two modes": humps(0.5, 2.0, 0.05),
    "load steps": each(load_steps),
    "AR .99": remembering(0.99),
    "AR .995": remembering(0.995),
    "AR .999": remembering(0.999),
    "shared .999": shared(0.999),
    "regimes": each(regimes),
    "sine": each(sine),
    "warming": each(warming),
    "slow component": each(slow_component),
    "Pareto 1.5": each(lambda rng, count: 1 + rng.pareto(1.5, size=count)),
    "outliers": each(outliers),
    "queue": each(queue),
    "rounded to 10 %": each(lambda rng, count: noise(rng, count, 0.2)),
    "rounded to 0.1 %": each(lambda rng, count: noise(rng, count, 0.2)),
}
