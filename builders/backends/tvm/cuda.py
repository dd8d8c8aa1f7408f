"""GPU code in TVM's engines, compiled by NVIDIA's nvcc on a host without a GPU, and the check that it is in there.

TVM puts a kernel's compiled code into an engine by its CUDA runtime. That library needs the driver's (libcuda.so.1) and
CUDA's (libcudart); where either is missing it is not loaded, and TVM packs the kernels' source text without a message.
So the runtime is loaded here, over a stand-in for libcuda where there is no driver, each of whose functions returns "no
device". TVM's own call of a compiler (which reads environment variables, and approximates) is replaced by one of nvcc
that makes a cubin and checks its generation; and the engine must contain the bytes of that cubin.

A cubin is an ELF file whose machine is EM_CUDA and whose flags name the generation. Layout of the flags: as CUDA 12
(ELF ABI version 7) and CUDA 13 (8) write them, observed.
"""

import ctypes
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.text import run_command

INSTALL = (
    "install the CUDA toolkit with nvcc on PATH, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"
)
_EM_CUDA = 190
_ELF_ABI_VERSION, _ELF_MACHINE, _ELF_FLAGS = 8, 18, 48  # offsets into an ELF64 header
_LONGEST = 2000
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_FACTORY = "ffi.Module.create.cuda"
_CALLBACK = "tvm_callback_cuda_compile"
_DRIVER = "libcuda.so.1"
# Names in a library's table of names, and functions of the driver that `hardware.cuda` and cudart call first of all.
_DRIVER_CALL, _CUDART = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)"), re.compile(rb"(?<=\0)libcudart\.so\.\d+(?=\0)")
_ALWAYS = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetErrorName")


@dataclass(frozen=True)
class Nvcc:
    """An installed nvcc. codes: the generations that it makes cubins for, as 'sm_89'."""

    path: Path
    version: str
    codes: frozenset[str]

    def cubin(self, source: str, sm: str, workdir: Path) -> bytes:
        """CUDA C++ compiled for one generation, with exact arithmetic (TVM's own default is --use_fast_math).

        Raises ModelError with nvcc's words when it does not compile, EnginesmithError when something else came out.
        """
        code, cubin_path = workdir / "kernels.cu", workdir / f"kernels.{sm}.cubin"
        code.write_text(source)
        command = [
            str(self.path),
            "-cubin",
            "-O3",
            f"-arch={sm}",
            "-std=c++17",
            "-o",
            str(cubin_path),
            str(code),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=workdir, check=False)
        if ended.returncode or not cubin_path.exists():
            words = " ".join((ended.stderr or ended.stdout).split())[:_LONGEST]
            raise ModelError(f"nvcc {self.version} does not compile the kernels for {sm}: {words}; use another backend")
        data = cubin_path.read_bytes()
        if generation(data) != sm:
            raise EnginesmithError(f"nvcc {self.version} made code for {generation(data)}, not for {sm}; reinstall it")
        return data


def generation(cubin: bytes) -> str | None:
    """The generation that a cubin is for, 'sm_89'; None for bytes that are no cubin."""
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64 or struct.unpack_from("<H", cubin, _ELF_MACHINE)[0] != _EM_CUDA:
        return None
    flags: int = struct.unpack_from("<I", cubin, _ELF_FLAGS)[0]
    return f"sm_{flags >> 8 & 0xFF if cubin[_ELF_ABI_VERSION] >= 8 else flags & 0xFF}"


def find_nvcc() -> Nvcc | None:
    """The compiler on PATH, else the newest one of a wheel; None where there is none that tells its version."""
    wheels = (place for entry in sys.path if entry for place in Path(entry).glob("nvidia/cu*/bin/nvcc"))
    path = shutil.which("nvcc") or max(wheels, default=None)
    return None if path is None else _query_nvcc(Path(path), Path(path).stat().st_mtime_ns)


@lru_cache
def _query_nvcc(path: Path, _changed_ns: int) -> Nvcc | None:
    said = _run_nvcc(path, "--version")
    match = re.search(r"release [\d.]+, V([\d.]+)", said)
    return Nvcc(path, match[1], frozenset(_run_nvcc(path, "--list-gpu-code").split())) if match else None


def _run_nvcc(path: Path, option: str) -> str:
    try:
        return run_command([str(path), option], 30.0, stderr=subprocess.DEVNULL).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""


class CubinCompiler:
    """Compiles the kernels of all TVM builds in this process for one generation from now on. made: their cubins."""

    def __init__(self, sm: str, workdir: Path) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            raise EnginesmithError(f"TVM's GPU code is compiled by nvcc, and there is none; {INSTALL}")
        load_cuda_runtime(workdir, nvcc)
        self._nvcc, self._sm, self._workdir = nvcc, sm, workdir
        self.made: list[bytes] = []
        import tvm_ffi

        tvm_ffi.register_global_func(_CALLBACK, self._compile, override=True)

    def check_packed(self, engine: Path) -> None:
        """Raise EnginesmithError unless the engine holds every cubin that was made, and at least one."""
        data = engine.read_bytes()
        if not self.made or any(generation(cubin) != self._sm or cubin not in data for cubin in self.made):
            raise EnginesmithError(
                f"TVM packed no code for {self._sm} into {engine.name} but its source text; reinstall apache-tvm"
            )

    def _compile(self, source: str) -> bytes:
        cubin = self._nvcc.cubin(source, self._sm, self._workdir)
        self.made.append(cubin)
        return cubin


def load_cuda_runtime(workdir: Path, nvcc: Nvcc) -> None:
    """Load TVM's CUDA runtime into this process. Raises EnginesmithError with what it lacks where it does not load."""
    import tvm

    if tvm.get_global_func(_FACTORY, allow_missing=True):
        return
    libraries = sorted(Path(tvm.__file__).parent.glob("**/libtvm_runtime_cuda.so"))
    if not libraries:
        raise EnginesmithError("this apache-tvm has no CUDA runtime; pip install 'apache-tvm>=0.27' (Linux, x86-64)")
    library = libraries[0]
    try:
        if not _loads(_DRIVER):
            ctypes.CDLL(str(_stand_in(library, workdir)), mode=ctypes.RTLD_GLOBAL)
        _load_cudart(library, nvcc)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EnginesmithError(f"TVM's CUDA runtime does not load: {error}; {INSTALL}") from error
    if not tvm.get_global_func(_FACTORY, allow_missing=True):
        raise EnginesmithError(f"{library.name} of apache-tvm has no CUDA runtime in it; reinstall apache-tvm")


def _load_cudart(library: Path, nvcc: Nvcc) -> None:
    """Load CUDA's runtime library of the version that `library` needs, from a wheel or a toolkit."""
    name = _find_names(_CUDART, library)[0]
    if _loads(name):
        return
    homes = [Path(entry) for entry in sys.path if entry]
    places = [place for home in homes for place in home.glob("nvidia/*/lib")]
    places += [nvcc.path.resolve().parents[1] / lib for lib in ("lib64", "lib")] + [Path("/usr/local/cuda/lib64")]
    cudart_path = next(
        (place / name for place in places if (place / name).exists()), name
    )  # else the loader says what lacks
    ctypes.CDLL(str(cudart_path), mode=ctypes.RTLD_GLOBAL)


def _stand_in(library: Path, workdir: Path) -> Path:
    """A libcuda.so.1 with every function that `library` needs of it; each returns that there is no device."""
    names = sorted({*_find_names(_DRIVER_CALL, library), *_ALWAYS})
    source, stub_path = workdir / "no_device.c", workdir / _DRIVER
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names))
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "c++", "g++"))), "cc")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}", "-x", "c", str(source), "-o", str(stub_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EnginesmithError(f"{compiler} cannot make a library: {ended.stderr.strip()[-500:]}; install gcc")
    return stub_path


def _find_names(pattern: re.Pattern[bytes], library: Path) -> list[str]:
    return [name.decode() for name in pattern.findall(library.read_bytes())]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
