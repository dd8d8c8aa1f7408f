"""What latencies hold for, besides the engine: the kind of machine, without its name."""

import os
import platform
from pathlib import Path
from typing import Any

from builders.cuda import gpus
from builders.onnxruntime import cpu_kind


def machine() -> dict[str, Any]:
    """CPU, its kind and cores, and the GPUs. Two machines that say the same are taken for equally fast."""
    found = {"cpu": _cpu_name(), "kind": cpu_kind(), "cores": os.cpu_count(), "system": platform.system()}
    return {**found, "gpus": sorted({gpu.name for gpu in gpus()})}


def machine_text(told: Any) -> str:
    """One line for people."""
    return ", ".join([f"{told['cpu']} ({told['kind']}), {told['cores']} cores", *told["gpus"]])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
