"""Seconds on a device: by CUDA events, or by the clock where the device is the CPU."""

from collections.abc import Callable

from validation.latency.measurement.loop import time_call


def seconds_of(run: Callable[[], object], device: str, runs: int) -> list[float]:
    """Of each of `runs` calls, after one that is not counted. device: 'cuda' or 'cpu', as torch calls them."""
    import torch

    run()
    if device == "cpu":
        return [time_call(run) for _ in range(runs)]
    pairs = []
    for _ in range(runs):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begun.record()
        run()
        ended.record()
        pairs.append((begun, ended))
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairs]


def runs_for(run: Callable[[], object], device: str, seconds: float, least: int) -> int:
    """How many calls take about so many seconds, from `least` to 2000."""
    each = min(seconds_of(run, device, 3))
    return max(least, min(2000, int(seconds / max(each, 1e-9))))
