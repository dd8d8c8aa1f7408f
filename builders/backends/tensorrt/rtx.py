"""TensorRT for RTX.

Options of full TensorRT that change nothing here are left out. On a graph that TensorRT-RTX 1.7.1 builds reproducibly,
the engine's bytes were the same for optimization levels 0 to 5, tiling levels, L2 limits and auxiliary streams;
hardware compatibility is "unsupported" in its own words, and the timing cache a no-op. Refitting, stripped weights,
version compatibility and the engine inspector need a GPU or a library that is not in its wheels: the build fails.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from builders.backends.tensorrt.edition import OPTIONS, TensorRTEdition, wheels
from builders.backends.tensorrt.runtime.opening import Opening
from enginery.core.capabilities import Capabilities
from enginery.core.types import NO_LAYERS, BuildRequest, Engine
from enginery.core.untyped import Untyped

_CAPABILITIES = {(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)}


@dataclass(frozen=True)
class TensorRTRTX(TensorRTEdition):
    """TensorRT for RTX: sm_75, 80, 86, 89, 120 and 121, built on any Linux x86-64 host. Options: see the base class."""

    name: ClassVar[str] = "tensorrt-rtx"
    title: ClassVar[str] = "TensorRT-RTX"
    module: ClassVar[str] = "tensorrt_rtx"
    distributions: ClassVar[tuple[str, ...]] = wheels("tensorrt-rtx")
    install: ClassVar[str] = "pip install tensorrt-rtx (Linux, x86-64)"
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="budget",
        times_nodes=True,
        options=OPTIONS,
    )

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """As the base class; its inspector tells nothing without a GPU."""
        engine = super().build(request, model, workdir)
        reason = "TensorRT-RTX's inspector needs a GPU, and engines are built without one"
        return replace(engine, notes=(*engine.notes, f"{NO_LAYERS}: {reason}"))

    def _hardware_refusal(self, request: BuildRequest) -> str | None:
        target = request.target
        if target.compute_capability not in _CAPABILITIES:
            return f"{target.sm} is not a target of TensorRT-RTX; use full tensorrt on a node with that GPU"
        if target.sm == "sm_75" and request.precision == "fp32":
            return "sm_75 has no FP32 GEMM in TensorRT-RTX; use fp16"
        return super()._hardware_refusal(request)

    def _configure(self, trt: Untyped, config: Untyped, request: BuildRequest) -> None:
        super()._configure(trt, config, request)
        config.num_compute_capabilities = 1
        capability = request.target.sm.upper().replace("_", "")  # SM89
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)

    def _configure_opening(self, opening: Opening) -> Opening:
        # Its kernels change while it runs, so it captures graphs by itself, and knows when.
        return replace(super()._configure_opening(opening), cuda_graphs=False, own_graphs=self.cuda_graphs)
