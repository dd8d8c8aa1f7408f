"""ONNX Runtime on CUDA: the backend, its provider's options, and its sessions."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import versions_of
from builders.backends.onnxruntime.session import OrtSession, failures, words_of
from builders.backends.request_checks import check_choice, check_not_negative
from builders.onnx_graphs.bodies import check_model
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.errors import EnginesmithError, InputError, ModelError
from enginesmith.core.hardware import cuda
from enginesmith.core.requirements import (
    LIBRARY_ENTRY,
    Requirement,
    driver_for,
    for_target,
    later_versions,
    same_versions,
)
from enginesmith.core.text import join_first
from enginesmith.core.types import (
    IN_BLOCKS,
    BuildRequest,
    Engine,
    Precision,
    QuantizationScheme,
    Session,
    ShapeProfile,
    Target,
    Untyped,
)

# The file and the session of an ONNX Runtime engine on a GPU provider; that it runs on the CPU is an error.
#
# ONNX Runtime gives a session on the CPU, with a warning at most, when a provider is missing in the wheel or its
# libraries do not load, whatever `enable_fallback` says (microsoft/onnxruntime#17801; seen with both wheels of 1.31 on
# a host without CUDA). So the providers are checked before and after, and operators that were placed on the CPU
# provider are refused unless they only compute shapes, which CUDA leaves to the CPU on purpose. Never run on a GPU.

# Operator types that an error names.
_MOST_TYPES = 3
_MOST_BYTES = (1 << 31) - 1  # of a protobuf
CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
# Whatever its provider, an engine is an ONNX file.
OPENED_BY = ("Triton", "ONNX Runtime")
# Both wheels are the module `onnxruntime`: the one installed last is the one that runs.
INSTALL = "pip install --no-deps --force-reinstall onnxruntime-gpu, of onnxruntime's version"
ProviderOptions = dict[str, str]
# Operators that the CUDA provider leaves to the CPU where they compute shapes; it has kernels for all others of them.
_OF_SHAPES = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor"}
    | {"Gather", "Greater", "Identity", "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "ReduceProd"}
    | {"Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"}
)
_SHOWN = 3
_OTHERS = "use tensorrt or tensorrt-rtx"


def write_whole(model: Path, path: Path) -> None:
    """Write the model with its external data into one file. Raises ModelError when it is invalid or over 2 GB."""
    import onnx

    check_model(model)
    proto = onnx.load(model)
    if proto.ByteSize() > _MOST_BYTES:
        size_text = f"{proto.ByteSize()} bytes; an engine in one file can have at most {_MOST_BYTES}"
        raise ModelError(f"{model.name} has {size_text}; use tensorrt")
    onnx.save(proto, path)


def left_over(path: Path) -> tuple[str, ...]:
    """A note with the number and types of a compiled model's operators outside of TensorRT's engines; () for none."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    op_types = [node.op_type for node in graph.node if node.op_type != "EPContext"]
    if not op_types:
        return ()
    types_text = ", ".join(sorted(set(op_types))[:_MOST_TYPES])
    return (f"{len(op_types)} operators are outside of TensorRT's engines and run on the CUDA provider: {types_text}",)


class GpuSession(OrtSession):
    """An engine opened on a GPU provider, which takes shapes within its profiles only.

    providers: (name, options), the engine's provider first.  cpu_operators: whether the CPU may compute more than
    shapes. Raises EnginesmithError when ONNX Runtime falls back to another device, ModelError when it cannot read the
    engine.
    """

    def __init__(
        self,
        model: Path,
        profiles: Sequence[ShapeProfile],
        providers: Sequence[tuple[str, ProviderOptions]],
        *,
        cpu_operators: bool = False,
    ) -> None:
        def opens(model: Path, options: Untyped) -> Untyped:
            import onnxruntime as ort

            check_available(ort.get_available_providers(), providers[0][0])
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            try:
                session = ort.InferenceSession(str(model), options, providers=list(providers), enable_fallback=0)
            except provider_failures() as error:
                reason = f"{model.name}: {providers[0][0]} cannot load it: {words_of(error)}"
                raise ModelError(f"{reason}; build it again") from error
            _check_placed(model, session, providers[0][0], cpu_operators)
            return session

        super().__init__(model, session_factory=opens, profiles=profiles)


def provider_failures() -> tuple[type[Exception], ...]:
    """The classes that opening on a provider raises: ONNX Runtime's, and RuntimeError where a library does not load."""
    return (*failures(), RuntimeError)


def check_available(available: Sequence[str], provider: str) -> None:
    """Raise EnginesmithError when the installed ONNX Runtime has no such provider."""
    if provider not in available:
        raise EnginesmithError(f"onnxruntime here has {', '.join(available)}, and no {provider}; {INSTALL}")


def _check_placed(model: Path, session: Untyped, provider: str, cpu_operators: bool) -> None:
    """Raise EnginesmithError when the session is not the provider's, or computes more than shapes on the CPU."""
    providers = session.get_providers()
    if providers[0] != provider:
        raise EnginesmithError(
            f"{model.name}: {provider} did not load, and onnxruntime would run on {providers[0]}; check the driver, "
            "CUDA, cuDNN and TensorRT against the versions that onnxruntime-gpu needs"
        )
    cpu_parts = [subgraph for subgraph in session.get_provider_graph_assignment_info() if subgraph.ep_name == CPU]
    nodes = [node for subgraph in cpu_parts for node in subgraph.get_nodes() if node.op_type not in _OF_SHAPES]
    if nodes and not cpu_operators:
        nodes_text = join_first([f"{node.op_type} {node.name!r}" for node in nodes], _SHOWN)
        raise EnginesmithError(
            f"{model.name}: {len(nodes)} operators have no kernel in {provider} and would run on the CPU: "
            f"{nodes_text}; use another backend, or set cpu_operators: true to accept it"
        )


# ONNX Runtime on NVIDIA GPUs: its CUDA provider and its TensorRT provider, a backend each. Never run on a GPU.
#
# `onnxruntime-cuda`: the engine is the graph itself, whole in one file; ONNX Runtime optimises it for the GPU when it
# is opened. Nothing of that can be done ahead on a host without the GPU: a graph that the CPU provider has optimised
# holds casts to fp32 around every fp16 operator that has no CPU kernel (seen in 1.31).
#
# `onnxruntime-tensorrt`: the engine is an ONNX file whose EPContext nodes hold TensorRT engines (ONNX Runtime's compile
# API), made on the GPU that it is for. What TensorRT leaves over runs on the CUDA provider; a note says how much.
#
# What was tried with the GPU wheel on a host without a GPU: docs/reference/backends-onnxruntime.md. Tests call what is
# used here on the CPU wheel, whose Python API is the same.

_TENSORRT_WHEELS = ("tensorrt", *(f"tensorrt-{cuda}-libs" for cuda in ("cu12", "cu13")))


@dataclass(frozen=True)
class _OnnxRuntimeGpu(ABC):
    """Base class of both providers.

    cpu_operators: whether operators that compute more than shapes may run on the CPU, with copies to and fro.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    provider: ClassVar[str]
    precisions: ClassVar[dict[Precision, str]]
    install: ClassVar[str] = INSTALL
    runtime: ClassVar[str] = "onnxruntime"
    # TensorRT's: symmetric int8, biases in floating point, the rest in fp16.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
    capabilities: ClassVar[Capabilities]

    cpu_operators: bool = False

    def serves(self, target: Target) -> bool:
        """GPUs only."""
        return not target.is_cpu

    def versions(self) -> dict[str, str]:
        """Version of the wheel with the GPU providers."""
        return versions_of("onnxruntime-gpu")

    def refuses(self, request: BuildRequest) -> str | None:
        """The reason against CPU targets, and against precisions and types that the provider lacks; against every
        request where the wheel is not installed, or has another version than the CPU wheel."""
        if not self.serves(request.target):
            return f"{self.name} runs on GPUs, not on {request.target.name}; use onnxruntime"
        if request.precision in self.precisions:
            return self.precisions[request.precision]
        if request.precision == "bf16" and request.target.compute_capability == (7, 5):
            return "sm_75 has no bfloat16; use fp16"
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype == "bfloat16":
                return f"{spec.name!r} is bfloat16; onnxruntime takes no bfloat16 arrays: cast it to float32"
        return self._find_missing_builder()

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

    @abstractmethod
    def providers(self, request: BuildRequest, device: int) -> list[tuple[str, ProviderOptions]]:
        """The providers of a session with their options, the backend's own first."""

    def _find_missing_builder(self) -> str | None:
        """The missing prerequisite of a build on this machine."""
        return self._find_misinstallation()

    def _find_misinstallation(self) -> str | None:
        gpu_version, cpu_version = (versions_of(name).get(name) for name in ("onnxruntime-gpu", "onnxruntime"))
        if gpu_version is None:
            return f"onnxruntime-gpu is not installed; {self.install}"
        if cpu_version not in (None, gpu_version):
            versions_text = f"onnxruntime-gpu {gpu_version} and onnxruntime {cpu_version}"
            return f"{versions_text} are installed over each other; {self.install}"
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
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="budget", thread_safe=True, library_entries=(LIBRARY_ENTRY,), opened_by=OPENED_BY
    )
    precisions: ClassVar[dict[Precision, str]] = {
        "bf16": "the CUDA provider has bfloat16 kernels for few operators; use fp16, or tensorrt",
        "int8": "the CUDA provider dequantizes Q/DQ and computes in float, slower than fp16; use fp16, or "
        "onnxruntime-tensorrt or tensorrt-rtx for int8",
        "int8-dynamic": "the CUDA provider has no kernel for scales made at run time; use fp16",
        "fp8": f"the CUDA provider dequantizes FP8 and computes in float; {_OTHERS}",
        **dict.fromkeys(IN_BLOCKS, f"the CUDA provider was not tried with weights in blocks; {_OTHERS}"),
    }

    tf32: bool = False
    convolution_search: str = "exhaustive"
    memory_mib: int = 0

    def __post_init__(self) -> None:
        check_choice(self, "convolution_search", ("exhaustive", "heuristic", "default"))
        check_not_negative(self, "memory_mib")

    def versions(self) -> dict[str, str]:
        """The version of onnxruntime-gpu, else of onnxruntime: a build writes a graph and needs no GPU provider."""
        packages = versions_of("onnxruntime-gpu", "onnxruntime")
        return {"onnxruntime": next(iter(packages.values()))} if packages else {}

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """An ONNX Runtime at least as new as the one that wrote the engine, an ONNX file."""
        runtimes = later_versions(dict(request.toolchain), "onnxruntime")
        return (for_target(request.target), *(replace(runtime, packages=("onnxruntime-gpu",)) for runtime in runtimes))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Write the graph with its weights into WORKDIR/engine.onnx. Raises ModelError when it is no valid model."""
        path = workdir / "engine.onnx"
        write_whole(model, path)
        return Engine.of_file(self, request, path)

    def _find_missing_builder(self) -> str | None:
        return None if self.versions() else "onnxruntime is not installed; pip install onnxruntime"

    def providers(self, request: BuildRequest, device: int) -> list[tuple[str, ProviderOptions]]:  # noqa: ARG002
        """The CUDA provider and its options; ONNX Runtime adds the CPU for operators that compute shapes."""
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
        opened_by=OPENED_BY,
    )
    provider: ClassVar[str] = TENSORRT
    precisions: ClassVar[dict[Precision, str]] = {
        "int8-dynamic": "TensorRT takes no activation scales made at run time; use int8 with calibration",
        "fp8": f"the TensorRT provider was not tried with FP8; {_OTHERS}",
        **dict.fromkeys(IN_BLOCKS, f"the TensorRT provider was not tried with weights in blocks; {_OTHERS}"),
    }

    optimization_level: int = 3
    workspace_mib: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.optimization_level <= 5:
            raise InputError(f"backends.{self.name}.optimization_level: {self.optimization_level} is not in 0..5")
        check_not_negative(self, "workspace_mib")

    def versions(self) -> dict[str, str]:
        """Versions of the wheel with the provider and, where they are wheels, of TensorRT's libraries."""
        return versions_of("onnxruntime-gpu") and versions_of("onnxruntime-gpu", *_TENSORRT_WHEELS)

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """The target's GPU, exactly the versions that built the engine, and a driver for their CUDA."""
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
            raise EnginesmithError(
                f"TensorRT tunes on the GPU it builds for: {reason}; build on a node that has this GPU"
            )
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
            message = f"{model.name}: onnxruntime cannot compile it for TensorRT: {words_of(error)}"
            raise ModelError(f"{message}; `enginesmith plan --backend tensorrt-rtx` may name the operator") from error
        return Engine.of_file(self, request, path, left_over(path))

    def providers(self, request: BuildRequest, device: int) -> list[tuple[str, ProviderOptions]]:
        """The TensorRT provider, and the CUDA provider for operators that TensorRT does not support."""
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
    entries = [entry for profile in profiles for entry in profile.inputs]
    return {
        key: ",".join(f"{entry[0]}:{'x'.join(map(str, entry[index]))}" for entry in entries)
        for index, key in enumerate(keys, start=1)
    }


def _library(provider: str) -> Path:
    """Where the GPU wheel has a provider's library; found without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    name = provider.removesuffix("ExecutionProvider").lower()
    return folder / "capi" / f"libonnxruntime_providers_{name}.so"
