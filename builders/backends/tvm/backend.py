"""Apache TVM: Relax compiled to a shared library, for CPUs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from builders.backends import request_checks
from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import versions_of
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.hardware import cpu_kinds
from enginesmith.core.hardware.cpu_kinds import HOST, LEVELS, host_level, level_of
from enginesmith.core.requirements import Instructions, Requirement, for_target, same_versions
from enginesmith.core.types import IN_BLOCKS, BuildRequest, Engine, Precision, QuantizationScheme, Session, Target

_TITLE = "TVM"
_DISTRIBUTIONS = ("apache-tvm", "apache-tvm-ffi")
_NO_LINKER = "TVM links its engines with a C++ compiler, and there is none; install g++"
# Precisions for which TVM 0.27 compiles no model, or only small ones; found by compiling.
_REFUSED_PRECISIONS: dict[Precision, str] = {
    "bf16": "TVM has normalizations for float32 and float16 only, not for bfloat16; use fp16 or fp32",
    "fp8": "TVM's ONNX importer takes no FP8 in QuantizeLinear; use int8",
    **dict.fromkeys(IN_BLOCKS, "TVM's ONNX importer takes no weights in blocks, and none in 4 bits; use int8"),
}


@dataclass(frozen=True)
class Tvm:
    """The TVM backend.

    cpu: the least CPU that an engine's own code runs on, as a level of x86-64 (`hardware.cpu_kinds`); 'host' is the
    highest level of the machine that plans the build.
    """

    name: ClassVar[str] = "tvm"
    revision: ClassVar[int] = 3
    install: ClassVar[str] = "pip install '.[tvm]' in a clone"
    runtime: ClassVar[str] = "tvm"
    # Symmetric int8, biases in floating point, the rest in fp32.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities(determinism="outputs", options=SharedOptions(cpu_level="cpu"))

    cpu: str = "x86-64-v3"

    def __post_init__(self) -> None:
        request_checks.check_choice(self, "cpu", (*LEVELS, HOST))

    def serves(self, target: Target) -> bool:
        """CPUs."""
        return target.is_cpu

    def versions(self) -> dict[str, str]:
        """Versions of compiler and runtime, and this CPU's level where it matters."""
        package_versions = versions_of(*_DISTRIBUTIONS, together=True)
        return {**package_versions, "cpu": host_level()} if package_versions and self.cpu == HOST else package_versions

    def refuses(self, request: BuildRequest) -> str | None:
        """Why a request cannot be built: a precision, CPU or shape not supported, no TVM, no linker. None if it can."""
        return (
            _REFUSED_PRECISIONS.get(request.precision)
            or request_checks.refusal(request, _TITLE)
            or cpu_kinds.refusal(request, _TITLE)
            or _empty_refusal(request)
            or request_checks.sum_refusal(request, _TITLE)
            or (None if self.versions() else f"TVM is not installed; {self.install}")
            or (None if shutil.which("c++") or shutil.which("g++") else _NO_LINKER)
        )

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The target's processor with its instructions, and exactly the versions that built the engine."""
        runtimes = same_versions(dict(request.toolchain), *_DISTRIBUTIONS)
        return (for_target(request.target), *runtimes, Instructions(level_of(request)))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.so. Raises ModelError with the node, its operator and TVM's words."""
        from builders.backends.tvm.compile import compile_model

        return Engine.of_file(self, request, compile_model(request, model, workdir))

    def runs(self, target: Target) -> str | None:
        """Why engines for a GPU cannot run; None for a CPU."""
        return None if target.is_cpu else "TVM's engines are for CPUs alone; choose another backend"

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load an engine. Raises as `check_compatible` does."""
        from builders.backends.tvm.compile import open_engine

        check_compatible(self, engine)
        with open_engine(engine) as session:
            yield session


def _empty_refusal(request: BuildRequest) -> str | None:
    """Why a request with dims that can be 0 is refused: TVM leaves sums over no rows unset, found by running."""
    empty_dim = next((dim for dim, (low, _) in request_checks.sizes(request).items() if low < 1), None)
    if empty_dim is None:
        return None
    return f"dims.{empty_dim}.min is 0, and TVM leaves sums over no rows unset: set it to 1, or use onnxruntime"
