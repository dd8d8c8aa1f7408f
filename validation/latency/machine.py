"""What latencies hold for, besides the engine: the kind of machine, without its name.

What else the machine did while something was measured: evidence beside the numbers, for whoever reads them.

Linux only (/proc, /sys/fs/cgroup); elsewhere what is not known is None. In a container /proc/stat is the host's, so
"others" are everybody on it.
"""

import os
import platform
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

from enginery.core.hardware.cuda import gpus
from enginery.core.hardware.targets import cpu_name, this_kind
from enginery.core.reports.latency import MachineKind, SystemLoad


def machine() -> MachineKind:
    """CPU, its kind and cores, and the GPUs. Two machines that say the same are taken for equally fast."""
    products = tuple(sorted({gpu.name for gpu in gpus()}))
    return MachineKind(cpu_name(), this_kind().name, os.cpu_count(), platform.system(), products)


@dataclass
class SystemLoadMonitor:
    """Reads the counters when it is made, and their differences on `stop`."""

    _begun: tuple[float, dict[str, float], float, int, int | None] = field(default_factory=lambda: _read())

    def stop(self) -> SystemLoad:
        """What happened since."""
        start, ticks, own, switches, throttled = self._begun
        end, ticks_end, own_end, switches_end, throttled_end = _read()
        seconds, cores = max(end - start, 1e-9), os.cpu_count() or 1
        others = steal = None
        spent = {name: ticks_end[name] - ticks[name] for name in ticks_end if name in ticks}
        if spent and (total := sum(spent.values())) > 0:
            stolen = spent.get("steal", 0.0)
            busy = total - spent.get("idle", 0.0) - spent.get("iowait", 0.0) - stolen
            others = min(max(busy - (own_end - own), 0.0) / total, 1.0)
            steal = stolen / total
        periods = None if throttled is None or throttled_end is None else throttled_end - throttled
        rate = (switches_end - switches) / seconds
        return SystemLoad(seconds, _load(), others, steal, rate, periods, cores)


def _read() -> tuple[float, dict[str, float], float, int, int | None]:
    # Processes that were started here and have ended are no others.
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return time.perf_counter(), _ticks(), own, sum(usage.ru_nivcsw for usage in usages), _read_throttled()


def _ticks() -> dict[str, float]:
    """Seconds of all cores by kind (proc(5)); guests' are part of user's."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        hertz = os.sysconf("SC_CLK_TCK")
        return {name: int(value) / hertz for name, value in zip(names, first, strict=False)}
    except (OSError, ValueError, IndexError):
        return {}


def _read_throttled() -> int | None:
    try:
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled ")), None)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
