"""The file of an XLA engine: StableHLO and the weights, apart, in one safetensors file. No pickle on either side.

`program` holds what `jax.export` serializes: a FlatBuffer around StableHLO's portable bytecode, which JAX promises to
read for six months and StableHLO for five years. The weights follow as bytes in the order of the function's arguments;
their types and shapes are in the header, as safetensors has no numpy types for all that ONNX knows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.errors import IntegrityError

FORMAT = "enginery-xla-1"
_PROGRAM = "program"


@dataclass(frozen=True)
class XlaFile:
    """A program and its weights, in the order of the program's arguments."""

    program: bytes
    weights: tuple[np.ndarray[Any, Any], ...]


def write_engine(path: Path, program: bytes, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write an engine. Equal content gives equal bytes."""
    from safetensors.numpy import save_file

    tensors = {_PROGRAM: np.frombuffer(program, np.uint8)}
    listed = []
    for index, (name, array) in enumerate(weights.items()):
        listed.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        tensors[f"weight.{index}"] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    save_file(tensors, path, {FORMAT: json.dumps(listed)})  # one entry: safetensors writes several in any order


def read_engine(path: Path) -> XlaFile:
    """Read an engine. Raises IntegrityError when it is something else, or does not agree with itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if FORMAT not in header:
                raise IntegrityError(f"{path.name} is no XLA engine of this release; build it again")
            listed = json.loads(header[FORMAT])
            weights = [_array(file.get_tensor(f"weight.{index}"), item) for index, item in enumerate(listed)]
            return XlaFile(file.get_tensor(_PROGRAM).tobytes(), tuple(weights))
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise IntegrityError(f"{path.name} is damaged ({error}); fetch or build it again") from error


def _array(found: np.ndarray[Any, Any], item: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    import ml_dtypes

    name = item["dtype"]
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    shaped: np.ndarray[Any, Any] = found.view(dtype).reshape(item["shape"])
    return shaped
