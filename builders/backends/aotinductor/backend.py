"""AOTInductor: PyTorch's own compiler, ahead of time, into one `.pt2` package that runs without the model's code.

It compiles the ONNX model as a torch program (`builders.onnx_torch`), with a dynamic dimension for each named one, from
the least to the greatest size of all profiles. It generates C++ for the CPU (Triton for GPUs) and needs a C++ compiler
for both.

Native code for a CPU runs only on CPUs that have its instructions. It is built for a level of x86-64, v3 (AVX2) or v4
(AVX-512), never for "native". The level is part of the toolchain, hence of the build key, and an engine is refused
where the CPU lacks it. The code checks no bounds: the session checks every shape before it is run.

GPUs: the code path is written, for a torch with CUDA on a machine that has the GPU. Never run.
"""

import json
import re
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from builders.backends import request_checks
from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import versions_of
from builders.execution.local import require_plain
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware import cpu_kinds, cuda
from enginesmith.core.hardware.cpu_kinds import HOST, host_level, level_of
from enginesmith.core.requirements import Instructions, Requirement, for_target, same_versions
from enginesmith.core.text import DAMAGED, run_command
from enginesmith.core.types import (
    BLOCK_FLOATS,
    NARROW_FLOATS,
    BuildRequest,
    Engine,
    QuantizationScheme,
    Session,
    Target,
    Untyped,
)

_INSTRUCTIONS = {"x86-64-v3": "VecAVX2", "x86-64-v4": "VecAVX512"}  # Inductor's names
_AVX2 = "AOTInductor needs x86-64 with AVX2"
_NO_DTYPE = ("uint16", "uint32", "uint64", "complex64", "complex128", "str", "object")
_MODEL = "model"  # the one model of a package
_FAULTS = "enginesmith_lookups"  # key of its metadata: the faults that its last output tells of, in words
# The members of a package that was built here; torch would unpickle what lies in other folders.
_MEMBERS = re.compile(
    r"[\w.-]+/(archive_format|archive_version|byteorder|version|\.format_version|\.data/[\w.-]+|"
    rf"data/aotinductor/{_MODEL}/[\w.-]+)"
)


@dataclass(frozen=True)
class AotInductor:
    """The AOTInductor backend.

    cpu: the level of x86-64 that the code is for, 'x86-64-v3' or 'x86-64-v4'; 'host' is the highest that this CPU has.
    threads: of the loops that it generates, fixed in the engine; 0 leaves it to the process that runs it.
    freeze: compute once, while building, what only weights go into: packed, transposed and dequantized ones.
    max_autotune: time several kernels for each matrix product while building, and keep the fastest.
    compiler: the C++ compiler's command, GCC's or Clang's.
    """

    name: ClassVar[str] = "aotinductor"
    revision: ClassVar[int] = 4
    install: ClassVar[str] = "pip install '.[export]' in a clone, and a C++ compiler (apt-get install g++)"
    runtime: ClassVar[str] = "torch"
    # That of onnxruntime, so that both compile one graph.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="budget", tunes_on_target=True, options=SharedOptions(cpu_level="cpu")
    )

    cpu: str = "host"
    threads: int = 0
    freeze: bool = True
    max_autotune: bool = False
    compiler: str = "g++"

    def __post_init__(self) -> None:
        request_checks.check_choice(self, "cpu", (HOST, *_INSTRUCTIONS))
        request_checks.check_not_negative(self, "threads", "leaves the number to the process that runs the engine")

    def serves(self, target: Target) -> bool:  # noqa: ARG002 - the protocol's
        """CPUs and GPUs."""
        return True

    def versions(self) -> dict[str, str]:
        """Versions of torch and the C++ compiler, and the level of x86-64 that the code is for."""
        if not (package_versions := versions_of("torch")):
            return {}
        compiler = compiler_version(self.compiler)
        return {**package_versions, "cpu": self._level(), **({"c++": compiler} if compiler else {})}

    def refuses(self, request: BuildRequest) -> str | None:
        """Why a request cannot be built: FP8 on a CPU, a block format, an I/O type, shape or CPU that is not supported,
        a GPU if torch has no CUDA, a machine without AVX2, no torch or no C++ compiler. None if it can."""
        versions = self.versions()
        if not versions:
            return f"torch is not installed; {self.install}"
        if request.target.is_cpu and request.precision in NARROW_FLOATS:
            return f"CPUs have no {request.precision.upper()} arithmetic; use int8"
        if request.precision in BLOCK_FLOATS:
            return f"torch has no operators for {request.precision} graphs; use fp8, or tensorrt-rtx"
        if not request.target.is_cpu and "+cpu" in versions["torch"]:
            return (
                f"torch {versions['torch']} has no CUDA; install one that has, on a node with {request.target.name}, "
                "or use tensorrt-rtx"
            )
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype in _NO_DTYPE:
                return f"{spec.name!r} is {spec.dtype}, which torch has no operators for; cast it to int64 or float32"
        if versions["cpu"] not in _INSTRUCTIONS:
            return f"{_AVX2}, but this machine is {versions['cpu']}; use onnxruntime"
        if "c++" not in versions:
            remedy = "apt-get install g++, or set backends.aotinductor.compiler"
            return f"there is no C++ compiler {self.compiler!r}; {remedy}"
        if request.target.is_cpu and level_of(request) not in _INSTRUCTIONS:
            return f"{_AVX2}, but the target {request.target.name} lacks it; use onnxruntime"
        return cpu_kinds.refusal(request, "AOTInductor") or request_checks.refusal(request, "AOTInductor")

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The target's processor, the CPU's instructions (for a GPU too), and the torch that built the engine; the C++
        compiler is not required."""
        torch = same_versions(dict(request.toolchain), "torch")
        return (for_target(request.target), *torch, Instructions(level_of(request)))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.pt2.

        Raises ModelError, naming node and operator, for what the conversion to torch does not support (an operator, an
        attribute, a type), EnginesmithError with the compiler's message if the compilation fails, or with the reason if
        the target is a GPU whose engines cannot run here, and as `require_plain` does.
        """
        if not request.target.is_cpu and (reason := self.runs(request.target)):
            raise EnginesmithError(f"AOTInductor compiles on the GPU it builds for: {reason}")
        require_plain(workdir, "AOTInductor's compiler")
        path = workdir / "engine.pt2"
        with warnings.catch_warnings(action="ignore"):
            import torch
            from torch._inductor.utils import fresh_cache

            from builders.onnx_torch import to_guarded_program

            # A separate cache in the work folder: concurrent builds share none, and it is deleted with the folder.
            with fresh_cache(dir=str(workdir)), _instructions(level_of(request)):
                program, faults = to_guarded_program(model, request)
                if not request.target.is_cpu:
                    from torch.export.passes import move_to_device_pass

                    program = move_to_device_pass(program, "cuda")
                configs = {**self._configs(), "aot_inductor.metadata": {_FAULTS: json.dumps(faults)}}
                compile_package = torch._inductor.aoti_compile_and_package
                try:
                    with torch.no_grad():  # or freezing is passed over
                        compile_package(program, package_path=str(path), inductor_configs=configs)
                except Exception as error:  # exceptions of many modules, including the C++ compiler's
                    raise EnginesmithError(f"AOTInductor cannot compile the model: {_words(error)}") from error
        return Engine.of_file(self, request, path)

    def runs(self, target: Target) -> str | None:
        """Why engines for a GPU cannot run here: no CUDA in torch, or no such GPU. None if they can, and for CPUs."""
        if target.is_cpu:
            return None
        if "+cpu" in self.versions().get("torch", "+cpu"):
            return "torch has no CUDA on this machine"
        return cuda.explain_missing_gpu(target)

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load the engine, which is native code. Raises EnginesmithError where it is for another CPU, GPU or torch, or
        holds files that no package built here has."""
        from builders.backends.aotinductor.session import PackageSession

        check_compatible(self, engine)
        check_members(engine.path)
        with closing(PackageSession(engine, _MODEL, _FAULTS)) as session:
            yield session

    def _configs(self) -> dict[str, Untyped]:
        """All Inductor settings that affect the generated code, so that no environment variable affects it."""
        return {
            "aot_inductor.package_constants_in_so": True,
            "aot_inductor.precompile_headers": False,  # which pays from the second build in one cache on
            "compile_threads": 1,
            "cpp.cxx": (None, self.compiler),
            "cpp.dynamic_threads": self.threads == 0,
            "cpp.march": self._level(),
            "cpp.simdlen": None,
            "cpp.threads": self.threads or -1,
            "cpp.weight_prepack": False,  # in an order that oneDNN chooses for this very CPU
            "cpp.vec_isa_ok": True,  # it would compile and load a program to find out
            "freezing": self.freeze,
            "max_autotune": self.max_autotune,
        }

    def _level(self) -> str:
        return host_level() if self.cpu == HOST else self.cpu


def compiler_version(command: str) -> str | None:
    """The version that a C++ compiler reports, such as '12.2.0'; None if there is no `command`, or it reports none."""
    compiler_path = shutil.which(command)
    return None if compiler_path is None else _compiler_version(compiler_path, Path(compiler_path).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _compiler_version(path: str, _changed_ns: int) -> str | None:
    try:
        process = run_command([path, "-dumpfullversion", "-dumpversion"], 20.0, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.decode(errors="replace").strip() or None if process.returncode == 0 else None


def check_members(path: Path) -> None:
    """Raise EnginesmithError unless a package holds nothing but compiled code: torch might unpickle the rest."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except DAMAGED as error:
        raise EnginesmithError(f"{path.name} is not an AOTInductor package: {error}; build it again") from error
    for name in names:
        if not _MEMBERS.fullmatch(name):
            raise EnginesmithError(f"{path.name} holds {name!r}, which no AOTInductor engine contains; do not open it")


@contextmanager
def _instructions(level: str) -> Iterator[None]:
    """Have Inductor generate code for a level of x86-64; by default it uses VNNI and AMX where the host has them."""
    from torch._inductor import cpu_vec_isa

    if level not in _INSTRUCTIONS:
        raise EnginesmithError(f"{_AVX2}, and this machine is {level}")
    inductor: Untyped = cpu_vec_isa
    vec_isa = getattr(inductor, _INSTRUCTIONS[level])()
    original_list = inductor.valid_vec_isa_list
    inductor.valid_vec_isa_list = lambda: [vec_isa]
    try:
        yield
    finally:
        inductor.valid_vec_isa_list = original_list


def _words(error: Exception) -> str:
    """The first lines of the first cause: Inductor wraps an error several times."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6])[:2000] or type(error).__name__
