"""XLA, through JAX: the engine is StableHLO with the weights beside it, compiled for the machine that opens it.

The graph becomes a function that JAX traces (`builders/onnx_ops`), with dynamic dims as symbolic sizes, and
`jax.export` writes it down for one platform, CPU or CUDA; neither needs that hardware. What is stored is portable: a
newer jaxlib reads it, on any CPU. It is not machine code. XLA compiles for exact sizes: a session compiles for the
sizes that the profiles are tuned for when it is opened, and for any other size within them at the first run with it,
which then takes as long. Nothing is padded: in a model the samples of a batch may depend on each other.

JAX's own `serialize_executable` would store machine code, and is a pickle: not used.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from builders.backends import request_checks
from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import versions_of
from enginesmith.core.capabilities import Capabilities
from enginesmith.core.errors import InputError
from enginesmith.core.hardware import cuda
from enginesmith.core.requirements import Requirement, for_target, later_versions
from enginesmith.core.types import BLOCK_FLOATS, BuildRequest, Engine, QuantizationScheme, Session, Target

_IO = {"float64", "float32", "float16", "bfloat16", "bool"} | {
    f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)
}
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclass(frozen=True)
class Xla:
    """The XLA backend.

    matmul_precision: of fp32 products: 'highest' (fp32), 'high' or 'default' (what the hardware likes best; TF32 or
    bf16 passes on GPUs). On CPUs all three are fp32.
    kept_sizes: how many exact sizes a session keeps compiled; the one used longest ago goes.
    """

    name: ClassVar[str] = "xla"
    revision: ClassVar[int] = 3
    install: ClassVar[str] = "pip install '.[xla]' in a clone"
    runtime: ClassVar[str] = "jax"
    # As for onnxruntime: XLA computes Q/DQ in floating point, and any scheme is as good.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities(determinism="bytes", thread_safe=True)

    matmul_precision: str = "highest"
    kept_sizes: int = 32

    def __post_init__(self) -> None:
        request_checks.check_choice(self, "matmul_precision", ("highest", "high", "default"))
        if self.kept_sizes < 1:
            raise InputError(f"backends.xla.kept_sizes: {self.kept_sizes} is below 1; give 1 or more")

    def serves(self, target: Target) -> bool:  # noqa: ARG002
        """CPUs and NVIDIA GPUs."""
        return True

    def versions(self) -> dict[str, str]:
        """Versions of jax and jaxlib."""
        return versions_of("jax", "jaxlib", together=True)

    def refuses(self, request: BuildRequest) -> str | None:
        """Why a request cannot be built: a precision that the target lacks, a type or dim that XLA does not support, no
        JAX. None if it can."""
        target = request.target
        if request.precision in BLOCK_FLOATS:
            return f"{self.name} takes no {request.precision} graphs; use int8, or tensorrt-rtx on a GPU"
        if request.precision == "fp8" and (target.is_cpu or (target.compute_capability or (0, 0)) < (8, 9)):
            return f"{'CPUs have' if target.is_cpu else f'{target.sm} has'} no FP8 arithmetic; use int8"
        if request.precision == "bf16" and target.compute_capability == (7, 5):
            return "sm_75 has no bfloat16; use fp16"
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype not in _IO:
                return f"{spec.name!r} is {spec.dtype}, which XLA does not take; cast it to float32 or int64"
        return self._open_dim(request) or (None if self.versions() else f"jax is not installed; {self.install}")

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """A jaxlib at least as new as the one that wrote the engine."""
        return (for_target(request.target), *later_versions(dict(request.toolchain), "jaxlib"))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Trace `model` and write WORKDIR/engine.xla. Raises ModelError naming the node that cannot be compiled."""
        from builders.backends.xla.export import export

        path = workdir / "engine.xla"
        export(request, model, path, self.matmul_precision)
        return Engine.of_file(self, request, path)

    def runs(self, target: Target) -> str | None:
        """Why engines for a GPU cannot run here: no such GPU, or no JAX plugin. None if they can, and for CPUs."""
        if target.is_cpu:
            return None
        if reason := cuda.explain_missing_gpu(target):
            return reason
        return None if versions_of(*_CUDA_PLUGINS) else "jax has no CUDA plugin here; pip install 'jax[cuda13]'"

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load the engine, compiled for its tuned sizes. Raises as `check_compatible`. GPU engines were never run."""
        check_compatible(self, engine)
        from builders.backends.xla.session import XlaSession

        with closing(XlaSession(engine, self.kept_sizes)) as session:
            yield session

    def _open_dim(self, request: BuildRequest) -> str | None:
        sizes = request_checks.sizes(request)
        for spec in request.inputs:
            for dim in spec.shape:
                if isinstance(dim, str) and dim not in sizes:
                    return f"input {spec.name!r}: dim {dim!r} has no max; xla needs one; add dims.{dim}.max"
        for dim, (low, _) in sizes.items():
            if low < 1:
                return f"dims.{dim}.min is {low}; XLA needs 1 or more: set it to 1, or use onnxruntime"
        return request_checks.sum_refusal(request, "XLA")
