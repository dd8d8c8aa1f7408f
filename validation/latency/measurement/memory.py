"""Resident memory of this process: now, and at its peak since it was last asked to forget it (proc(5))."""

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """What this process holds in memory now; 0 where the system does not say."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The most that it held since `forget_peak`, or since it was started."""
    return _field("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> bool:
    """Let the peak count from now on; False where the system refuses, and the peak stays that of the whole life."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
