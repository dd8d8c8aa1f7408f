"""Warm-up requests out of a version's golden set: the bytes of one case's inputs, as Triton reads them from files.

A golden set is a safetensors file (https://github.com/huggingface/safetensors, "Format"): a header of JSON, then the
tensors' bytes, row-major and little-endian, which is what Triton wants of `warmup/` files. So nothing is decoded here,
and no numpy is needed.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.constraints import Count
from enginesmith.core.errors import IntegrityError
from enginesmith.core.golden import golden_prefix
from enginesmith.core.parsing import parse_json
from enginesmith.core.types import TensorSpec

# The largest golden set that is read for warm-up, in bytes: it comes whole, because only then its digest is known.
MOST_BYTES = 64 << 20
_MOST_HEADER = 16 << 20
# Safetensors' names of the types that a golden set has.
_TYPES = {
    "BOOL": "bool",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True)
class WarmupInput:
    """The bytes of one input of a warm-up request. shape: as the engine takes it."""

    shape: tuple[int, ...]
    data: bytes

    def first_row(self) -> "WarmupInput":
        """The first entry along axis 0, without that axis."""
        size = len(self.data) // self.shape[0]
        return WarmupInput(self.shape[1:], self.data[:size])


@dataclass(frozen=True)
class _StoredTensor(Excerpt):
    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def read_warmup(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, WarmupInput] | None:
    """The inputs, by name, of the first case of a golden set of which none is empty; None where there is no such case,
    and where an input is of another type than the engine's. Raises IntegrityError for what is no golden set."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MOST_HEADER:
            raise IntegrityError(f"golden set: a header of {size} bytes; {_MOST_HEADER} are the most")
        header = parse_json(stream.read(size), _MOST_HEADER)
        index = 0
        while found := _read_case(stream, 8 + size, header, golden_prefix(index, "in"), inputs):
            if all(item.data for item in found.values()):
                return found
            index += 1
    return None


def _read_case(
    stream: BinaryIO, begin: int, header: Mapping[str, object], prefix: str, inputs: Sequence[TensorSpec]
) -> dict[str, WarmupInput]:
    """The inputs of the case of that prefix; none where it lacks one, or has one of another type."""
    found: dict[str, WarmupInput] = {}
    for spec in inputs:
        told = header.get(f"{prefix}{spec.name}")
        if told is None:
            return {}
        item = decode(told, _StoredTensor, spec.name)
        shape, (first, last) = item.shape, item.data_offsets
        if _TYPES.get(item.dtype) != spec.dtype:
            return {}
        size, values, there = last - first, math.prod(shape), os.fstat(stream.fileno()).st_size
        if size < 0 or begin + last > there or (size % values if values else size):
            raise IntegrityError(
                f"golden set: input {spec.name!r} of shape {list(shape)} lies from byte {first} to {last} of {there}"
            )
        stream.seek(begin + first)
        found[spec.name] = WarmupInput(shape, stream.read(size))
    return found
