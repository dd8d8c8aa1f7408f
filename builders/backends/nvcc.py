"""NVIDIA's CUDA compiler on a host that needs no GPU: where it is, what it compiles for, and a cubin from source.

A cubin is an ELF file whose machine is EM_CUDA and whose flags name the generation, so that what came out can be held
to what was asked for. Layout of the flags: as CUDA 12 (ELF ABI version 7) and CUDA 13 (8) write them, observed.
"""

import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from enginery.core.errors import EngineryError, ModelError

INSTALL = (
    "install the CUDA toolkit with nvcc on PATH, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"
)
_EM_CUDA = 190
_ELF_ABI_VERSION, _ELF_MACHINE, _ELF_FLAGS = 8, 18, 48  # offsets into an ELF64 header
_LONGEST = 2000


@dataclass(frozen=True)
class Nvcc:
    """A compiler that was found. codes: generations it makes cubins for, as 'sm_89'."""

    path: Path
    version: str
    codes: frozenset[str]

    def cubin(self, source: str, sm: str, workdir: Path, *, fast_math: bool) -> bytes:
        """CUDA C++ compiled for one generation.

        fast_math: whether division, square roots and denormals may be approximate (nvcc's --use_fast_math).
        Raises ModelError with nvcc's words when it does not compile, EngineryError when something else came out.
        """
        code, made = workdir / "kernels.cu", workdir / f"kernels.{sm}.cubin"
        code.write_text(source)
        fast = ["--use_fast_math"] if fast_math else []
        command = [str(self.path), "-cubin", "-O3", f"-arch={sm}", "-std=c++17", *fast, "-o", str(made), str(code)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=workdir, check=False)
        if ended.returncode or not made.exists():
            words = " ".join((ended.stderr or ended.stdout).split())[:_LONGEST]
            raise ModelError(f"nvcc {self.version} does not compile the kernels for {sm}: {words}; use another backend")
        data = made.read_bytes()
        if generation(data) != sm:
            raise EngineryError(f"nvcc {self.version} made code for {generation(data)}, not for {sm}; reinstall it")
        return data


def generation(cubin: bytes) -> str | None:
    """The generation that a cubin is for, 'sm_89'; None for bytes that are no cubin."""
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64 or struct.unpack_from("<H", cubin, _ELF_MACHINE)[0] != _EM_CUDA:
        return None
    flags: int = struct.unpack_from("<I", cubin, _ELF_FLAGS)[0]
    return f"sm_{flags >> 8 & 0xFF if cubin[_ELF_ABI_VERSION] >= 8 else flags & 0xFF}"


def find_nvcc() -> Nvcc | None:
    """The compiler on PATH, else the one that wheels brought; None where there is none that answers."""
    path = shutil.which("nvcc") or next(iter(_from_wheels()), None)
    return None if path is None else _query_nvcc(Path(path), Path(path).stat().st_mtime_ns)


def _from_wheels() -> list[Path]:
    found = (place for entry in sys.path if entry for place in Path(entry).glob("nvidia/cu*/bin/nvcc"))
    return sorted(found, reverse=True)


@lru_cache
def _query_nvcc(path: Path, _changed_ns: int) -> Nvcc | None:
    said = _run_nvcc(path, "--version")
    found = re.search(r"release [\d.]+, V([\d.]+)", said)
    return Nvcc(path, found[1], frozenset(_run_nvcc(path, "--list-gpu-code").split())) if found else None


def _run_nvcc(path: Path, option: str) -> str:
    try:
        return subprocess.run([str(path), option], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
