"""Seconds on a device: by CUDA events, or by the clock where the device is the CPU."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from enginery.core.types import Tensors
from validation.latency.measurement.loop import timed


@runtime_checkable
class DeviceClock(Protocol):
    """A session that can tell how long its device takes, without the copies to it and from it."""

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float]:
        """Of each of so many runs. Raises as `run` does."""
        ...


def seconds_of(run: Callable[[], Any], device: str, runs: int) -> list[float]:
    """Of each of `runs` calls, after one that is not counted. device: 'cuda' or 'cpu', as torch calls them."""
    import torch

    run()
    if device == "cpu":
        return [timed(run) for _ in range(runs)]
    event: Any = torch.cuda.Event  # without types
    pairs = []
    for _ in range(runs):
        begun, ended = (event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        pairs.append((begun, ended))
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairs]


def runs_for(run: Callable[[], Any], device: str, seconds: float, least: int) -> int:
    """How many calls take about so many seconds, from `least` to 2000."""
    each = min(seconds_of(run, device, 3))
    return max(least, min(2000, int(seconds / max(each, 1e-9))))
