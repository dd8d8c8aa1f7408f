"""What latencies hold for, besides the engine: the kind of machine, without its name."""

import os
import platform
from typing import Any

from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.cpu_levels import cpu_name
from enginery.core.hardware.cuda import gpus


def machine() -> dict[str, Any]:
    """CPU, its kind and cores, and the GPUs. Two machines that say the same are taken for equally fast."""
    found = {"cpu": cpu_name(), "kind": this_kind().name, "cores": os.cpu_count(), "system": platform.system()}
    return {**found, "gpus": sorted({gpu.name for gpu in gpus()})}


def machine_text(told: Any) -> str:
    """One line for people."""
    return ", ".join([f"{told['cpu']} ({told['kind']}), {told['cores']} cores", *told["gpus"]])
