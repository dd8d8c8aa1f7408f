"""Real GPU code in TVM's engines, made on a host without a GPU, and the proof that it is in there.

TVM puts a kernel's compiled code into an engine by its CUDA runtime. That library needs the driver's (libcuda.so.1) and
CUDA's (libcudart); where either is missing it is not loaded, and TVM packs the kernels' source text without a word.
So the runtime is loaded here, over a stand-in for libcuda where there is no driver: every function of it answers "no
device". TVM's own call of a compiler (which reads environment variables, and approximates) is replaced by one of nvcc
that makes a cubin and looks at it; and the engine must hold those very bytes.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

from builders.backends.nvcc import INSTALL, Nvcc, find_nvcc, generation
from enginery.core.errors import EngineryError

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_FACTORY = "ffi.Module.create.cuda"
_CALLBACK = "tvm_callback_cuda_compile"
_DRIVER = "libcuda.so.1"
# As they stand in a library's table of names. What else a driver is asked for before anything: `hardware.cuda`, cudart.
_DRIVER_CALL, _CUDART = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)"), re.compile(rb"(?<=\0)libcudart\.so\.\d+(?=\0)")
_ALWAYS = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetErrorName")


class CubinCompiler:
    """Compiles TVM's kernels for one generation from now on, for this process, and keeps what came out."""

    def __init__(self, sm: str, workdir: Path, *, fast_math: bool) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            raise EngineryError(f"TVM's GPU code is compiled by nvcc, and there is none; {INSTALL}")
        load_cuda_runtime(workdir, nvcc)
        self._nvcc, self._sm, self._workdir, self._fast_math = nvcc, sm, workdir, fast_math
        self.made: list[bytes] = []
        import tvm_ffi

        tvm_ffi.register_global_func(_CALLBACK, self._compile, override=True)

    def check_packed(self, engine: Path) -> None:
        """Raise EngineryError unless the engine holds every cubin that was made, and at least one."""
        data = engine.read_bytes()
        if not self.made or any(generation(cubin) != self._sm or cubin not in data for cubin in self.made):
            raise EngineryError(
                f"TVM packed no code for {self._sm} into {engine.name} but its source text; reinstall apache-tvm"
            )

    def _compile(self, source: str) -> bytes:
        made = self._nvcc.cubin(source, self._sm, self._workdir, fast_math=self._fast_math)
        self.made.append(made)
        return made


def load_cuda_runtime(workdir: Path, nvcc: Nvcc) -> None:
    """Have TVM's CUDA runtime in this process. Raises EngineryError where it does not load, with what it lacks."""
    import tvm

    if tvm.get_global_func(_FACTORY, allow_missing=True):
        return
    library = _library(Path(tvm.__file__).parent)
    try:
        if not _loads(_DRIVER):
            ctypes.CDLL(str(_stand_in(library, workdir)), mode=ctypes.RTLD_GLOBAL)
        _load_cudart(library, nvcc)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EngineryError(f"TVM's CUDA runtime does not load: {error}; {INSTALL}") from error
    if not tvm.get_global_func(_FACTORY, allow_missing=True):
        raise EngineryError(f"{library.name} of apache-tvm has no CUDA runtime in it; reinstall apache-tvm")


def _library(package: Path) -> Path:
    found = sorted(package.glob("**/libtvm_runtime_cuda.so"))
    if not found:
        raise EngineryError("this apache-tvm has no CUDA runtime; pip install 'apache-tvm>=0.27' (Linux, x86-64)")
    return found[0]


def _load_cudart(library: Path, nvcc: Nvcc) -> None:
    """CUDA's runtime library, of the version that `library` asks for, from wherever a toolkit is."""
    name = _find_names(_CUDART, library)[0]
    if _loads(name):
        return
    homes = [Path(entry) for entry in sys.path if entry]
    places = [place for home in homes for place in home.glob("nvidia/*/lib")]
    places += [nvcc.path.resolve().parents[1] / lib for lib in ("lib64", "lib")] + [Path("/usr/local/cuda/lib64")]
    found = next((place / name for place in places if (place / name).exists()), name)  # else the loader says what lacks
    ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)


def _stand_in(library: Path, workdir: Path) -> Path:
    """A libcuda.so.1 with every function that `library` takes from it; each answers that there is no device."""
    names = sorted({*_find_names(_DRIVER_CALL, library), *_ALWAYS})
    source, made = workdir / "no_device.c", workdir / _DRIVER
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names))
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "c++", "g++"))), "cc")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_DRIVER}", "-x", "c", str(source), "-o", str(made)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EngineryError(f"{compiler} cannot make a library: {ended.stderr.strip()[-500:]}; install gcc")
    return made


def _find_names(pattern: re.Pattern[bytes], library: Path) -> list[str]:
    return [name.decode() for name in pattern.findall(library.read_bytes())]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
