"""What a session answered, kept as text and played back: so that whoever was not there can measure its drift again.

Answers are kept by the digest of what was asked (names, types, shapes and bytes of the inputs), so nothing can be given
for another question, and each is the raw bytes of the array, packed by zlib, in base64.
"""

import base64
import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.errors import DataError, IntegrityError
from enginery.core.types import Session, Tensors, TensorSpec

# Of one array, unpacked: a small text must not fill the memory of whoever reads it.
MAX_BYTES = 256 << 20
_KINDS = "biuf"


@dataclass(frozen=True)
class PackedArray:
    """An array as text. dtype: as numpy writes it ('<f4').  data: its bytes by zlib, in base64."""

    dtype: str
    shape: tuple[int, ...]
    data: str


# Outputs by name, by the digest of what was asked.
Answers = Mapping[str, Mapping[str, PackedArray]]


class RecordingSession(Session):
    """A session that keeps every answer. answers: where they go; default: a dict of its own."""

    def __init__(self, session: Session, answers: dict[str, dict[str, PackedArray]] | None = None) -> None:
        self.inputs: Sequence[TensorSpec] = session.inputs
        self.outputs: Sequence[TensorSpec] = session.outputs
        self.answers = {} if answers is None else answers
        self._session = session

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Run, and keep what came out."""
        found = self._session.run(inputs)
        self.answers[question(inputs)] = {name: pack(array) for name, array in found.items()}
        return found


class ReplaySession(Session):
    """Plays answers back. Raises DataError for a question that is not among them, IntegrityError for a broken one."""

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], answers: Answers) -> None:
        self.inputs, self.outputs, self._answers = inputs, outputs, answers

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The answer that was recorded for these inputs."""
        found = self._answers.get(question(inputs))
        if found is None:
            raise DataError("no answer was recorded for this case; run the kit again with these cases")
        return {name: unpack(value) for name, value in found.items()}


def question(inputs: Tensors) -> str:
    """Digest of inputs."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        array = np.ascontiguousarray(inputs[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def pack(array: Array) -> PackedArray:
    """An array as text."""
    whole = np.ascontiguousarray(array)
    data = base64.b64encode(zlib.compress(whole.tobytes(), 1)).decode()
    return PackedArray(whole.dtype.str, array.shape, data)


def unpack(value: PackedArray) -> Array:
    """Read what `pack` wrote. Raises IntegrityError for anything else."""
    try:
        dtype, shape = np.dtype(value.dtype), value.shape
        if dtype.kind not in _KINDS or dtype.hasobject or any(size < 0 for size in shape):
            raise ValueError(f"an array of {dtype}, {shape}")
        wanted = math.prod(shape) * dtype.itemsize
        if wanted > MAX_BYTES:
            raise ValueError(f"an array of {wanted} bytes")
        packed = base64.b64decode(value.data, validate=True)
        data = zlib.decompressobj().decompress(packed, wanted + 1)
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes where {wanted} belong")
    except (TypeError, ValueError, OverflowError, zlib.error) as error:
        raise IntegrityError(f"a recorded answer is damaged: {str(error)[:120]}") from error
    return np.frombuffer(data, dtype).reshape(shape)
