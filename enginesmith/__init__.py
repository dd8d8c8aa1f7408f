"""The public Python API of Enginesmith, handed on lazily: importing it loads nothing heavy.

::

    import enginesmith

    spec = enginesmith.load_spec("model.yaml")          # a checked, frozen spec
    outcome = enginesmith.build("model.yaml", registry="./registry", targets=["cpu"])
    pulled = enginesmith.pull("model:stable", registry="./registry", target="auto", dest="engines/")
    client = enginesmith.Client("s3://models/registry")  # what serves: docs/guides/client.md
    run = enginesmith.open_onnx(pulled)                                                # runs an engine of ONNX Runtime
    streams = enginesmith.Streams.described(run, pulled.description)                   # of a model with state
    generator = enginesmith.Generator.opened(pulled)                                   # of a decoder: prompts to tokens
    whole = enginesmith.Ensemble.described(enginesmith.open_onnx, pulled.description)     # of several graphs
    router = enginesmith.Router.opened(client.pull_all("model:stable", "engines/"))    # requests to buckets
    batcher = enginesmith.Batcher(router, most=32, wait_s=0.005)                       # requests joined to batches
    warm = enginesmith.warm_start(pulled)                    # torch.compile out of a cache that is attached
    recorder = enginesmith.Recorder("traffic.jsonl", sampling=0.1)                     # requests, for a canary
    log = enginesmith.ObservationLog("stable.jsonl", pulled.description)               # what became of them
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginesmith.client.client import Client, pull
    from enginesmith.client.layouts.base import ALL_GENERATIONS
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.client.layouts.triton_config import DynamicBatching
    from enginesmith.client.resolve import Policy
    from enginesmith.client.watching.server import Command, HealthCommand, HealthUrl, Post, ReportUrl
    from enginesmith.compile_caches.warm_start import warm_start
    from enginesmith.core.hardware.machine import Machine
    from enginesmith.core.state import Padding
    from enginesmith.ensembles import Ensemble
    from enginesmith.generation import Generator, Prompt, SamplingSettings
    from enginesmith.opening import open_onnx
    from enginesmith.recording.recorder import ObservationLog, Recorder
    from enginesmith.registry.rollouts.state import ServingNode
    from enginesmith.serving.batcher import Batcher
    from enginesmith.serving.buckets import RoutedEngine
    from enginesmith.serving.drift import DriftEvent
    from enginesmith.serving.router import Router
    from enginesmith.streams import Streams
    from enginesmith.user_code.channel import load_function
    from pipeline.api import build
    from pipeline.spec.model import load_spec

__all__ = [
    "ALL_GENERATIONS",
    "Batcher",
    "Client",
    "Command",
    "DriftEvent",
    "DynamicBatching",
    "Ensemble",
    "Generator",
    "HealthCommand",
    "HealthUrl",
    "Machine",
    "ObservationLog",
    "Padding",
    "Policy",
    "Post",
    "Prompt",
    "Recorder",
    "ReportUrl",
    "RoutedEngine",
    "Router",
    "SamplingSettings",
    "ServingNode",
    "Streams",
    "Triton",
    "build",
    "load_function",
    "load_spec",
    "open_onnx",
    "pull",
    "warm_start",
]

_HOMES = {
    "ALL_GENERATIONS": "enginesmith.client.layouts.base",
    "Client": "enginesmith.client.client",
    "Command": "enginesmith.client.watching.server",
    "DynamicBatching": "enginesmith.client.layouts.triton_config",
    "HealthCommand": "enginesmith.client.watching.server",
    "HealthUrl": "enginesmith.client.watching.server",
    "Machine": "enginesmith.core.hardware.machine",
    "Policy": "enginesmith.client.resolve",
    "Post": "enginesmith.client.watching.server",
    "ReportUrl": "enginesmith.client.watching.server",
    "ServingNode": "enginesmith.registry.rollouts.state",
    "Triton": "enginesmith.client.layouts.triton",
    "pull": "enginesmith.client.client",
    "Batcher": "enginesmith.serving.batcher",
    "DriftEvent": "enginesmith.serving.drift",
    "Ensemble": "enginesmith.ensembles",
    "Generator": "enginesmith.generation",
    "ObservationLog": "enginesmith.recording.recorder",
    "Padding": "enginesmith.serving.buckets",
    "Prompt": "enginesmith.generation",
    "Recorder": "enginesmith.recording.recorder",
    "RoutedEngine": "enginesmith.serving.buckets",
    "Router": "enginesmith.serving.router",
    "SamplingSettings": "enginesmith.generation",
    "Streams": "enginesmith.streams",
    "build": "pipeline.api",
    "load_function": "enginesmith.user_code.channel",
    "load_spec": "pipeline.spec.model",
    "open_onnx": "enginesmith.opening",
    "warm_start": "enginesmith.compile_caches.warm_start",
}
# What needs the packages above this one, of which a team may have its own of the same name.
_ABOVE = ("build", "load_spec")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'enginesmith' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    if name in _ABOVE:
        from enginesmith.rooms import check_own

        check_own()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
