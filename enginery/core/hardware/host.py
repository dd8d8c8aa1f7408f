"""The machine that did a piece of work, as reports and manifests name it."""

import os
import platform

from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.types import CPU_KIND


def describe_host() -> dict[str, str]:
    """Name, system, machine, number of CPUs and their kind, and the version of Python."""
    return {
        CPU_KIND: this_kind().name,
        "name": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
    }
