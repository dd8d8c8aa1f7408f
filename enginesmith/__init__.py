"""The public Python API of Enginesmith. Importing it loads nothing heavy: each name is imported on its first use.

>>> import enginesmith, numpy as np
>>> pulled = enginesmith.pull("tiny:candidate", registry="registry", target="cpu", precision="int8", dest="engines")
>>> pulled
Pulled('tiny-1-cpu-int8.onnx': cpu int8 onnxruntime of tiny@1, proven)
>>> run = enginesmith.open_onnx(pulled)
>>> run({"x": np.zeros((2, 8), np.float32)})["logits"].shape
(2, 10)

The other names, each with the module or guide that shows it::

    spec = enginesmith.load_spec("model.yaml")                                         # a checked, frozen spec
    outcome = enginesmith.build("model.yaml", registry="./registry", targets=["cpu"])  # pipeline.api
    client = enginesmith.Client("s3://models/registry")                                # docs/guides/client.md
    streams = enginesmith.Streams.described(run, pulled.description)                   # of a model with state
    generator = enginesmith.Generator.opened(pulled)                                   # of a decoder: prompts to tokens
    whole = enginesmith.Ensemble.described(enginesmith.open_onnx, pulled.description)  # of several graphs
    router = enginesmith.Router.opened(client.pull_all("model:stable", "engines/"))    # requests to buckets
    batcher = enginesmith.Batcher(router, most=32, wait_s=0.005)                       # requests joined to batches
    recorder = enginesmith.Recorder("traffic.jsonl", sampling=0.1)                     # requests, for a canary

Every error that a caller may want to handle is in `enginesmith.errors`, below `EnginesmithError`. What configures the
classes above is in the packages `enginesmith.client`, `serving`, `recording`, `generation`, `compile_caches` and
`user_code`; each is loaded on its first use, too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginesmith import client as client
    from enginesmith import compile_caches as compile_caches
    from enginesmith import generation as generation
    from enginesmith import recording as recording
    from enginesmith import serving as serving
    from enginesmith import user_code as user_code
    from enginesmith.client.client import Client as Client
    from enginesmith.client.client import pull as pull
    from enginesmith.client.pull import Pulled as Pulled
    from enginesmith.core import errors as errors
    from enginesmith.core.errors import EnginesmithError as EnginesmithError
    from enginesmith.core.hardware.machine import Machine as Machine
    from enginesmith.ensembles import Ensemble as Ensemble
    from enginesmith.generation import Generator as Generator
    from enginesmith.opening import open_onnx as open_onnx
    from enginesmith.recording.recorder import Recorder as Recorder
    from enginesmith.serving.batcher import Batcher as Batcher
    from enginesmith.serving.router import Router as Router
    from enginesmith.streams import Streams as Streams
    from pipeline.api import build as build
    from pipeline.spec.model import load_spec as load_spec

    __version__: str

# The public names, and the module of each.
_PUBLIC = {
    "Batcher": "enginesmith.serving.batcher",
    "Client": "enginesmith.client.client",
    "EnginesmithError": "enginesmith.core.errors",
    "Ensemble": "enginesmith.ensembles",
    "Generator": "enginesmith.generation",
    "Machine": "enginesmith.core.hardware.machine",
    "Pulled": "enginesmith.client.pull",
    "Recorder": "enginesmith.recording.recorder",
    "Router": "enginesmith.serving.router",
    "Streams": "enginesmith.streams",
    "build": "pipeline.api",
    "errors": "enginesmith.core.errors",
    "load_spec": "pipeline.spec.model",
    "open_onnx": "enginesmith.opening",
    "pull": "enginesmith.client.client",
}
_PACKAGES = ("client", "compile_caches", "generation", "recording", "serving", "user_code")
_HOMES = _PUBLIC | {name: f"enginesmith.{name}" for name in _PACKAGES}
__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("enginesmith")
    if name in ("build", "load_spec"):
        # Users may have packages with the names of our other top-level packages.
        from enginesmith.rooms import check_own

        check_own()
    if name not in _HOMES:
        raise AttributeError(f"module 'enginesmith' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = import_module(_HOMES[name])
    return module if _HOMES[name].rpartition(".")[2] == name else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
