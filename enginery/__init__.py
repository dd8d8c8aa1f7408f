"""The public Python API of Enginery, handed on lazily: importing it loads nothing heavy.

::

    import enginery

    spec = enginery.load_spec("model.yaml")          # a checked, frozen spec
    outcome = enginery.build("model.yaml", registry="./registry", targets=["cpu"])
    pulled = enginery.pull("model:stable", registry="./registry", target="auto", dest="engines/")
    client = enginery.Client("s3://models/registry")                                # what serves: docs/guides/client.md
    run = enginery.open_onnx(pulled)                                                # runs an engine of ONNX Runtime
    streams = enginery.Streams.described(run, pulled.description)                   # of a model with state
    generator = enginery.Generator.opened(pulled)                                   # of a decoder: prompts to tokens
    whole = enginery.Ensemble.described(enginery.open_onnx, pulled.description)     # of several graphs
    router = enginery.Router.opened(client.pull_all("model:stable", "engines/"))    # requests to buckets, and fallbacks
    batcher = enginery.Batcher(router, most=32, wait_s=0.005)                       # requests joined to batches
    warm = enginery.warm_start(enginery.pull("model", kind="cache", ...))           # torch.compile out of a cache
    recorder = enginery.Recorder("traffic.jsonl", sampling=0.1)                     # requests, for a canary
    log = enginery.ObservationLog("stable.jsonl", pulled.description)               # what became of them
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginery.client.client import (
        ALL_GENERATIONS,
        Client,
        Command,
        DynamicBatching,
        HealthCommand,
        HealthUrl,
        Machine,
        Policy,
        Post,
        ReportUrl,
        ServingNode,
        Triton,
        pull,
    )
    from enginery.compile_caches.warm_start import warm_start
    from enginery.core.sampling import SamplingSettings
    from enginery.ensembles import Ensemble
    from enginery.generation import Generator
    from enginery.grammars import Grammar
    from enginery.opening import open_onnx
    from enginery.prompts import Prompt
    from enginery.recording.recorder import ObservationLog, Recorder
    from enginery.serving.batcher import Batcher
    from enginery.serving.buckets import RoutedEngine
    from enginery.serving.drift_event import DriftEvent
    from enginery.serving.padding import Padding
    from enginery.serving.router import Router
    from enginery.streams import Streams
    from enginery.user_code.calling import load_function
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
    "Grammar",
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

_CLIENT = "enginery.client.client"

_HOMES = {
    **dict.fromkeys(
        (
            "ALL_GENERATIONS",
            "Client",
            "Command",
            "DynamicBatching",
            "HealthCommand",
            "HealthUrl",
            "Machine",
            "Policy",
            "Post",
            "ReportUrl",
            "ServingNode",
            "Triton",
            "pull",
        ),
        _CLIENT,
    ),
    "Batcher": "enginery.serving.batcher",
    "DriftEvent": "enginery.serving.drift_event",
    "Ensemble": "enginery.ensembles",
    "Generator": "enginery.generation",
    "Grammar": "enginery.grammars",
    "ObservationLog": "enginery.recording.recorder",
    "Padding": "enginery.serving.padding",
    "Prompt": "enginery.prompts",
    "Recorder": "enginery.recording.recorder",
    "RoutedEngine": "enginery.serving.buckets",
    "Router": "enginery.serving.router",
    "SamplingSettings": "enginery.core.sampling",
    "Streams": "enginery.streams",
    "build": "pipeline.api",
    "load_function": "enginery.user_code.calling",
    "load_spec": "pipeline.spec.model",
    "open_onnx": "enginery.opening",
    "warm_start": "enginery.compile_caches.warm_start",
}
# What needs the packages above this one, of which a team may have its own of the same name.
_ABOVE = ("build", "load_spec")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'enginery' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    if name in _ABOVE:
        from enginery.rooms import check_own

        check_own()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
