"""Environments of Python with other versions of some packages than this one has, for jobs of another toolchain.

Such an environment is a venv with these packages alone; all else is found where this process finds it.
"""

import fcntl
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginesmith.core.errors import InputError, UnavailableError, digest_of
from enginesmith.registry.store.files import make_folder, reachable

_PIN = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")


def parse_pins(texts: Sequence[str]) -> dict[str, str]:
    """{'onnxruntime': '1.32.0'} of ['onnxruntime==1.32.0']. Raises InputError for anything else than NAME==VERSION."""
    pins: dict[str, str] = {}
    for text in texts:
        match = _PIN.fullmatch(text)
        if match is None or pins.setdefault(plain_name(match[1]), match[2]) != match[2]:
            raise InputError(f"{text!r}: give each package once, with its version, as in onnxruntime==1.32.0")
    return pins


def plain_name(package: str) -> str:
    """A package's name as PEP 503 writes it: 'tensorrt-rtx' for 'tensorrt_rtx'."""
    return re.sub(r"[-_.]+", "-", package).lower()


def make_environment(pins: Mapping[str, str], folder: Path) -> Path:
    """The interpreter of an environment below `folder` with these versions, which pip installs if they are not there.

    Raises UnavailableError with pip's reason.
    """
    stdlib = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
    places = [
        place for place in sys.path if Path(place).is_dir() and ("-packages" in place or not place.startswith(stdlib))
    ]
    environment = folder / digest_of([sys.version, sys.executable, places, dict(sorted(pins.items()))])[:16]
    if not environment.exists():
        with reachable(f"making an environment in {folder}"):
            make_folder(folder)
            part = environment.with_name(f"{environment.name}.part")
            with (folder / ".lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not environment.exists():
                    try:
                        venv.create(part, clear=True, symlinks=True)  # what a killed process left goes
                        _install(part, places, pins)
                        part.rename(environment)
                    finally:
                        shutil.rmtree(part, ignore_errors=True)
    return environment / "bin" / "python"


def _install(environment: Path, places: Sequence[str], pins: Mapping[str, str]) -> None:
    bases = {"base": str(environment), "platbase": str(environment)}
    behind = Path(sysconfig.get_path("purelib", "venv", bases)) / "behind.pth"
    behind.write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in places), encoding="utf-8")
    words = [f"{name}=={version}" for name, version in pins.items()]
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-input"]
    process = subprocess.run(
        [*command, "--quiet", "--disable-pip-version-check", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit status {process.returncode}"
        if broken := re.search(r"connection broken by .*: ([^']*)'", process.stderr):
            why = f"the package index cannot be reached ({broken[1]})"
        elif versions := re.search(r"\(from versions: ([^)]*)\)", process.stderr):
            newest = ", ".join(versions[1].split(", ")[-3:])
            why = f"there is no such version; the newest that pip finds are {newest}"
        raise UnavailableError(
            f"pip cannot install {', '.join(words)}: {why}; install it yourself, and give that interpreter as --python"
        )
