"""A virtual environment of its own for the peers, which are no dependencies of this project.

It sees what is installed beside this process too, so that torch, onnx and onnxruntime are the same for both sides.
"""

import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from benchmarks.zoo.packages import FOLDER, KNOWN

ROOT = Path(__file__).resolve().parents[2]


@cache
def interpreter() -> Path:
    """The environment's Python; it is made, and filled by pip, where it is not there."""
    place = FOLDER / "peers"
    python = place / "bin" / "python"
    if not (place / "complete").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        inner_path = Path(sysconfig.get_path("purelib", "venv", {"base": str(place)}))
        (inner_path / "outside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *KNOWN["peers"]], check=True)
        (place / "complete").touch()
    return python


def run(module: str, *arguments: str, folder: Path, timeout_s: float = 1800) -> None:
    """Run a module of this project there, in `folder`, where peers leave files. Raises CalledProcessError or
    TimeoutExpired."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(interpreter()), "-m", module, *arguments]
    subprocess.run(command, cwd=folder, env=environ, check=True, timeout=timeout_s, stdout=sys.stderr)
