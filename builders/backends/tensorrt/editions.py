"""The two editions: full TensorRT, whose build was never run (its libraries were not at hand), and TensorRT for RTX.

TensorRT for RTX has no options of full TensorRT that change nothing there. On a graph that TensorRT-RTX 1.7.1 builds
reproducibly, the engine's bytes were the same for optimization levels 0 to 5, tiling levels, L2 limits and auxiliary
streams; hardware compatibility is "unsupported" in its own words, and the timing cache a no-op. Refitting, stripped
weights, version compatibility and the engine inspector need a GPU or a library that is not in its wheels: the build
fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from builders.backends.discovery import load_runtime
from builders.backends.request_checks import check_choice
from builders.backends.tensorrt import library
from builders.backends.tensorrt.build import (
    LEAST,
    OPTIONS,
    TensorRTEdition,
    keep_grown,
    kept_layers,
    merge_caches,
    use_given,
    wheels,
)
from builders.backends.tensorrt.library import Opening, recorder, refit, serialize_engine
from builders.onnx_graphs.bodies import list_libraries
from enginesmith.core.capabilities import Capabilities, SupportMatrix
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware import cuda
from enginesmith.core.requirements import Gpu, Product, Requirement, Runtime, Weights, numbers
from enginesmith.core.types import NO_LAYERS, BuildRequest, Engine, Target, Untyped

_LEVELS = ("none", "same_compute_capability", "ampere_plus")
# The least compute capability of engines built with `ampere_plus`.
_AMPERE = (8, 0)
# Major versions whose engines, if they are version compatible, the next one runs, too.
_NEXT_MAJOR = {8: 10, 10: 11}
_VERBOSITY = {"none": "NONE", "names": "LAYER_NAMES_ONLY", "detailed": "DETAILED"}
_OTHER_PRODUCT = "TensorRT warns of errors on another product, but for engines with hardware_compatibility"
_CAPABILITIES = {(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)}
# https://docs.nvidia.com/deeplearning/tensorrt-rtx, "Support Matrix" of 1.0, 1.1, 1.4 and 1.5; none was there for 1.7.
_RTX_MATRIX = SupportMatrix(
    "NVIDIA's support matrix of TensorRT-RTX (1.0 to 1.5)",
    ((7, 5), (8, 6), (8, 9), (12, 0), (12, 1)),
    without=(((7, 5), "int8"),),
)


@dataclass(frozen=True)
class TensorRT(TensorRTEdition):
    """Full TensorRT, 10.16 and later, which tunes on the GPU it builds for. Options besides those of the base class:

    optimization_level: 0 (fast build) to 5 (fast engine).
    hardware_compatibility: 'none', 'same_compute_capability' or 'ampere_plus': wider use of an engine, for some speed.
    version_compatible: whether later releases of TensorRT may run the engine, which carries a runtime of its own then.
    refittable: whether new weights may take the place of the engine's without a build.
    strip_weights: whether the engine's file leaves its weights out, which are read from the ONNX model when it is
    opened; refittable too.
    layer_information: what the engine tells of its layers: 'none', 'names' or 'detailed' (tactics, formats).
    """

    name: ClassVar[str] = "tensorrt"
    title: ClassVar[str] = "TensorRT"
    runtime: ClassVar[str] = "tensorrt"
    distributions: ClassVar[tuple[str, ...]] = wheels("tensorrt")
    install: ClassVar[str] = "pip install '.[tensorrt]' in a clone on a node with that GPU, or use tensorrt-rtx"
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="budget",
        tunes_on_target=True,
        library_entries=library.ENTRIES,
        options=OPTIONS,
        opened_by=("Triton", "TensorRT"),
    )

    optimization_level: int = 3
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    refittable: bool = False
    strip_weights: bool = False
    layer_information: str = "detailed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.optimization_level <= 5:
            raise self._bad("optimization_level", f"{self.optimization_level} is not in 0..5")
        check_choice(self, "hardware_compatibility", _LEVELS)
        check_choice(self, "layer_information", _VERBOSITY)

    def refuses(self, request: BuildRequest) -> str | None:
        """The reason of the base class, else the reason why an option does not go with the request."""
        return super().refuses(request) or self._options_refusal(request)

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The requirements of the base class, changed by the options; plus the weights that a stripped engine lacks.

        Sources: NVIDIA, TensorRT 11.4 documentation, "Engine Compatibility" and "Support Matrix"; the documentation of
        `HardwareCompatibilityLevel` in the bindings. Not tried on a GPU.
        """
        requirements = list(super().requires(request))
        if self.hardware_compatibility == "ampere_plus":
            requirements[0] = Gpu(request.target.name, max(_AMPERE, LEAST.get(request.precision, _AMPERE)), "at_least")
        if request.target.product and self.hardware_compatibility == "none":
            requirements.append(Product(request.target.product, _OTHER_PRODUCT))
        return (*requirements, *([Weights(request.model)] if self.strip_weights else []))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """The base class's engine, with the inspector's JSON on its layers as an extra file, or a note why not."""
        engine = super().build(request, model, workdir)
        path, reason = None, "layer_information was none"
        if self.layer_information != "none":
            path, reason = kept_layers(
                load_runtime(self), recorder(self.runtime), engine.path, partial(self._prepare, model=model)
            )
        if path is None:
            return replace(engine, notes=(*engine.notes, f"{NO_LAYERS}: {reason}"))
        return replace(engine, extras=(("layers", path),))

    def refits(self, request: BuildRequest) -> str | None:  # noqa: ARG002 - see `Refitting`
        """See `Refitting`."""
        if self.refittable or self.strip_weights:
            return None
        return "it was built without refittable or strip_weights"

    def refit_needs_gpu(self) -> bool:
        """See `Refitting`: a stripped engine gets its weights when it is opened, and stays as it is."""
        return not self.strip_weights

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        """See `Refitting`. Never run on a GPU."""
        from builders.backends.tensorrt.session import load

        path = workdir / f"refitted{engine.suffix}"
        if self.strip_weights:
            path.write_bytes(engine.path.read_bytes())
        else:
            self._check_host(request.target)
            trt, log = load_runtime(self), recorder(self.runtime)
            log.messages.clear()
            runtime = trt.Runtime(log)
            cuda_engine = load(runtime, log, engine, self._configure_opening(Opening(0)))
            refit(trt, log, cuda_engine, model)
            path.write_bytes(serialize_engine(trt, cuda_engine, log))
        return Engine.of_file(self, request, path)

    def timing_place(self) -> tuple[str, str] | None:
        """See `TimingCached`: TensorRT tunes on the first GPU."""
        gpus, versions = cuda.gpus(), super().versions()
        return (gpus[0].name, versions.get(self.name) or max(versions.values())) if gpus and versions else None

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """See `TimingCached`."""
        return merge_caches(load_runtime(self), recorder(self.runtime), older, newer)

    def _runtime(self, toolchain: Mapping[str, str]) -> Runtime:
        """As the base class; a version-compatible engine loads in later releases of its major version and in the next
        major version of `_NEXT_MAJOR`, too."""
        requirement = super()._runtime(toolchain)
        if not (self.version_compatible and (release := numbers(requirement.version))):
            return requirement
        majors = [_NEXT_MAJOR[release[0]]] if release[0] in _NEXT_MAJOR else []
        ranges = [(requirement.version, str(release[0] + 1)), *((str(major), str(major + 1)) for major in majors)]
        return replace(requirement, loads=tuple(ranges))

    def _prepare(self, builder: Untyped, model: Path) -> None:
        """Load the plugins of a graph into the registry of a builder or a runtime."""
        library.load(builder, list_libraries(model).libraries, model.parent)

    def _configure(self, trt: Untyped, config: Untyped, request: BuildRequest) -> None:
        super()._configure(trt, config, request)
        config.builder_optimization_level = self.optimization_level
        level = self.hardware_compatibility.upper()
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
        config.profiling_verbosity = getattr(trt.ProfilingVerbosity, _VERBOSITY[self.layer_information])
        if self.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if self.refittable or self.strip_weights:
            config.set_flag(trt.BuilderFlag.REFIT)
        if self.strip_weights:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)

    def _begin(self, config: Untyped, workdir: Path) -> list[tuple[str, str]]:
        return use_given(config, workdir)

    def _end(self, config: Untyped, workdir: Path) -> None:
        keep_grown(config, workdir)

    def _configure_opening(self, opening: Opening) -> Opening:
        return replace(
            super()._configure_opening(opening),
            host_code=self.version_compatible,
            stripped=self.strip_weights,
            prepare=lambda runtime, engine: library.load(runtime, engine.requires, engine.path.parent),
        )

    def _options_refusal(self, request: BuildRequest) -> str | None:
        capability = request.target.compute_capability or (0, 0)
        if self.hardware_compatibility == "ampere_plus" and capability < (8, 0):
            return f"{request.target.sm} is older than Ampere; hardware_compatibility: ampere_plus begins with sm_80"
        release = max(super().versions().values(), default="")
        if (self.refittable or self.strip_weights) and release.startswith("11.3."):
            return "TensorRT 11.3 drops GEMM biases of refittable engines (its release notes); install 11.4"
        return None

    def _check_host(self, target: Target) -> None:
        if reason := self.runs(target):
            raise EnginesmithError(
                f"TensorRT tunes on the GPU it builds for: {reason}; build on a node that has this GPU"
            )


@dataclass(frozen=True)
class TensorRTRTX(TensorRTEdition):
    """TensorRT for RTX: for sm_75, 80, 86, 89, 120 and 121, built on any Linux x86-64 host."""

    name: ClassVar[str] = "tensorrt-rtx"
    title: ClassVar[str] = "TensorRT-RTX"
    runtime: ClassVar[str] = "tensorrt_rtx"
    distributions: ClassVar[tuple[str, ...]] = wheels("tensorrt-rtx")
    install: ClassVar[str] = "pip install tensorrt-rtx (Linux, x86-64)"
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="budget", options=OPTIONS, opened_by=("TensorRT for RTX",), matrix=_RTX_MATRIX
    )

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """As the base class, with a note that there is no account of the layers: the inspector needs a GPU."""
        engine = super().build(request, model, workdir)
        reason = "TensorRT-RTX's inspector needs a GPU, and engines are built without one"
        return replace(engine, notes=(*engine.notes, f"{NO_LAYERS}: {reason}"))

    def _hardware_refusal(self, request: BuildRequest) -> str | None:
        target = request.target
        if target.compute_capability not in _CAPABILITIES:
            reason = _RTX_MATRIX.explain_absence(target.compute_capability, request.precision)
            return (
                f"{reason}, nor a target of its compiler; build it with onnxruntime-cuda, on any machine, or tensorrt, "
                f"on a worker with {target.sm}: add it to the spec's backends, or leave backends out"
            )
        if target.sm == "sm_75" and request.precision == "fp32":
            return "sm_75 has no FP32 GEMM in TensorRT-RTX; use fp16"
        return super()._hardware_refusal(request)

    def _configure(self, trt: Untyped, config: Untyped, request: BuildRequest) -> None:
        super()._configure(trt, config, request)
        config.num_compute_capabilities = 1
        capability = request.target.sm.upper().replace("_", "")  # SM89
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)

    def _configure_opening(self, opening: Opening) -> Opening:
        # Its kernels change while it runs, so that it captures graphs by itself when they have settled.
        return replace(super()._configure_opening(opening), cuda_graphs=False, own_graphs=self.cuda_graphs)
