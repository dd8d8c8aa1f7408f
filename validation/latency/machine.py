"""The machine on which latencies are measured: its kind, and the load of other processes during a measurement.

Load is read from /proc and /sys/fs/cgroup (Linux); on other systems it is None. In a container /proc/stat is the
host's: all other processes of the host count.
"""

import os
import platform
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from enginesmith.core.hardware.cpu_kinds import cpu_name, this_kind
from enginesmith.core.hardware.cuda import gpus
from enginesmith.core.reports.latency import MachineKind, SystemLoad


def machine() -> MachineKind:
    """The kind of this machine: CPU, cores and GPUs. Two machines of equal kind count as equally fast."""
    products = tuple(sorted({gpu.name for gpu in gpus()}))
    return MachineKind(cpu_name(), this_kind().name, os.cpu_count(), platform.system(), products)


@dataclass
class SystemLoadMonitor:
    """Measures the load from its creation to `stop`."""

    _begun: tuple[float, dict[str, float], float, int, int | None] = field(default_factory=lambda: _read())

    def stop(self) -> SystemLoad:
        """The load since this object was created."""
        start, ticks_start, own_cpu_s, switches, throttle_start = self._begun
        end, ticks_end, own_end, switches_end, throttled_end = _read()
        seconds, cores = max(end - start, 1e-9), os.cpu_count() or 1
        other_share = steal_share = None
        kind_seconds = {name: ticks_end[name] - ticks_start[name] for name in ticks_end if name in ticks_start}
        if kind_seconds and (total := sum(kind_seconds.values())) > 0:
            stolen_s = kind_seconds.get("steal", 0.0)
            busy_ticks = total - kind_seconds.get("idle", 0.0) - kind_seconds.get("iowait", 0.0) - stolen_s
            other_share = min(max(busy_ticks - (own_end - own_cpu_s), 0.0) / total, 1.0)
            steal_share = stolen_s / total
        periods = None if throttle_start is None or throttled_end is None else throttled_end - throttle_start
        rate = (switches_end - switches) / seconds
        load: float | None = None
        with suppress(OSError):
            load = os.getloadavg()[0]
        return SystemLoad(seconds, load, other_share, steal_share, rate, periods, cores)


def _read() -> tuple[float, dict[str, float], float, int, int | None]:
    """The counters now: time, CPU seconds of all cores by kind of use, own CPU seconds, own involuntary context
    switches, and number of throttled periods of the container's CPU limit (None if unknown)."""
    # Ended children count as part of this process.
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    lines = list[str]()
    with suppress(OSError):
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
    throttle_count = next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled ")), None)
    return time.perf_counter(), _ticks(), own_cpu_s, sum(usage.ru_nivcsw for usage in usages), throttle_count


def _ticks() -> dict[str, float]:
    """CPU seconds of all cores by kind of use (proc(5)), with guests in 'user'; {} if unknown."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    try:
        ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        hertz = os.sysconf("SC_CLK_TCK")
        return {name: int(value) / hertz for name, value in zip(names, ticks, strict=False)}
    except (OSError, ValueError, IndexError):
        return {}
