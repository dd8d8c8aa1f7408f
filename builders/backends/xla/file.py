"""The file of an XLA engine: StableHLO and the weights, apart, in one safetensors file. No pickle on either side.

`program` holds what `jax.export` serializes: a FlatBuffer around StableHLO's portable bytecode, which JAX promises to
read for six months and StableHLO for five years. The weights follow as bytes in the order of the function's arguments;
their types and shapes are in the header, as safetensors has no numpy types for all that ONNX knows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import IntegrityError

FORMAT = "enginesmith-xla-1"
_PROGRAM = "program"


@dataclass(frozen=True)
class XlaFile:
    """A program as `jax.export` serializes it, and its weights in the order of its arguments."""

    program: bytes
    weights: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class WeightHeader:
    """A weight's name, shape, and the name of its dtype in numpy or ml_dtypes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_engine(path: Path, program: bytes, weights: Mapping[str, np.ndarray]) -> None:
    """Write an engine of a serialized program and its weights, by name. Equal content gives equal bytes."""
    from safetensors.numpy import save_file

    tensors = {_PROGRAM: np.frombuffer(program, np.uint8)}
    fields: list[WeightHeader] = []
    for index, (name, array) in enumerate(weights.items()):
        fields.append(WeightHeader(name, array.dtype.name, array.shape))
        tensors[f"weight.{index}"] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    save_file(tensors, path, {FORMAT: json.dumps(encode(fields))})  # one entry: safetensors writes several in any order


def read_engine(path: Path) -> XlaFile:
    """Read an engine. Raises IntegrityError for a file that is none, or whose header and content do not agree."""
    import ml_dtypes
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if FORMAT not in header:
                raise IntegrityError(f"{path.name} is not an XLA engine of this release; build it again")
            weights = []
            for index, entry in enumerate(parsing.load_json(header[FORMAT])):
                weight_header = decode(entry, WeightHeader)
                dtype = np.dtype(getattr(ml_dtypes, weight_header.dtype, weight_header.dtype))
                weights.append(file.get_tensor(f"weight.{index}").view(dtype).reshape(weight_header.shape))
            return XlaFile(file.get_tensor(_PROGRAM).tobytes(), tuple(weights))
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise IntegrityError(f"{path.name} is damaged ({error}); fetch or build it again") from error
