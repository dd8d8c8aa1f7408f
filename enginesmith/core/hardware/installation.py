"""Facts of an installation that the keys of torch's compile caches hold, by name; read without importing torch.

Inductor names a compiled kernel by its source and by the compiler's whole command line (torch 2.13,
`_inductor.codecache.CppCodeCache`), in which the folders of Python and torch stand; it compiles for `-march=native`;
and the probes of vector instructions are named by the C++ compiler's version. What it finds under no name it compiles.
"""

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from enginesmith.core.commands import run_command
from enginesmith.core.hardware.cpu_kinds import machine_flags

INSTRUCTIONS = "CPU instructions"
ABSENT = "absent"
# Of the flags of /proc/cpuinfo those that stand for instructions which compilers emit; the others come and go with the
# kernel and its mitigations.
_EMITTED = ("abm", "adx", "amx", "asimd", "avx", "bmi", "f16c", "fma", "gfni", "movbe", "popcnt", "sse", "ssse3", "sve")


def list_facts(cuda: bool) -> dict[str, str]:
    """The facts of this installation: name -> text, 'absent' where there is none. cuda: whether for code of a GPU."""
    from enginesmith.core.hardware.machine import driver_version

    readers: dict[str, Callable[[], str | None]] = {
        "Python": platform.python_version,
        "Python's headers": lambda: sysconfig.get_paths()["include"],
        "folder of torch": _find_torch,
        "C++ compiler": lambda: _describe_compiler(os.environ.get("CXX", "g++")),
        INSTRUCTIONS: lambda: " ".join(sorted(flag for flag in machine_flags() if flag.startswith(_EMITTED))),
    }
    if cuda:
        readers["driver"] = driver_version
    return {name: read() or ABSENT for name, read in readers.items()}


def _find_torch() -> str | None:
    found = find_spec("torch")
    return str(Path(found.origin).parent) if found and found.origin else None


@cache
def _describe_compiler(command: str) -> str | None:
    """The first line of what a compiler says of its version: 'g++ (Debian 12.2.0-14) 12.2.0'."""
    if (path := shutil.which(command)) is None:
        return None
    try:
        said = run_command([path, "--version"], 20.0, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.decode(errors="replace").partition("\n")[0].strip() or None if said.returncode == 0 else None
