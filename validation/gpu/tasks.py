"""The tasks of the kit: every backend on every model of the kit, and engines that were built for other generations.

Backends are found by discovery. A task that a backend cannot do is `Skipped` with the reason: not installed, not this
kind of target, or refused.

One task is outside of the backends' requests: an engine for no generation in particular. TensorRT for RTX compiles its
kernels when an engine is loaded. Without a compute capability it builds for 8.0 and later by its documentation; whether
such an engine runs on Hopper is found out by trying.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builders.backends import discovery
from enginesmith.core.digest import digest_of_file
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.gpu_generations import GENERATIONS
from enginesmith.core.types import Backend, BuildRequest, Engine, Scalar, Target
from validation.gpu.devices import KitDevice
from validation.gpu.models import KitModel
from validation.gpu.results import Skipped

# The backend that builds engines for no generation in particular, and the name of that target in results.
BACKEND = "tensorrt-rtx"
ANY_GENERATION = "any generation"


@dataclass(frozen=True)
class BuildTask:
    """An engine to build and run. request: its target may be another one than this machine's.

    options: of the backend, those that are not the defaults.
    """

    name: str
    model: KitModel
    request: BuildRequest
    options: Mapping[str, Scalar] = field(default_factory=dict)


def own_tasks(models: Sequence[KitModel], device: KitDevice, only: Sequence[str] = ()) -> Iterator[BuildTask | Skipped]:
    """The tasks of each backend for this device. only: names of backends; empty for all."""
    for name in choose_backends(only):
        backend = discovery.configure(name, {})
        if reason := explain_absence(backend, device.target):
            yield Skipped(name, "", name, "", device.target.name, reason)
            continue
        # The defaults, and with CUDA graphs switched where the backend has that option.
        variants: list[dict[str, Scalar]] = [{}]
        if (option := backend.capabilities.options.cuda_graphs) and not device.is_cpu:
            variants.append({option: not dict(discovery.options_of(backend))[option]})
        for model in models:
            for options in variants:
                yield _task(discovery.configure(name, options), model, device.target, options)


def other_tasks(model: KitModel, device: KitDevice, only: Sequence[str] = ()) -> Iterator[BuildTask | Skipped]:
    """Engines for other generations, to see which of them run on this GPU; none where the device is the CPU.

    Of those backends alone that build without their target's GPU.
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
    """The names `only`, or those of all registered backends. Raises UnknownNameError for one that is not registered."""
    for name in only:
        discovery.load(name)
    return list(only) or discovery.names()


def explain_absence(backend: Backend, target: Target) -> str:
    """Why a backend builds nothing for this target on this machine; '' where it does."""
    if not backend.serves(target):
        return f"builds no engines for {target.name}"
    return "" if backend.versions() else f"not installed; {backend.install}"


def request_for(backend: Backend, model: KitModel, target: Target) -> BuildRequest:
    """The request to build a model, with the whole range of the batch in one profile."""
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
    """The name of a model in results: 'mlp fp16'."""
    return f"{model.name} {model.precision}"


def _task(backend: Backend, model: KitModel, target: Target, options: Mapping[str, Scalar]) -> BuildTask | Skipped:
    request = request_for(backend, model, target)
    words = " ".join(f"{name}={value}" for name, value in options.items())
    name = " ".join(filter(None, (backend.name, model_key(model), target.name, words)))
    if reason := backend.refuses(request):
        return Skipped(name, model_key(model), backend.name, model.precision, target.name, reason, refused=True)
    return BuildTask(name, model, request, options)


def any_generation_task(model: KitModel, device: KitDevice) -> BuildTask | None:
    """The task of an engine for no generation in particular; None without TensorRT for RTX, or on the CPU."""
    if device.is_cpu or BACKEND not in discovery.names():
        return None
    backend = discovery.configure(BACKEND, {})
    if not backend.versions():
        return None
    request = request_for(backend, model, device.target)
    return BuildTask(f"{BACKEND} {model_key(model)} {ANY_GENERATION}", model, request)


def build_for_any_generation(request: BuildRequest, model: Path, workdir: Path) -> Engine:
    """Build an engine without a compute capability. Raises EnginesmithError where TensorRT for RTX does not build
    one."""
    trt = importlib.import_module("tensorrt_rtx")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(model)):
        raise EnginesmithError(f"TensorRT for RTX does not parse {model.name}: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, low, best, high in request.profiles[0].inputs:
        profile.set_shape(name, low, best, high)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EnginesmithError("TensorRT for RTX builds no engine without a compute capability; its log says why")
    path = workdir / f"engine.{BACKEND}"
    path.write_bytes(bytes(plan))
    return Engine(request, path, digest_of_file(path), path.stat().st_size, path.suffix)
