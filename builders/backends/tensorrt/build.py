"""Builds TensorRT engines: what both editions share, and the build itself."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from builders.backends.discovery import check_compatible, find_compatible_gpu, load_runtime
from builders.backends.installed_versions import versions_of
from builders.backends.optional_methods import GIVEN, GROWN, RunProfile
from builders.backends.request_checks import check_choice, check_not_negative
from builders.backends.tensorrt.library import Opening, builder_reason, clean, failure_kind, parser_reason, recorder
from builders.execution.process import enter_phase, heed_stop
from builders.onnx_graphs.bodies import check_model
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.errors import EnginesmithError, InputError, ModelError, StepError
from enginesmith.core.hardware import cuda
from enginesmith.core.requirements import Requirement, Runtime, driver_for, for_target
from enginesmith.core.types import (
    IN_BLOCKS,
    NARROW_FLOATS,
    BuildRequest,
    Engine,
    QuantizationScheme,
    Session,
    ShapeProfile,
    Target,
    Tensors,
    Untyped,
)

# Calls of TensorRT's builder: the network, its profiles, the progress, the timing cache, the account of the layers.
#
# Timing caches and the account of the layers are full TensorRT's; neither was run on a GPU.
#
# A timing cache, what the tuner has measured on this GPU, is good for one product, driver and version of TensorRT; with
# another it is an error to some releases (NVIDIA/TensorRT#2144) and useless to the rest. So caches are kept by these
# three (`TimingCached.timing_place`), and one that TensorRT refuses all the same is left out, with a note. A cache
# makes builds quicker and not reproducible (NVIDIA/TensorRT#4798): it is no part of a build key.

# Seconds between two questions whether to stop, and between two reports of the phase (`monitor`).
_ASK_S = 0.2
_TELL_S = 2.0
# Of the inspector's JSON; more is not kept beside an engine.
MAX_BYTES = 64 << 20
# What the bindings raise for a cache that TensorRT does not take or give: a null pointer of its own is a TypeError, of
# which an attribute is an AttributeError.
_DECLINED = (RuntimeError, ValueError, TypeError, AttributeError)


def parse_network(trt: Untyped, logger: Untyped, builder: Untyped, model: Path, edition: tuple[str, str]) -> Untyped:
    """A strongly typed network of the model. edition: title and name of the backend, for errors.

    Raises ModelError naming node, operator and reason. The parser gets the path, so that it finds external data; for
    some files that it cannot use it returns True, so that its errors and the network are checked too.
    """
    # Strong typing is a choice in TensorRT 10. Later releases and RTX have nothing else and deprecate the flag.
    has_flag = trt.__version__.startswith("10.")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if has_flag else 0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)) or parser.num_errors:
        problems = [parser.get_error(index) for index in range(parser.num_errors)]
        raise ModelError(parser_reason(*edition, problems))
    if network.num_layers == 0:
        raise ModelError(f"{edition[0]} found no operators in {model.name}; export it again")
    return network


def has_profile(name: str, profiles: Iterable[ShapeProfile]) -> bool:
    """Whether there are profiles and each has shapes for this input."""
    profile_flags = [any(entry[0] == name for entry in profile.inputs) for profile in profiles]
    return bool(profile_flags) and all(profile_flags)


def monitor(trt: Untyped, asked_to_stop: Callable[[], bool], tell: Callable[[str], None]) -> Untyped:
    """An `IProgressMonitor` that reports build phases and cancels the build on request. It must outlive the config.

    TensorRT calls it for every step of every phase, thousands of times a second in some, and a slow one slows the build
    (pytorch/TensorRT#3215). So a step costs one reading of the clock; the phase is reported every `_TELL_S` and
    `asked_to_stop` is called every `_ASK_S`. Steps are not counted: they cover little of a build.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self._asked_at = self._told_at = 0.0
            self._phase = self._told = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self._phase = phase_name

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002
            now = time.monotonic()
            if now - self._asked_at >= _ASK_S:
                self._asked_at = now
                self.stopped = self.stopped or asked_to_stop()
                if self._phase != self._told and now - self._told_at >= _TELL_S:
                    self._told, self._told_at = self._phase, now
                    tell(f"compiling: {self._phase[:80].lower()}")
            return not self.stopped

    return Monitor()


def use_given(config: Untyped, workdir: Path) -> list[tuple[str, str]]:
    """Give the tuner WORKDIR/timing.cache, else an empty cache to fill; (severity, text) if TensorRT refuses that."""
    path = workdir / GIVEN
    cache = path.read_bytes() if path.is_file() else b""
    reason = _set(config, cache)
    if not (cache and reason):
        return []
    _set(config, b"")
    return [("WARNING", f"the timing cache of this GPU was not used, and a new one was started: {reason}")]


def keep_grown(config: Untyped, workdir: Path) -> None:
    """Write the tuner's grown cache to WORKDIR/timing.grown; nothing where TensorRT gives none: the engine is there."""
    with suppress(*_DECLINED):
        cache = bytes(config.get_timing_cache().serialize())
        (workdir / GROWN).write_bytes(cache)


def merge_caches(trt: Untyped, logger: Untyped, old_cache: bytes, new_cache: bytes) -> bytes:
    """One cache with the content of both. Raises EnginesmithError when TensorRT does not merge them."""
    reason = "TensorRT does not merge these timing caches; the newer one alone is kept"
    try:
        config = trt.Builder(logger).create_builder_config()
        older_cache, newer_cache = config.create_timing_cache(old_cache), config.create_timing_cache(new_cache)
        is_merged = older_cache is not None and newer_cache is not None and older_cache.combine(newer_cache, False)
        merged_cache = bytes(older_cache.serialize()) if is_merged else None
    except _DECLINED as error:
        raise EnginesmithError(f"{reason} ({error})") from error
    if merged_cache is None:
        raise EnginesmithError(reason)
    return merged_cache


def _set(config: Untyped, data: bytes) -> str:
    """Why TensorRT does not take `data` as the timing cache; '' when it does."""
    try:
        cache = config.create_timing_cache(data)
        is_accepted = cache is not None and config.set_timing_cache(cache, False)
    except _DECLINED as error:
        return str(error)
    return "" if is_accepted else "TensorRT refuses it (another version, GPU or driver, or damaged)"


def kept_layers(
    trt: Untyped, logger: Untyped, engine: Path, prepare: Callable[[Untyped], None]
) -> tuple[Path | None, str]:
    """The engine inspector's JSON in a file beside the engine (names, types, formats, tactics), or why there is none.

    The inspector needs a loaded engine, hence the GPU, and memory on it beside the builder's. An engine without the
    JSON is as good, so a failure is returned as a reason. prepare: called with the runtime first.
    """
    message_count = len(logger.messages)
    runtime = trt.Runtime(logger)
    prepare(runtime)
    runtime.engine_host_code_allowed = True  # it was built in this process
    cuda_engine = runtime.deserialize_cuda_engine(engine.read_bytes())
    inspector = cuda_engine and cuda_engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON) if inspector else ""
    errors = [clean(message) for level, message in logger.messages[message_count:] if "ERROR" in level]
    del logger.messages[message_count:]
    if not text:
        return None, "; ".join(dict.fromkeys(errors)) or "TensorRT tells nothing"
    if len(text) > MAX_BYTES:
        return None, f"it takes {len(text)} bytes; the limit is {MAX_BYTES}"
    try:
        document = json.loads(text)
    except ValueError as error:
        return None, f"TensorRT's JSON cannot be read: {error}"
    path = engine.with_name("layers.json")
    path.write_text(json.dumps(document, sort_keys=True))
    return path, ""


# Both editions have these.
OPTIONS = SharedOptions(workspace_mib="workspace_mib", cuda_graphs="cuda_graphs", wide_profile=("profiles", "wide"))
# The first compute capability that has a precision.
LEAST = {"bf16": (8, 0), "fp8": (8, 9), "mxfp8": (8, 9), "nvfp4": (10, 0), "nvfp4-weights": (10, 0)}
# Names of precisions in messages, and the precision to use on a generation without them.
_NARROW = {"fp8": ("FP8 (e4m3)", "int8"), "mxfp8": ("MXFP8", "int8")}
_SUPPORTED_IO = {"float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"}


def wheels(api: str) -> tuple[str, ...]:
    """Names of the distributions that may make up an edition: `api`, and bindings and libraries by CUDA version."""
    return (api, *(f"{api}-{tag}-{kind}" for tag in ("cu12", "cu13") for kind in ("bindings", "libs")))


@dataclass(frozen=True)
class TensorRTEdition:
    """Base class of both editions.

    workspace_mib: scratch memory that one operator may use on the GPU, in MiB; 0 is no limit.
    tf32: whether fp32 operators may round their inputs to TF32 (10 mantissa bits) from sm_80 on. TensorRT's default;
    off here, because an fp32 engine is proven against fp32 limits.
    profiles: 'per-bucket' has one optimization profile for each bucket of the dims, 'wide' one that spans them all.
    weight_streaming: whether weights may stay in the host's memory, and stream to the GPU as they are needed.
    weight_budget_mib: of streamed weights, how much the GPU keeps, in MiB; 0 leaves it to TensorRT.
    cuda_graphs: whether a session replays a CUDA graph for each shape it has seen.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 4
    title: ClassVar[str]
    runtime: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    # Symmetric int8, biases in floating point (TensorRT refuses an int32 DequantizeLinear), the rest in fp16.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
    capabilities: ClassVar[Capabilities]

    workspace_mib: int = 0
    tf32: bool = False
    profiles: str = "per-bucket"
    weight_streaming: bool = False
    weight_budget_mib: int = 0
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        check_choice(self, "profiles", ("per-bucket", "wide"))
        check_not_negative(self, "workspace_mib")
        check_not_negative(self, "weight_budget_mib")
        if self.weight_budget_mib and not self.weight_streaming:
            raise self._bad("weight_budget_mib", "it limits streamed weights only; set weight_streaming: true")

    def serves(self, target: Target) -> bool:
        """Whether the target is a GPU."""
        return not target.is_cpu

    def versions(self) -> dict[str, str]:
        """Versions of the installed wheels: the API, its bindings and its libraries."""
        return versions_of(*self.distributions)

    def refuses(self, request: BuildRequest) -> str | None:
        """CPU targets, generations and precisions that the hardware or this edition lacks, I/O types and shapes that it
        cannot take, and everything where it is not installed; in that order."""
        if not self.serves(request.target):
            return f"{self.name} compiles for GPUs, not for {request.target.name}; use onnxruntime"
        if reason := self._hardware_refusal(request) or self._io_refusal(request):
            return reason
        return None if self.versions() else f"{self.title} is not installed; {self.install}"

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """A GPU of that compute capability, the release that built it (by any of its wheels), and a driver."""
        toolchain = dict(request.toolchain)
        return (for_target(request.target), self._runtime(toolchain), *driver_for(toolchain))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.<suffix>.

        Raises ModelError when the model is invalid or an operator is not supported (node, operator, reason), and
        EnginesmithError with TensorRT's words and a remedy when the build itself fails: StepError of kind 'memory' when
        memory was short, 'no-node' when it needs a GPU and this host has none, 'cancelled' when it was asked to end.
        """
        from builders.onnx_graphs.weights import with_dequantized_weights

        self._check_host(request.target)
        check_model(model)  # TensorRT's parser accepts empty and garbage files
        from builders.backends.known_faults import without_faults

        model, fault_notes = without_faults(request, with_dequantized_weights(model, workdir), workdir)
        trt = load_runtime(self)
        log = recorder(self.runtime)
        log.messages.clear()
        path = workdir / f"engine.{self.name}"
        path.write_bytes(self._plan(trt, log, request, model, workdir))
        notes = dict.fromkeys(clean(text) for level, text in log.messages if level == "WARNING")
        return Engine.of_file(self, request, path, (*fault_notes, *notes))

    def runs(self, target: Target) -> str | None:
        """Why engines for that target cannot run here: a CPU, or no GPU of its compute capability. None if they can."""
        if target.is_cpu:
            return f"{self.name} engines run on GPUs"
        return cuda.explain_missing_gpu(target)

    def open(self, engine: Engine) -> AbstractContextManager[Session]:
        """Load an engine on the first GPU that fits. Raises as `check_compatible`, before that. Never run on a GPU."""
        from builders.backends.tensorrt.session import open_engine

        check_compatible(self, engine)
        request = engine.request
        gpu = find_compatible_gpu(self.requires(request), request.target, cuda.gpus())
        if gpu is None:
            raise EnginesmithError(f"{engine.path.name}: the GPU chosen for it is no longer available; run it again")
        opening = self._configure_opening(Opening(gpu.index))
        return open_engine(load_runtime(self), recorder(self.runtime), engine, opening)

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:  # noqa: ARG002
        """Time each layer by TensorRT's profiler. Never run on a GPU. Raises EnginesmithError for another session."""
        from builders.backends.tensorrt.session import EngineSession, profile_layers

        with self.open(engine) as session:
            if not isinstance(session, EngineSession):
                raise EnginesmithError(f"{engine.path.name}: this session has no layers to time")
            return profile_layers(load_runtime(self), session, inputs, runs)

    def _runtime(self, toolchain: Mapping[str, str]) -> Runtime:
        """The release that built an engine, as a requirement of it."""
        packages = tuple(name for name in self.distributions if name != self.name)
        release = next((toolchain[name] for name in (self.name, *packages) if name in toolchain), "")
        return Runtime(self.name, release, self.title, packages=packages)

    def _plan(self, trt: Untyped, logger: Untyped, request: BuildRequest, model: Path, workdir: Path) -> bytes:
        """The serialized engine. logger: TensorRT's, with the messages of this build."""
        builder = trt.Builder(logger)
        self._prepare(builder, model)
        network = parse_network(trt, logger, builder, model, (self.title, self.name))
        build_monitor = monitor(trt, heed_stop(), enter_phase)
        config = builder.create_builder_config()
        config.progress_monitor = build_monitor
        self._configure(trt, config, request)
        # A profile that TensorRT cannot use fails the build.
        for shapes in request.profiles:
            profile = builder.create_optimization_profile()
            for name, low, opt, high in shapes.inputs:
                profile.set_shape(name, low, opt, high)
            config.add_optimization_profile(profile)
        logger.messages += self._begin(config, workdir)
        plan = builder.build_serialized_network(network, config)
        self._end(config, workdir)
        if plan is not None:
            return bytes(plan)
        if build_monitor.stopped:
            raise StepError(f"{self.title} was cancelled", "cancelled")
        reason = builder_reason(self.title, self.name, logger.messages)
        raise StepError(reason, kind) if (kind := failure_kind(logger.messages)) else EnginesmithError(reason)

    def _prepare(self, builder: Untyped, model: Path) -> None:
        """Set up the builder before the model is parsed; for editions."""

    def _configure(self, trt: Untyped, config: Untyped, request: BuildRequest) -> None:  # noqa: ARG002 - for editions
        if self.workspace_mib:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace_mib << 20)
        if not self.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)
        if self.weight_streaming:
            config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)

    def _begin(self, config: Untyped, workdir: Path) -> list[tuple[str, str]]:  # noqa: ARG002 - for editions
        """Give the tuner what earlier builds measured; (severity, text) of warnings. For editions."""
        return []

    def _end(self, config: Untyped, workdir: Path) -> None:
        """Keep what the tuner measured, also of a build that failed; for editions."""

    def _configure_opening(self, opening: Opening) -> Opening:
        """`opening` with this edition's options."""
        budget_bytes = self.weight_budget_mib << 20 if self.weight_streaming else None
        return replace(opening, streamed_budget_bytes=budget_bytes, cuda_graphs=self.cuda_graphs)

    def _hardware_refusal(self, request: BuildRequest) -> str | None:
        capability = request.target.compute_capability or (0, 0)
        sm = "sm_{}{}".format(*capability)
        if request.precision == "bf16" and capability < LEAST["bf16"]:
            return f"{sm} has no bfloat16; use fp16"
        if request.precision in NARROW_FLOATS and capability < (floor := LEAST[request.precision]):
            first_sm = "sm_{}{}".format(*floor)
            kind, choice = _NARROW.get(request.precision, ("NVFP4", "fp8" if capability >= LEAST["fp8"] else "int8"))
            return f"{sm} has no {kind}, which begins with {first_sm}; use {choice}"
        if request.precision in IN_BLOCKS and capability == (7, 5):
            return f"{self.title} has no {request.precision} weights on sm_75; use int8 or fp16"
        if request.precision == "int8-dynamic":
            return f"{self.title} supports no activation scales computed at run time; use int8 with calibration, or fp8"
        return None

    def _io_refusal(self, request: BuildRequest) -> str | None:
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype not in _SUPPORTED_IO:
                return f"{spec.name!r} is {spec.dtype}, which {self.title} does not take; cast it to float32 or int64"
        for spec in request.inputs:
            dims = [dim for dim in spec.shape if isinstance(dim, str)]
            if dims and not has_profile(spec.name, request.profiles):
                return f"input {spec.name!r}: dim {dims[0]!r} has no max; {self.name} needs one; add dims.{dims[0]}.max"
        return None

    def _check_host(self, target: Target) -> None:
        """Raise EnginesmithError when this host cannot build for the target."""

    def _bad(self, option: str, words: str) -> InputError:
        return InputError(f"backends.{self.name}.{option}: {words}")
