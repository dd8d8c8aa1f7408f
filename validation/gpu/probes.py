"""Questions that no backend's request asks: does an engine that names no generation run here?

TensorRT for RTX compiles its kernels when an engine is loaded. Left without a compute capability, it builds for 8.0 and
later by its documentation; whether Hopper counts is seen by trying, as with engines for the generations that it names.
"""

import importlib
from pathlib import Path
from typing import Any

from builders.backends import discovery
from enginery.core.digest import digest_of_file
from enginery.core.errors import EngineryError
from enginery.core.types import BuildRequest, Engine
from validation.gpu.devices import Device
from validation.gpu.models import KitModel
from validation.gpu.tasks import Task, model_key, request_for

BACKEND = "tensorrt-rtx"
ANY_GENERATION = "any generation"


def any_generation_task(model: KitModel, device: Device) -> Task | None:
    """The probe, where TensorRT for RTX is installed and the device is a GPU."""
    if device.is_cpu or BACKEND not in discovery.names():
        return None
    backend = discovery.configure(BACKEND, {})
    if not backend.versions():
        return None
    request = request_for(backend, model, device.target)
    return Task(f"{BACKEND} {model_key(model)} {ANY_GENERATION}", model, request)


def build_for_any_generation(request: BuildRequest, model: Path, workdir: Path) -> Engine:
    """An engine without a compute capability. Raises EngineryError where TensorRT for RTX does not build one."""
    trt: Any = importlib.import_module("tensorrt_rtx")
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
