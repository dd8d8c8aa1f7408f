"""What comes before a TensorRT engine runs: the options of opening it, its plugins, and its weights where they are new.

Plugins are shared libraries with further operators, named by path, on the machine that builds and on each that runs the
engine. A library is code that runs in the builder's and the server's process, so its digest is part of the build key
(as part of the toolchain): another library under the same path makes another engine, and a worker whose library differs
refuses to build.

New weights come from an ONNX model; TensorRT finds them by the names of the model's initializers. A refittable engine
takes them in the place of its own, a stripped one has none and gets them whenever it is opened. That another model is
the same but for its weights is checked before, by `builders.onnx_graphs.structure`. Refitting was never run on a GPU.
"""

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from builders.backends.tensorrt.words import builder_reason, clean
from enginesmith.core.digest import digest_of_file
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.text import join_first
from enginesmith.core.types import Untyped

KEY = "plugin "
_SHOWN = 5


@dataclass(frozen=True)
class Opening:
    """How an engine is to be opened. gpu: index of the GPU.

    streamed_budget_bytes: how much of streamed weights the GPU keeps; 0 is TensorRT's choice, None for an engine that
    does not stream.  cuda_graphs: replay a CUDA graph for each shape.  own_graphs: have TensorRT-RTX do that.
    host_code: whether the engine has code for the host (version-compatible ones do).  stripped: whether its weights
    come from the ONNX model.  prepare: called with the runtime before the engine is loaded (plugins).
    """

    gpu: int
    streamed_budget_bytes: int | None = None
    cuda_graphs: bool = False
    own_graphs: bool = False
    host_code: bool = False
    stripped: bool = False
    prepare: Callable[[Untyped], None] = lambda _runtime: None


def paths(option: str) -> tuple[str, ...]:
    """The paths in the value of the option `plugins`, which has commas between them."""
    return tuple(path for part in option.split(",") if (path := part.strip()))


def digests(libraries: Iterable[str]) -> dict[str, str]:
    """'plugin PATH' -> digest of each library, 'absent' for one that is not there: entries of a toolchain."""
    return {f"{KEY}{path}": _digest(path) for path in libraries}


def on_record(toolchain: Mapping[str, str]) -> list[tuple[str, str]]:
    """(path, digest) of each library of a toolchain."""
    return [(name.removeprefix(KEY), digest) for name, digest in toolchain.items() if name.startswith(KEY)]


def find_missing_library(libraries: Iterable[str], option: str) -> str | None:
    """The message for the first library that is not there; None when all are. option: what it calls the option."""
    path = next((path for path in libraries if not Path(path).is_file()), None)
    return path and f"plugin library {path} is not on this machine; put it there, or correct {option}"


def load(registry: Untyped, libraries: Iterable[str]) -> None:
    """Load the libraries into TensorRT's plugin registry. Raises EnginesmithError naming the one that cannot be."""
    for path in libraries:
        if registry.load_library(path) is None:
            raise EnginesmithError(
                f"plugin library {path} cannot be loaded, or its plugins are registered already; it must be built for "
                "this release of TensorRT"
            )


def _digest(path: str) -> str:
    try:
        found = os.stat(path)  # noqa: PTH116 - asked for every unit of a plan
    except OSError:
        return "absent"
    return "absent" if not stat.S_ISREG(found.st_mode) else _read(path, found.st_mtime_ns, found.st_size)


@lru_cache(64)
def _read(path: str, _changed_ns: int, _size: int) -> str:
    return digest_of_file(Path(path))


def refit(trt: Untyped, said: Untyped, loaded: Untyped, model: Path) -> None:
    """Give a loaded engine the weights of an ONNX model. Raises EnginesmithError naming what lacks or does not fit."""
    refitter = trt.Refitter(loaded, said)
    parser = trt.OnnxParserRefitter(refitter, said)
    if not parser.refit_from_file(str(model)):
        problems = [clean(parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise EnginesmithError(
            f"the weights of {model.name} do not fit: {_reason(problems, said)}; build the engine again"
        )
    missing = refitter.get_missing_weights()
    if missing or not refitter.refit_cuda_engine():
        lacks = f"{model.name} lacks {join_first(missing, _SHOWN)}" if missing else _reason([], said)
        raise EnginesmithError(f"the engine did not take the new weights: {lacks}; build it again")


def serialize_engine(trt: Untyped, loaded: Untyped, said: Untyped) -> bytes:
    """A loaded engine as bytes, with its weights, refittable as before."""
    config = loaded.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    config.set_flag(trt.SerializationFlag.INCLUDE_REFIT)
    data = loaded.serialize_with_config(config)
    if data is None:
        raise EnginesmithError(builder_reason("the refitted engine", "tensorrt", said.messages))
    return bytes(data)


def _reason(problems: list[str], said: Untyped) -> str:
    errors = [clean(text) for level, text in said.messages if "ERROR" in level]
    return "; ".join(dict.fromkeys([*problems, *errors])) or "TensorRT gives no reason"
