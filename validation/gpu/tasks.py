"""What the kit tries: every backend on every model of the kit, and what was built for other generations on this one.

The backends are asked, and nothing here knows which there are: not installed, not this kind of target, refused with
its reason; what is left is tried.

Questions that no backend's request asks: does an engine that names no generation run here?

TensorRT for RTX compiles its kernels when an engine is loaded. Left without a compute capability, it builds for 8.0 and
later by its documentation; whether Hopper counts is seen by trying, as with engines for the generations that it names.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builders.backends import discovery
from enginery.core.digest import digest_of_file
from enginery.core.errors import EngineryError
from enginery.core.hardware.targets import GENERATIONS
from enginery.core.types import Backend, BuildRequest, Engine, Scalar, Target
from validation.gpu.devices import KitDevice
from validation.gpu.models import KitModel
from validation.gpu.results import Skipped

# An option that says whether a session replays a CUDA graph: both are measured where a backend has it.


@dataclass(frozen=True)
class BuildTask:
    """One build and its runs. request: for the target that the engine is built for, which may be none of this machine.

    options: where they are not the defaults.
    """

    name: str
    model: KitModel
    request: BuildRequest
    options: Mapping[str, Scalar] = field(default_factory=dict)


def own_tasks(models: Sequence[KitModel], device: KitDevice, only: Sequence[str] = ()) -> Iterator[BuildTask | Skipped]:
    """Each backend for this very device. only: names of backends; empty for all."""
    for name in choose_backends(only):
        backend = discovery.configure(name, {})
        if reason := explain_absence(backend, device.target):
            yield Skipped(name, "", name, "", device.target.name, reason)
            continue
        for model in models:
            for options in _variants(backend, device):
                yield _task(discovery.configure(name, options), model, device.target, options)


def other_tasks(model: KitModel, device: KitDevice, only: Sequence[str] = ()) -> Iterator[BuildTask | Skipped]:
    """Engines for other generations, tried on this GPU all the same: which capabilities really run is known by trying.

    Of backends that build without their target's GPU alone. None where the device is the CPU.
    """
    if device.is_cpu:
        return
    for name in choose_backends(only):
        backend = discovery.configure(name, {})
        if backend.capabilities.tunes_on_target or explain_absence(backend, device.target):
            continue
        for generation in GENERATIONS:
            if generation.compute_capability != device.target.compute_capability:
                yield _task(backend, model, Target(generation.sm, generation.compute_capability), {})


def choose_backends(only: Sequence[str]) -> list[str]:
    """Names of the registered backends, or those of them that are asked for. Raises UnknownNameError for another."""
    for name in only:
        discovery.load(name)
    return list(only) or discovery.names()


def explain_absence(backend: Backend, target: Target) -> str:
    """Why a backend has nothing to do here; empty when it has."""
    if not backend.serves(target):
        return f"builds no engines for {target.name}"
    return "" if backend.versions() else f"not installed; {backend.install}"


def request_for(backend: Backend, model: KitModel, target: Target) -> BuildRequest:
    """The kit's request: the whole range of the batch in one profile."""
    from enginery.core.digest import digest_of_file

    return BuildRequest(
        model=digest_of_file(model.path),
        precision=model.precision,
        target=target,
        backend=backend.name,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=(model.profile,),
        options=discovery.options_of(backend),
        toolchain=discovery.toolchain_of(backend, target),
    )


def model_key(model: KitModel) -> str:
    """'mlp fp16'."""
    return f"{model.name} {model.precision}"


def _task(backend: Backend, model: KitModel, target: Target, options: Mapping[str, Scalar]) -> BuildTask | Skipped:
    request = request_for(backend, model, target)
    words = " ".join(f"{name}={value}" for name, value in options.items())
    name = " ".join(filter(None, (backend.name, model_key(model), target.name, words)))
    if reason := backend.refuses(request):
        return Skipped(name, model_key(model), backend.name, model.precision, target.name, reason, refused=True)
    return BuildTask(name, model, request, options)


def _variants(backend: Backend, device: KitDevice) -> list[dict[str, Scalar]]:
    """The defaults; and the other way about CUDA graphs, where the backend has the option."""
    option = backend.capabilities.options.cuda_graphs
    if device.is_cpu or not option:
        return [{}]
    return [{}, {option: not dict(discovery.options_of(backend))[option]}]


BACKEND = "tensorrt-rtx"
ANY_GENERATION = "any generation"


def any_generation_task(model: KitModel, device: KitDevice) -> BuildTask | None:
    """The probe, where TensorRT for RTX is installed and the device is a GPU."""
    if device.is_cpu or BACKEND not in discovery.names():
        return None
    backend = discovery.configure(BACKEND, {})
    if not backend.versions():
        return None
    request = request_for(backend, model, device.target)
    return BuildTask(f"{BACKEND} {model_key(model)} {ANY_GENERATION}", model, request)


def build_for_any_generation(request: BuildRequest, model: Path, workdir: Path) -> Engine:
    """An engine without a compute capability. Raises EngineryError where TensorRT for RTX does not build one."""
    trt = importlib.import_module("tensorrt_rtx")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(model)):
        raise EngineryError(f"TensorRT for RTX does not parse {model.name}: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, low, best, high in request.profiles[0].inputs:
        profile.set_shape(name, low, best, high)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineryError("TensorRT for RTX builds no engine without a compute capability; its log says why")
    path = workdir / f"engine.{BACKEND}"
    path.write_bytes(bytes(plan))
    return Engine(request, path, digest_of_file(path), path.stat().st_size, path.suffix)
