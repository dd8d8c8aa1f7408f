"""ONNX Runtime on NVIDIA GPUs: its CUDA provider and its TensorRT provider, a backend each. Never run on a GPU.

`onnxruntime-cuda`: the engine is the graph itself, whole in one file; ONNX Runtime optimises it for the GPU when it is
opened. Nothing of that can be done ahead on a host without the GPU: a graph that the CPU provider has optimised holds
casts to fp32 around every fp16 operator that has no CPU kernel (seen in 1.31).

`onnxruntime-tensorrt`: the engine is an ONNX file whose EPContext nodes hold TensorRT engines (ONNX Runtime's compile
API), made on the GPU that it is for. What TensorRT leaves over runs on the CUDA provider; a note says how much.

What was tried with the GPU wheel on a host without a GPU: docs/reference/backends-onnxruntime.md. Tests call what is
used here on the CPU wheel, whose Python API is the same.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from builders.backends.compatibility import check_compatible
from builders.backends.installed import versions_of
from builders.backends.onnxruntime.gpu_session import (
    CUDA,
    INSTALL,
    TENSORRT,
    GpuSession,
    ProviderOptions,
    check_available,
    left_over,
    provider_failures,
    write_whole,
)
from builders.backends.onnxruntime.session import words_of
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.errors import EnginesmithError, InputError, ModelError
from enginesmith.core.hardware import cuda
from enginesmith.core.requirements import Requirement, driver_for, for_target, later_versions, same_versions
from enginesmith.core.types import (
    IN_BLOCKS,
    BuildRequest,
    Engine,
    Precision,
    QuantizationScheme,
    Session,
    ShapeProfile,
    Target,
)

_TENSORRT_WHEELS = ("tensorrt", *(f"tensorrt-{cuda}-libs" for cuda in ("cu12", "cu13")))


@dataclass(frozen=True)
class _OnnxRuntimeGpu(ABC):
    """What both providers share.

    cpu_operators: whether operators that compute more than shapes may run on the CPU, with copies to and fro.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    provider: ClassVar[str]
    precisions: ClassVar[dict[Precision, str]]
    install: ClassVar[str] = INSTALL
    capabilities: ClassVar[Capabilities] = Capabilities(determinism="budget", thread_safe=True)

    cpu_operators: bool = False

    def serves(self, target: Target) -> bool:
        """GPUs only."""
        return not target.is_cpu

    def versions(self) -> dict[str, str]:
        """Version of the wheel with the GPU providers."""
        return versions_of("onnxruntime-gpu")

    def scheme(self) -> QuantizationScheme:
        """TensorRT's: symmetric int8, biases in floating point, the rest in fp16."""
        return QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")

    def refuses(self, request: BuildRequest) -> str | None:
        """CPU targets, precisions and types that the provider lacks, and everything where the wheel is not installed or
        another version of the CPU wheel is."""
        if not self.serves(request.target):
            return f"{self.name} runs on GPUs, not on {request.target.name}; use onnxruntime"
        if request.precision in self.precisions:
            return self.precisions[request.precision]
        if request.precision == "bf16" and request.target.compute_capability == (7, 5):
            return "sm_75 has no bfloat16; use fp16"
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype == "bfloat16":
                return f"{spec.name!r} is bfloat16, which onnxruntime takes from no numpy array; cast it to float32"
        return self._find_misinstallation()

    @abstractmethod
    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """See the providers."""

    @abstractmethod
    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """See the providers."""

    def runs(self, target: Target) -> str | None:
        """Whether a GPU of that compute capability is in this machine, and the wheel installed."""
        if target.is_cpu:
            return f"{self.name} engines run on GPUs"
        return cuda.explain_missing_gpu(target) or self._find_misinstallation()

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load an engine on the first GPU of its capability. Raises as `check_compatible` does, and EnginesmithError
        when ONNX Runtime would run it on another device."""
        check_compatible(self, engine)
        request = engine.request
        providers = self.providers(request, cuda.index_of(request.target.compute_capability))
        with GpuSession(engine.path, request.profiles, providers, cpu_operators=self.cpu_operators) as session:
            yield session

    def load_runtime(self) -> None:
        """Import ONNX Runtime."""
        import onnxruntime  # noqa: F401

    @abstractmethod
    def providers(self, request: BuildRequest, device: int) -> list[tuple[str, ProviderOptions]]:
        """The providers of a session with their options, the backend's own first."""

    def _find_misinstallation(self) -> str | None:
        here, plain = self.versions().get("onnxruntime-gpu"), versions_of("onnxruntime").get("onnxruntime")
        if here is None:
            return f"onnxruntime-gpu is not installed; {self.install}"
        if plain not in (None, here):
            return f"onnxruntime-gpu {here} and onnxruntime {plain} are installed over each other; {self.install}"
        if not _library(self.provider).exists():
            return f"onnxruntime was installed over onnxruntime-gpu, and has no {self.provider}; {self.install}"
        return None


@dataclass(frozen=True)
class OnnxRuntimeCuda(_OnnxRuntimeGpu):
    """ONNX Runtime's CUDA provider.

    tf32: whether fp32 operators may round their inputs to TF32 (10 mantissa bits) from sm_80 on. ONNX Runtime's
    default; off here, because an fp32 engine is proven against fp32 limits.
    convolution_search: how cuDNN's algorithms are chosen: 'exhaustive' (measured when a shape is first seen),
    'heuristic' or 'default'.
    memory_mib: limit of the provider's memory arena, in MiB; 0 is none.
    """

    name: ClassVar[str] = "onnxruntime-cuda"
    provider: ClassVar[str] = CUDA
    precisions: ClassVar[dict[Precision, str]] = {
        "bf16": "the CUDA provider has bfloat16 kernels for few operators; use fp16, or tensorrt",
        "int8": "the CUDA provider dequantizes Q/DQ and computes in float, slower than fp16; use fp16, or "
        "onnxruntime-tensorrt or tensorrt-rtx for int8",
        "int8-dynamic": "the CUDA provider has no kernel for scales made at run time; use fp16",
        "fp8": "the CUDA provider dequantizes FP8 and computes in float; use tensorrt or tensorrt-rtx",
        **dict.fromkeys(
            IN_BLOCKS, "the CUDA provider was not tried with weights in blocks; use tensorrt or tensorrt-rtx"
        ),
    }

    tf32: bool = False
    convolution_search: str = "exhaustive"
    memory_mib: int = 0

    def __post_init__(self) -> None:
        if self.convolution_search not in (known := ("exhaustive", "heuristic", "default")):
            raise InputError(
                f"backends.{self.name}.convolution_search: {self.convolution_search!r} is not one of {known}"
            )
        if self.memory_mib < 0:
            raise InputError(f"backends.{self.name}.memory_mib: {self.memory_mib} is negative; 0 means no limit")

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """A release as new as the one that wrote it: an engine is an ONNX file, which later releases read."""
        return (for_target(request.target), *later_versions(dict(request.toolchain), "onnxruntime-gpu"))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Write the graph with its weights into WORKDIR/engine.onnx. Raises ModelError when it is no valid model."""
        path = workdir / "engine.onnx"
        write_whole(model, path)
        return Engine.of_file(self, request, path)

    def providers(self, request: BuildRequest, device: int) -> list[tuple[str, ProviderOptions]]:  # noqa: ARG002
        """CUDA alone; ONNX Runtime adds the CPU for what computes shapes."""
        options = {
            "device_id": str(device),
            "use_tf32": str(int(self.tf32)),
            "cudnn_conv_algo_search": self.convolution_search.upper(),
        }
        limit = {"gpu_mem_limit": str(self.memory_mib << 20)} if self.memory_mib else {}
        return [(CUDA, options | limit)]


@dataclass(frozen=True)
class OnnxRuntimeTensorRT(_OnnxRuntimeGpu):
    """ONNX Runtime's TensorRT provider. It tunes on the GPU it builds for, and therefore builds only where that GPU is.

    optimization_level: 0 (fast build) to 5 (fast engine).
    workspace_mib: scratch memory that one operator may use on the GPU, in MiB; 0 is no limit.
    """

    name: ClassVar[str] = "onnxruntime-tensorrt"
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="budget",
        tunes_on_target=True,
        thread_safe=True,
        options=SharedOptions(workspace_mib="workspace_mib"),
    )
    provider: ClassVar[str] = TENSORRT
    precisions: ClassVar[dict[Precision, str]] = {
        "int8-dynamic": "TensorRT takes no activation scales made at run time; use int8 with calibration",
        "fp8": "the TensorRT provider was not tried with FP8; use tensorrt or tensorrt-rtx",
        **dict.fromkeys(
            IN_BLOCKS, "the TensorRT provider was not tried with weights in blocks; use tensorrt or tensorrt-rtx"
        ),
    }

    optimization_level: int = 3
    workspace_mib: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.optimization_level <= 5:
            raise InputError(f"backends.{self.name}.optimization_level: {self.optimization_level} is not in 0..5")
        if self.workspace_mib < 0:
            raise InputError(f"backends.{self.name}.workspace_mib: {self.workspace_mib} is negative; 0 means no limit")

    def versions(self) -> dict[str, str]:
        """Versions of the wheel with the provider and, where they are wheels, of TensorRT's libraries."""
        return versions_of("onnxruntime-gpu") and versions_of("onnxruntime-gpu", *_TENSORRT_WHEELS)

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The very versions that built it, and a driver for their CUDA."""
        toolchain = dict(request.toolchain)
        runtimes = same_versions(toolchain, "onnxruntime-gpu", *_TENSORRT_WHEELS)
        return (for_target(request.target), *runtimes, *driver_for(toolchain))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.onnx, on the first GPU of the target.

        Raises EnginesmithError where that GPU or the provider is missing, ModelError with ONNX Runtime's reason, also
        when TensorRT takes no operator at all.
        """
        import onnxruntime as ort

        if reason := cuda.explain_missing_gpu(request.target):
            raise EnginesmithError(f"TensorRT tunes on the GPU it builds for: {reason}; build on a node that has one")
        device = cuda.index_of(request.target.compute_capability)
        check_available(ort.get_available_providers(), TENSORRT)
        options = ort.SessionOptions()
        path = workdir / "engine.onnx"
        try:
            for provider, settings in self.providers(request, device):
                options.add_provider(provider, settings)
            flags = ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED
            compiler = ort.ModelCompiler(options, str(model), embed_compiled_data_into_model=True, flags=flags)
            compiler.compile_to_file(str(path))
        except provider_failures() as error:
            words = f"{model.name}: onnxruntime cannot compile it for TensorRT: {words_of(error)}"
            raise ModelError(f"{words}; `enginesmith plan --backend tensorrt-rtx` may name the operator") from error
        return Engine.of_file(self, request, path, left_over(path))

    def providers(self, request: BuildRequest, device: int) -> list[tuple[str, ProviderOptions]]:
        """TensorRT, and CUDA for what it does not take."""
        options = {
            "device_id": str(device),
            "trt_builder_optimization_level": str(self.optimization_level),
            "trt_fp16_enable": str(request.precision in ("fp16", "int8")),
            "trt_bf16_enable": str(request.precision == "bf16"),
            "trt_int8_enable": str(request.precision == "int8"),
            **profile_options(request.profiles),
        }
        limit = {"trt_max_workspace_size": str(self.workspace_mib << 20)} if self.workspace_mib else {}
        return [(TENSORRT, options | limit), (CUDA, {"device_id": str(device), "use_tf32": "0"})]


def profile_options(profiles: Sequence[ShapeProfile]) -> ProviderOptions:
    """Optimization profiles as the TensorRT provider takes them: 'x:1x8,y:1x8', a name once for each profile."""
    if not profiles:
        return {}
    keys = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
    entries = [entry for shapes in profiles for entry in shapes.inputs]
    return {
        key: ",".join(f"{entry[0]}:{'x'.join(map(str, entry[at]))}" for entry in entries)
        for at, key in enumerate(keys, start=1)
    }


def _library(provider: str) -> Path:
    """Where the GPU wheel has a provider's library; found without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    where = Path(spec.origin).parent if spec and spec.origin else Path()
    name = provider.removesuffix("ExecutionProvider").lower()
    return where / "capi" / f"libonnxruntime_providers_{name}.so"
