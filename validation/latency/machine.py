"""What latencies hold for, besides the engine: the kind of machine, without its name."""

import os
import platform

from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.cpu_levels import cpu_name
from enginery.core.hardware.cuda import gpus
from enginery.core.reports.latency import MachineKind


def machine() -> MachineKind:
    """CPU, its kind and cores, and the GPUs. Two machines that say the same are taken for equally fast."""
    products = tuple(sorted({gpu.name for gpu in gpus()}))
    return MachineKind(cpu_name(), this_kind().name, os.cpu_count(), platform.system(), products)
