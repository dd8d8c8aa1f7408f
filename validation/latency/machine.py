"""What latencies hold for, besides the engine: the kind of machine, without its name."""

import os
import platform

from builders.cpu_kinds import this_kind
from builders.cpu_levels import cpu_name
from builders.cuda import gpus
from validation.latency.report import MachineKind


def machine() -> MachineKind:
    """CPU, its kind and cores, and the GPUs. Two machines that say the same are taken for equally fast."""
    products = tuple(sorted({gpu.name for gpu in gpus()}))
    return MachineKind(cpu_name(), this_kind().name, os.cpu_count(), platform.system(), products)
