"""TensorRT and TensorRT for RTX: one API, two backends.

`tensorrt-rtx` builds ahead of time for any generation on a host without a GPU (kernels are compiled when the engine is
loaded). `tensorrt` tunes on the GPU it builds for, and therefore builds only where that GPU is.

Precision lives in the graph: networks are strongly typed, int8 comes as Q/DQ nodes and fp16 as casts. What cannot work
is refused before any compiler is imported; what the compiler refuses is raised with its own words and a remedy.
INT8 and convolution engines are not byte-reproducible (generated names differ), so nothing may depend on equal digests.

Options that change nothing are left out. On a graph that TensorRT-RTX 1.7.1 builds reproducibly, the engine's bytes
were the same for optimization levels 0 to 5, tiling levels, L2 limits and auxiliary streams; hardware compatibility is
"unsupported" in its own words, and the timing cache a no-op.
"""

import importlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from builders import cuda
from builders.digest import digest_of_file
from builders.errors import EngineryError, InputError, ModelError, StepError
from builders.fitting import check_fits, tensorrt_opens, tensorrt_version
from builders.installed import PackageNotFoundError, version
from builders.profiles import RunProfile
from builders.tensorrt_timing import keep_grown, merged, use_given
from builders.tensorrt_words import builder_reason, clean, parser_reason, ran_out_of_memory, recorder
from builders.types import BuildRequest, Determinism, Engine, QuantizationScheme, Session, ShapeProfile, Target, Tensors

_SUPPORTED_IO = {"float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"}
_RTX_CAPABILITIES = {(7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)}


def _wheels(api: str) -> tuple[str, ...]:
    """Distributions that a flavour may consist of: its API, and bindings and libraries by CUDA version."""
    return (api, *(f"{api}-{cuda}-{part}" for cuda in ("cu12", "cu13") for part in ("bindings", "libs")))


@dataclass(frozen=True)
class _TensorRT:
    """What both flavours share.

    workspace_mib: scratch memory that one operator may use on the GPU, in MiB; 0 is no limit.
    tf32: whether fp32 operators may round their inputs to TF32 (10 mantissa bits) from sm_80 on. TensorRT's default;
    off here, because an fp32 engine is proven against fp32 limits.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    tunes_on_target: ClassVar[bool] = False
    determinism: ClassVar[Determinism] = "budget"
    title: ClassVar[str]
    module: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    install: ClassVar[str]

    workspace_mib: int = 0
    tf32: bool = False

    def __post_init__(self) -> None:
        if self.workspace_mib < 0:
            raise self._bad("workspace_mib", f"{self.workspace_mib} is negative; 0 means no limit")

    def serves(self, target: Target) -> bool:
        """GPUs only."""
        return not target.is_cpu

    def versions(self) -> dict[str, str]:
        """Versions of the installed wheels: the API, its bindings and its libraries."""
        found = {}
        for name in self.distributions:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found

    def scheme(self) -> QuantizationScheme:
        """Symmetric int8, biases in floating point (TensorRT refuses an int32 DequantizeLinear), the rest in fp16."""
        return QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")

    def refuses(self, request: BuildRequest) -> str | None:
        """CPU targets, generations and precisions that the hardware or this flavour lacks, I/O types and shapes that it
        cannot take, and everything where it is not installed; in that order."""
        if not self.serves(request.target):
            return f"{self.name} compiles for GPUs, not for {request.target.name}; use onnxruntime"
        return self._hardware_refusal(request) or self._io_refusal(request) or self._missing()

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.<suffix>.

        Raises ModelError when the model is invalid or an operator is not supported (node, operator, reason), and
        EngineryError with TensorRT's words and a remedy when the build itself fails.
        """
        self._check_host(request.target)
        check_model(model)
        trt = self._import()
        said = recorder(self.module)
        said.messages.clear()
        plan = self._plan(trt, said, request, model, workdir)
        path = workdir / f"engine.{self.name}"
        path.write_bytes(plan)
        notes = tuple(dict.fromkeys(clean(text) for level, text in said.messages if level == "WARNING"))
        return Engine(request, path, digest_of_file(path), path.stat().st_size, path.suffix, notes)

    def runs(self, target: Target) -> str | None:
        """Whether a GPU of that compute capability is in this machine."""
        if target.is_cpu:
            return f"{self.name} engines run on GPUs"
        found = cuda.gpus()
        if any(gpu.compute_capability == target.compute_capability for gpu in found):
            return None
        here = ", ".join(f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})" for gpu in found)
        return (
            f"no {target.sm} GPU on this machine, which has {here}" if here else f"no {target.sm} GPU on this machine"
        )

    def unfit(self, built: Mapping[str, str], here: Mapping[str, str]) -> str | None:
        """See `fitting.Choosy`: the release that built it, whichever of its wheels are installed."""
        was, now = tensorrt_version(self.name, built), tensorrt_version(self.name, here)
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if was is None or now is None or tensorrt_opens(was, now, options):
            return None
        return f"built with {self.title} {was}, here is {now}; install {self.name} {was}, or build it again here"

    def open(self, engine: Engine) -> AbstractContextManager[Session]:
        """Load an engine on the first GPU that fits. Raises as `check_fits` does. Never run on a GPU."""
        from builders.tensorrt_session import open_engine

        check_fits(self, engine)
        return open_engine(self._import(), recorder(self.module), engine)

    def load_runtime(self) -> None:
        """Import TensorRT's bindings."""
        self._import()

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:  # noqa: ARG002
        """Time each layer, by TensorRT's own profiler. Never run on a GPU."""
        from builders.tensorrt_profile import profiled
        from builders.tensorrt_session import EngineSession

        with self.open(engine) as session:
            if not isinstance(session, EngineSession):
                raise EngineryError(f"{engine.path.name}: this session has no layers to time")
            return profiled(self._import(), session, inputs, runs)

    def _plan(self, trt: Any, said: Any, request: BuildRequest, model: Path, workdir: Path) -> bytes:
        builder = trt.Builder(said)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._parse(trt, said, network, model)
        config = builder.create_builder_config()
        self._configure(trt, config, request)
        for shapes in request.profiles:
            _add_profile(builder, config, shapes)
        said.messages += use_given(config, workdir) if self.tunes_on_target else []
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            reason = builder_reason(self.title, self.name, said.messages)
            raise StepError(reason, "memory") if ran_out_of_memory(said.messages) else EngineryError(reason)
        if self.tunes_on_target:
            keep_grown(config, workdir)
        return bytes(plan)

    def _parse(self, trt: Any, said: Any, network: Any, model: Path) -> None:
        # It reads from the path, so that external data is found; and says True to some input it could not use.
        parser = trt.OnnxParser(network, said)
        if not parser.parse_from_file(str(model)) or parser.num_errors:
            problems = [parser.get_error(index) for index in range(parser.num_errors)]
            raise ModelError(parser_reason(self.title, problems))
        if network.num_layers == 0:
            raise ModelError(f"{self.title} found no operators in {model.name}; export it again")

    def _configure(self, trt: Any, config: Any, request: BuildRequest) -> None:  # noqa: ARG002 - for the flavours
        if self.workspace_mib:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace_mib << 20)
        if not self.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)

    def _hardware_refusal(self, request: BuildRequest) -> str | None:
        capability = request.target.compute_capability or (0, 0)
        if request.precision == "bf16" and capability == (7, 5):
            return "sm_75 has no bfloat16; use fp16"
        if request.precision == "fp8" and capability < (8, 9):
            return f"{request.target.sm} has no FP8 (e4m3), which begins with sm_89; use int8"
        if request.precision == "int4" and capability == (7, 5):
            return f"{self.title} has no int4 weights on sm_75; use int8 or fp16"
        if request.precision == "int8-dynamic":
            return f"{self.title} takes no activation scales made at run time; use int8 with calibration, or fp8"
        return None

    def _io_refusal(self, request: BuildRequest) -> str | None:
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype not in _SUPPORTED_IO:
                return f"{spec.name!r} is {spec.dtype}, which {self.title} does not take; cast it to float32 or int64"
        for spec in request.inputs:
            dims = [dim for dim in spec.shape if isinstance(dim, str)]
            if dims and not _has_profile(spec.name, request.profiles):
                return f"input {spec.name!r}: dim {dims[0]!r} has no max; {self.name} needs one; add dims.{dims[0]}.max"
        return None

    def _missing(self) -> str | None:
        return None if self.versions() else f"{self.title} is not installed; {self.install}"

    def _check_host(self, target: Target) -> None:
        """Raise EngineryError when this host cannot build for the target."""

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise EngineryError(f"{self.title} cannot be loaded: {error}; {self.install}") from error

    def _bad(self, option: str, words: str) -> InputError:
        return InputError(f"backends.{self.name}.{option}: {words}")


@dataclass(frozen=True)
class TensorRTRTX(_TensorRT):
    """TensorRT for RTX: sm_75, 80, 86, 89, 120 and 121, built on any Linux x86-64 host. Options: see the base class."""

    name: ClassVar[str] = "tensorrt-rtx"
    title: ClassVar[str] = "TensorRT-RTX"
    module: ClassVar[str] = "tensorrt_rtx"
    distributions: ClassVar[tuple[str, ...]] = _wheels("tensorrt-rtx")
    install: ClassVar[str] = "pip install tensorrt-rtx (Linux, x86-64)"

    def _hardware_refusal(self, request: BuildRequest) -> str | None:
        target = request.target
        if target.compute_capability not in _RTX_CAPABILITIES:
            return f"{target.sm} is not a target of TensorRT-RTX; use full tensorrt on a node with that GPU"
        if target.sm == "sm_75" and request.precision == "fp32":
            return "sm_75 has no FP32 GEMM in TensorRT-RTX; use fp16"
        return super()._hardware_refusal(request)

    def _configure(self, trt: Any, config: Any, request: BuildRequest) -> None:
        super()._configure(trt, config, request)
        config.num_compute_capabilities = 1
        capability = request.target.sm.upper().replace("_", "")  # SM89
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)


@dataclass(frozen=True)
class TensorRT(_TensorRT):
    """Full TensorRT, 10.16 and later. Its build was never run: the libraries were not at hand.

    optimization_level: 0 (fast build) to 5 (fast engine).
    hardware_compatibility: 'none', 'same_compute_capability' or 'ampere_plus': wider use of an engine, for some speed.
    """

    name: ClassVar[str] = "tensorrt"
    tunes_on_target: ClassVar[bool] = True
    title: ClassVar[str] = "TensorRT"
    module: ClassVar[str] = "tensorrt"
    distributions: ClassVar[tuple[str, ...]] = _wheels("tensorrt")
    install: ClassVar[str] = "pip install 'enginery[tensorrt]' on a node with that GPU, or use tensorrt-rtx"

    optimization_level: int = 3
    hardware_compatibility: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.optimization_level <= 5:
            raise self._bad("optimization_level", f"{self.optimization_level} is not in 0..5")
        if self.hardware_compatibility not in (known := ("none", "same_compute_capability", "ampere_plus")):
            raise self._bad("hardware_compatibility", f"{self.hardware_compatibility!r} is not one of {known}")

    def timing_place(self) -> tuple[str, str] | None:
        """See `TimingCached`: TensorRT tunes on the first GPU."""
        here, found = cuda.gpus(), self.versions()
        return (here[0].name, found.get(self.name) or max(found.values())) if here and found else None

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """See `TimingCached`."""
        return merged(self._import(), recorder(self.module), older, newer)

    def _configure(self, trt: Any, config: Any, request: BuildRequest) -> None:
        super()._configure(trt, config, request)
        config.builder_optimization_level = self.optimization_level
        level = self.hardware_compatibility.upper()
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)

    def _check_host(self, target: Target) -> None:
        if reason := self.runs(target):
            raise EngineryError(f"TensorRT tunes on the GPU it builds for: {reason}; build on a node that has one")


def check_model(model: Path) -> None:
    """Raise ModelError when the ONNX checker refuses the model. TensorRT's parser accepts empty and garbage files."""
    import onnx

    try:
        onnx.checker.check_model(str(model))
    except Exception as error:  # the checker raises protobuf's, its own and the standard library's classes alike
        raise ModelError(f"{model.name} is no valid ONNX model: {error}; export it again") from error


def _add_profile(builder: Any, config: Any, shapes: ShapeProfile) -> None:
    profile = builder.create_optimization_profile()
    for name, low, best, high in shapes.inputs:
        profile.set_shape(name, low, best, high)
    config.add_optimization_profile(profile)  # what is wrong with it stands in the log, and the build then fails


def _has_profile(name: str, profiles: Iterable[ShapeProfile]) -> bool:
    found = [any(entry[0] == name for entry in shapes.inputs) for shapes in profiles]
    return bool(found) and all(found)
