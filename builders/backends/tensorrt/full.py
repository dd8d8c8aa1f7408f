"""Full TensorRT, which tunes on the GPU it builds for. Its build was never run: the libraries were not at hand."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from builders.backends.tensorrt.edition import Flavour, wheels
from builders.backends.tensorrt.layers import kept_layers
from builders.backends.tensorrt.runtime import plugins as libraries
from builders.backends.tensorrt.runtime.opening import Opening
from builders.backends.tensorrt.runtime.refit import refit, serialized
from builders.backends.tensorrt.timing import keep_grown, merged, use_given
from builders.backends.tensorrt.words import recorder
from enginery.core.digest import digest_of_file
from enginery.core.errors import EngineryError
from enginery.core.hardware import cuda
from enginery.core.types import BuildRequest, Engine, Target

_LEVELS = ("none", "same_compute_capability", "ampere_plus")
_VERBOSITY = {"none": "NONE", "names": "LAYER_NAMES_ONLY", "detailed": "DETAILED"}


@dataclass(frozen=True)
class TensorRT(Flavour):
    """Full TensorRT, 10.16 and later. Options besides those of the base class:

    optimization_level: 0 (fast build) to 5 (fast engine).
    hardware_compatibility: 'none', 'same_compute_capability' or 'ampere_plus': wider use of an engine, for some speed.
    version_compatible: whether later releases of TensorRT may run the engine, which carries a runtime of its own then.
    refittable: whether new weights may take the place of the engine's without a build.
    strip_weights: whether the engine's file leaves its weights out, which are read from the ONNX model when it is
    opened; refittable too.
    plugins: shared libraries with plugins, by absolute path, with commas between them.
    layer_information: what the engine tells of its layers: 'none', 'names' or 'detailed' (tactics, formats).
    """

    name: ClassVar[str] = "tensorrt"
    tunes_on_target: ClassVar[bool] = True
    title: ClassVar[str] = "TensorRT"
    module: ClassVar[str] = "tensorrt"
    distributions: ClassVar[tuple[str, ...]] = wheels("tensorrt")
    install: ClassVar[str] = "pip install 'enginery[tensorrt]' on a node with that GPU, or use tensorrt-rtx"

    optimization_level: int = 3
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    refittable: bool = False
    strip_weights: bool = False
    plugins: str = ""
    layer_information: str = "detailed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.optimization_level <= 5:
            raise self._bad("optimization_level", f"{self.optimization_level} is not in 0..5")
        self._one_of("hardware_compatibility", _LEVELS)
        self._one_of("layer_information", tuple(_VERBOSITY))
        for path in libraries.paths(self.plugins):
            if not Path(path).is_absolute():
                raise self._bad("plugins", f"{path!r} is no absolute path; name the library as every worker has it")

    def versions(self) -> dict[str, str]:
        """Versions of the installed wheels, and the digest of each plugin library."""
        found = super().versions()
        return {**found, **libraries.digests(libraries.paths(self.plugins))} if found else {}

    def refuses(self, request: BuildRequest) -> str | None:
        """As the base class, and what its own options cannot do."""
        return super().refuses(request) or self._options_refusal(request)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """As the base class, with what the inspector tells of the layers, where it can, as an extra file."""
        engine = super().build(request, model, workdir)
        if self.layer_information == "none":
            return engine
        path, reason = kept_layers(self._import(), recorder(self.module), engine.path, self._load_plugins)
        if path is None:
            return replace(engine, notes=(*engine.notes, f"layers and tactics are not on record: {reason}"))
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
        from builders.backends.tensorrt.runtime.session import load

        path = workdir / f"refitted{engine.suffix}"
        if self.strip_weights:
            path.write_bytes(engine.path.read_bytes())
        else:
            self._check_host(request.target)
            trt, said = self._import(), recorder(self.module)
            said.messages.clear()
            runtime = trt.Runtime(said)
            loaded = load(runtime, said, engine, self._opening(Opening(0)))
            refit(trt, said, loaded, model)
            path.write_bytes(serialized(trt, loaded, said))
        return Engine(request, path, digest_of_file(path), path.stat().st_size, engine.suffix)

    def timing_place(self) -> tuple[str, str] | None:
        """See `TimingCached`: TensorRT tunes on the first GPU."""
        here, found = cuda.gpus(), super().versions()
        return (here[0].name, found.get(self.name) or max(found.values())) if here and found else None

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """See `TimingCached`."""
        return merged(self._import(), recorder(self.module), older, newer)

    def _prepare(self, builder: Any) -> None:
        self._load_plugins(builder)

    def _load_plugins(self, owner: Any) -> None:
        """Into the registry of a builder or a runtime."""
        if found := libraries.paths(self.plugins):
            libraries.load(owner.get_plugin_registry(), found)

    def _configure(self, trt: Any, config: Any, request: BuildRequest) -> None:
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

    def _begin(self, config: Any, workdir: Path) -> list[tuple[str, str]]:
        return use_given(config, workdir)

    def _end(self, config: Any, workdir: Path) -> None:
        keep_grown(config, workdir)

    def _opening(self, opening: Opening) -> Opening:
        return replace(
            super()._opening(opening),
            host_code=self.version_compatible,
            stripped=self.strip_weights,
            prepare=self._load_plugins,
        )

    def _options_refusal(self, request: BuildRequest) -> str | None:
        capability = request.target.compute_capability or (0, 0)
        if self.hardware_compatibility == "ampere_plus" and capability < (8, 0):
            return f"{request.target.sm} is older than Ampere; hardware_compatibility: ampere_plus begins with sm_80"
        if reason := libraries.missing(libraries.paths(self.plugins), "backends.tensorrt.plugins"):
            return reason
        release = max(super().versions().values(), default="")
        if (self.refittable or self.strip_weights) and release.startswith("11.3."):
            return "TensorRT 11.3 drops GEMM biases of refittable engines (its release notes); install 11.4"
        return None

    def _check_host(self, target: Target) -> None:
        if reason := self.runs(target):
            raise EngineryError(f"TensorRT tunes on the GPU it builds for: {reason}; build on a node that has one")
