"""Makes Python environments with other versions of some packages, for jobs of another toolchain.

Such an environment is a venv with these packages alone; all other modules are found where this process finds them.
"""

import fcntl
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from enginesmith.core.errors import InputError, UnavailableError, digest_of
from enginesmith.registry.store.files import make_folder, reachable

_PIN = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")
# The first words of pip's progress lines.
_STEPS = ("Collecting", "Processing", "Downloading", "Using cached", "Installing", "Successfully")


def parse_pins(texts: Sequence[str]) -> dict[str, str]:
    """{'onnxruntime': '1.32.0'} for ['onnxruntime==1.32.0']. Raises InputError unless each is NAME==VERSION, once."""
    pins: dict[str, str] = {}
    for text in texts:
        match = _PIN.fullmatch(text)
        if match is None or pins.setdefault(plain_name(match[1]), match[2]) != match[2]:
            raise InputError(f"{text!r}: give each package once, with its version, as in onnxruntime==1.32.0")
    return pins


def plain_name(package: str) -> str:
    """A package's name as PEP 503 writes it: 'tensorrt-rtx' for 'tensorrt_rtx'."""
    return re.sub(r"[-_.]+", "-", package).lower()


def make_environment(pins: Mapping[str, str], folder: Path, note: Callable[[str], object] = str) -> Path:
    """The interpreter of an environment in `folder` with these versions, which pip installs if they are missing.

    note: called with pip's progress lines, each with the seconds since the start. Raises UnavailableError with pip's
    reason.
    """
    stdlib = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
    paths = [
        entry for entry in sys.path if Path(entry).is_dir() and ("-packages" in entry or not entry.startswith(stdlib))
    ]
    environment = folder / digest_of([sys.version, sys.executable, paths, dict(sorted(pins.items()))])[:16]
    if not environment.exists():
        with reachable(f"making an environment in {folder}"):
            make_folder(folder)
            staging = environment.with_name(f"{environment.name}.part")
            with (folder / ".lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not environment.exists():
                    try:
                        venv.create(staging, clear=True, symlinks=True)  # clears what a killed process left
                        _install(staging, paths, pins, note)
                        staging.rename(environment)
                    finally:
                        shutil.rmtree(staging, ignore_errors=True)
    return environment / "bin" / "python"


def _install(environment: Path, places: Sequence[str], pins: Mapping[str, str], note: Callable[[str], object]) -> None:
    base_vars = {"base": str(environment), "platbase": str(environment)}
    path_file = Path(sysconfig.get_path("purelib", "venv", base_vars)) / "behind.pth"
    path_file.write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in places), encoding="utf-8")
    requirements = [f"{name}=={version}" for name, version in pins.items()]
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-input"]
    name, began = f"environment with {', '.join(requirements)}", time.monotonic()
    note(f"{name}: venv was made, pip begins")
    with subprocess.Popen(
        [*command, "--disable-pip-version-check", "--progress-bar=off", *requirements],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        lines = []
        try:
            for line in filter(None, map(str.strip, process.stdout or ())):
                lines.append(line)
                if line.startswith(_STEPS):
                    note(f"{name}: {line} ({time.monotonic() - began:.0f} s)")
        except BaseException:  # leaving the context only waits for pip
            process.kill()
            raise
    if process.returncode:
        reason, output = lines[-1] if lines else f"exit status {process.returncode}", "\n".join(lines)
        if connection_match := re.search(r"connection broken by .*: ([^']*)'", output):
            reason = f"the package index cannot be reached ({connection_match[1]})"
        elif versions_match := re.search(r"\(from versions: ([^)]*)\)", output):
            newest_text = ", ".join(versions_match[1].split(", ")[-3:])
            reason = f"there is no such version; the newest that pip finds are {newest_text}"
        raise UnavailableError(
            f"pip cannot install {', '.join(requirements)}: {reason}; install it yourself, and give the "
            "interpreter that has it as --python"
        )
