"""IREE: a model as one file of bytecode and native code (`.vmfb`), for CPUs and, with PTX in it, for GPUs.

The model goes through IREE's ONNX importer and `iree-compile`, a program of its own whose crash is an error here.
Dynamic dimensions stay dynamic: one engine holds all profiles. An engine for a GPU holds PTX, which the driver compiles
when the engine is loaded; none was ever run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from builders.backends import request_checks
from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import versions_of
from builders.execution.local import require_plain
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.hardware import cpu_kinds, cuda
from enginesmith.core.hardware.cpu_kinds import HOST, LEVELS, host_level, level_of
from enginesmith.core.requirements import Instructions, Requirement, for_target, same_versions
from enginesmith.core.types import IN_BLOCKS, BuildRequest, Engine, QuantizationScheme, Session, Target

_TITLE = "IREE"
_DISTRIBUTIONS = ("iree-base-compiler", "iree-base-runtime")
# Generations whose PTX `iree-compile` 3.13 makes; of the others it says "missing GPU target".
_CAPABILITIES = {(7, 5), (8, 0), (8, 6), (8, 9), (12, 0)}
# By default IREE takes dynamic sizes of operands for equal and drops the checks of it when it optimizes (a row that is
# broadcast over a batch silently computes something else), and computes doubles in single precision.
_AS_WRITTEN = (
    "--iree-torch-use-strict-symbolic-shapes=false",
    "--iree-opt-strip-assertions=false",
    "--iree-input-demote-f64-to-f32=false",
)


@dataclass(frozen=True)
class Iree:
    """The IREE backend.

    cpu: the least CPU that an engine for `cpu` runs on, as a level of x86-64 (`hardware.cpu_kinds`); 'host' is the
    highest level of the machine that plans the build.
    optimization: IREE's global level, 'O0' to 'O3'.
    multithreaded: whether such an engine is run by a thread per core, or by the caller's alone.
    """

    name: ClassVar[str] = "iree"
    revision: ClassVar[int] = 4
    install: ClassVar[str] = "pip install '.[iree]' in a clone"
    runtime: ClassVar[str] = "iree.runtime"
    # Symmetric int8, biases in floating point, the rest in fp32.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities(determinism="bytes", options=SharedOptions(cpu_level="cpu"))

    cpu: str = "x86-64-v3"
    optimization: str = "O2"
    multithreaded: bool = True

    def __post_init__(self) -> None:
        request_checks.check_choice(self, "cpu", (*LEVELS, HOST))
        request_checks.check_choice(self, "optimization", ("O0", "O1", "O2", "O3"))

    def serves(self, target: Target) -> bool:  # noqa: ARG002 - both kinds
        """CPUs and GPUs."""
        return True

    def versions(self) -> dict[str, str]:
        """Versions of compiler and runtime, and this CPU's level where the engine depends on it."""
        package_versions = versions_of(*_DISTRIBUTIONS, together=True)
        return {**package_versions, "cpu": host_level()} if package_versions and self.cpu == HOST else package_versions

    def refuses(self, request: BuildRequest) -> str | None:
        """Why a request cannot be built: a GPU, CPU, precision or shape not supported, or no IREE. None if it can."""
        return (
            _target_refusal(request)
            or request_checks.refusal(request, _TITLE)
            or cpu_kinds.refusal(request, _TITLE)
            or (None if self.versions() else f"IREE is not installed; {self.install}")
        )

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The target's processor, a CPU's instructions, and exactly the versions that built the engine."""
        instructions = (Instructions(level_of(request)),) if request.target.is_cpu else ()
        return (for_target(request.target), *same_versions(dict(request.toolchain), *_DISTRIBUTIONS), *instructions)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.vmfb.

        Raises ModelError with the node, its operator and IREE's words, and as `require_plain`.
        """
        from builders.backends.iree.compile import compile_model

        require_plain(workdir, "IREE")
        if not request.target.is_cpu:
            device = ["--iree-hal-target-device=cuda", f"--iree-cuda-target={request.target.sm}"]
        else:
            device = [
                "--iree-hal-target-device=local",
                "--iree-hal-local-target-device-backends=llvm-cpu",
                f"--iree-llvmcpu-target-cpu={level_of(request)}",
                "--iree-llvmcpu-debug-symbols=false",  # they contain addresses of the compiler itself
            ]
        path = compile_model(model, workdir, [*device, f"--iree-opt-level={self.optimization}", *_AS_WRITTEN])
        return Engine.of_file(self, request, path)

    def runs(self, target: Target) -> str | None:
        """Why engines for a GPU cannot run here: no GPU of that compute capability. None if they can, and for CPUs."""
        return cuda.explain_missing_gpu(target)

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load an engine. Raises as `check_compatible` does. Never run on a GPU."""
        from builders.backends.iree.compile import open_engine

        check_compatible(self, engine)
        target = engine.request.target
        cpu_driver = "local-task" if self.multithreaded else "local-sync"
        device = cpu_driver if target.is_cpu else f"cuda://{cuda.index_of(target.compute_capability)}"
        with open_engine(engine, device) as session:
            yield session


def _target_refusal(request: BuildRequest) -> str | None:
    """GPUs that IREE 3.13 has no code for, and precisions for which it compiles no models, or only small ones; found by
    compiling."""
    target = request.target
    if not target.is_cpu and target.compute_capability not in _CAPABILITIES:
        return f"IREE makes no code for {target.sm}; use tvm, or tensorrt on a node with that GPU"
    if request.precision == "bf16" and target.is_cpu:
        return "IREE compiles bfloat16 for CPUs only in part (it calls conversions that it lacks); use fp32"
    if request.precision == "int8-dynamic" and not target.is_cpu:
        return "IREE compiles MatMulInteger for CPUs only; use int8 with calibration"
    if request.precision == "fp8":
        return "IREE compiles no conversion from FP8; use int8"
    if request.precision in IN_BLOCKS:
        return f"IREE does not compile blockwise DequantizeLinear, which {request.precision} weights need; use int8"
    return None
