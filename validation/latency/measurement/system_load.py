"""What else the machine did while something was measured: evidence beside the numbers, for whoever reads them.

Linux only (/proc, /sys/fs/cgroup); elsewhere what is not known is None. In a container /proc/stat is the host's, so
"others" are everybody on it.
"""

import os
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Above these shares of all cores' time the machine counts as busy: used by others, and stolen by a hypervisor. Less
# than three ticks of the kernel's clock, of 10 ms each, is rounding: in the tenth of a second that a bucket takes, one
# tick is 5 % of two cores. Involuntary context switches are no sign: an engine's own threads switch each other away,
# once or twice a run (54,000 a second on two idle cores, onnxruntime, runs of 40 microseconds).
BUSY_OTHERS, BUSY_STEAL = 0.10, 0.01
_ROUNDING_S = 0.03


@dataclass(frozen=True)
class Surroundings:
    """One stretch of time. others: share of all cores' time that other processes used.  steal: share that a hypervisor
    took.  switches: involuntary context switches per second of this process and those that it started.  throttled:
    periods in which the control group's CPU quota was used up.  load: the load average over a minute, at the end."""

    seconds: float
    load: float | None
    others: float | None
    steal: float | None
    switches: float
    throttled: int | None
    cores: int

    @property
    def reasons(self) -> list[str]:
        """Why the machine counts as busy; nothing for a quiet one."""
        found = []
        if self._is_over(self.others, BUSY_OTHERS):
            found.append(f"other processes used {100 * (self.others or 0):.0f} % of the {self.cores} cores")
        if self._is_over(self.steal, BUSY_STEAL):
            found.append(f"the hypervisor took {100 * (self.steal or 0):.1f} % of the time")
        if self.throttled:
            found.append(f"its CPU quota was used up in {self.throttled} periods")
        return found

    def _is_over(self, share: float | None, limit: float) -> bool:
        return share is not None and share > limit and share * self.seconds * self.cores >= _ROUNDING_S

    def to_json(self) -> dict[str, Any]:
        """A JSON object, with `busy`: the reasons."""
        return {**asdict(self), "busy": self.reasons}


@dataclass
class Watch:
    """Reads the counters when it is made, and their differences on `stop`."""

    _begun: tuple[float, dict[str, float], float, int, int | None] = field(default_factory=lambda: _read())

    def stop(self) -> Surroundings:
        """What happened since."""
        start, ticks, own, switches, throttled = self._begun
        end, ticks_end, own_end, switches_end, throttled_end = _read()
        seconds, cores = max(end - start, 1e-9), os.cpu_count() or 1
        others = steal = None
        spent = {name: ticks_end[name] - ticks[name] for name in ticks_end if name in ticks}
        if spent and (total := sum(spent.values())) > 0:
            busy = total - spent["idle"] - spent["iowait"] - spent["steal"]
            others = min(max(busy - (own_end - own), 0.0) / total, 1.0)
            steal = spent["steal"] / total
        periods = None if throttled is None or throttled_end is None else throttled_end - throttled
        rate = (switches_end - switches) / seconds
        return Surroundings(seconds, _load(), others, steal, rate, periods, cores)


def _read() -> tuple[float, dict[str, float], float, int, int | None]:
    # Processes that were started here and have ended are no others.
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return time.perf_counter(), _ticks(), own, sum(usage.ru_nivcsw for usage in usages), _throttled()


def _ticks() -> dict[str, float]:
    """Seconds of all cores by kind (proc(5)); guests' are part of user's."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        hertz = os.sysconf("SC_CLK_TCK")
        return {name: int(value) / hertz for name, value in zip(names, first, strict=False)}
    except (OSError, ValueError, IndexError):
        return {}


def _throttled() -> int | None:
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
