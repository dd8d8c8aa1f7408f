"""Golden cases as two files that numpy alone reads, and a session's answers to them as text.

A bare GPU machine has no safetensors, so a golden set travels to it as

    cases.json     format, the golden set's own digest, (name, kind) of each case, the digest of the other file
    cases.npz      arrays by '00003/in/x' and '00003/out/y'; no pickles

The answers travel back, so that their drift can be measured on another machine. They are kept by the digest of the
inputs (names, types, shapes and bytes), so that none counts for other inputs; each is the bytes of the array, packed
by zlib, in base64.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from enginery.arrays import Array, stored_arrays
from enginery.core.codec import decode, encode
from enginery.core.digest import canonical_json, digest_of_file, is_digest
from enginery.core.errors import DataError, IntegrityError
from enginery.core.types import Session, Tensors, TensorSpec
from validation.golden.golden_set import Case, GoldenSet

FORMAT = 1
_BROKEN = (DataError, IntegrityError, OSError, ValueError, EOFError, RecursionError)


@dataclass(frozen=True)
class _Header:
    digest: str
    cases: tuple[tuple[str, Literal["golden", "edge"]], ...]
    arrays: str
    format: int = FORMAT


def save_cases(golden: GoldenSet, digest: str, folder: Path) -> None:
    """Write both files into a folder. digest: of the golden set in the registry."""
    arrays: dict[str, Array] = {}
    for index, case in enumerate(golden.cases):
        for side, tensors in (("in", case.inputs), ("out", case.expected)):
            arrays |= {f"{index:05d}/{side}/{name}": np.array(array, order="C") for name, array in tensors.items()}
    path = folder / "cases.npz"
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # by numpy's types any keyword may be allow_pickle
    header = _Header(digest, tuple((case.name, case.kind) for case in golden.cases), digest_of_file(path))
    (folder / "cases.json").write_bytes(canonical_json(encode(header)))


def load_cases(folder: Path) -> tuple[GoldenSet, str]:
    """The golden set that `save_cases` wrote, and its digest. Raises IntegrityError for other or damaged files."""
    try:
        header = decode(json.loads((folder / "cases.json").read_bytes()), _Header)
        if header.format != FORMAT or not is_digest(header.digest):
            raise ValueError(f"format {header.format}; this version reads {FORMAT}")
        path = folder / "cases.npz"
        if digest_of_file(path) != header.arrays:
            raise ValueError("cases.npz was changed on the way")
        arrays = {name: stored.whole() for name, stored in stored_arrays(path).items()}
        cases = tuple(
            Case(name, kind, _side(arrays, index, "in"), _side(arrays, index, "out"))
            for index, (name, kind) in enumerate(header.cases)
        )
    except _BROKEN as error:
        raise IntegrityError(f"{folder} holds no golden cases ({str(error)[:200]}); carry it anew") from error
    return GoldenSet(cases), header.digest


def _side(arrays: Mapping[str, Array], index: int, which: str) -> dict[str, Array]:
    prefix = f"{index:05d}/{which}/"
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


# Bytes of one unpacked array at most: a small text could unpack to more than memory holds.
MAX_BYTES = 256 << 20
_KINDS = "biuf"


@dataclass(frozen=True)
class PackedArray:
    """An array as text. dtype: as numpy writes it ('<f4').  data: its bytes by zlib, in base64."""

    dtype: str
    shape: tuple[int, ...]
    data: str


# Outputs by name, by the digest of the inputs.
Answers = Mapping[str, Mapping[str, PackedArray]]


class RecordingSession(Session):
    """A session that keeps every answer, in `answers`."""

    def __init__(self, session: Session, answers: dict[str, dict[str, PackedArray]] | None = None) -> None:
        self.inputs: Sequence[TensorSpec] = session.inputs
        self.outputs: Sequence[TensorSpec] = session.outputs
        self.answers = {} if answers is None else answers
        self._session = session

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Run, and keep the outputs."""
        found = self._session.run(inputs)
        self.answers[question(inputs)] = {name: pack(array) for name, array in found.items()}
        return found


class ReplaySession(Session):
    """A session that gives recorded answers. Running it raises DataError for inputs without an answer, and
    IntegrityError for a damaged answer."""

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], answers: Answers) -> None:
        self.inputs, self.outputs, self._answers = inputs, outputs, answers

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The answer that was recorded for these inputs."""
        found = self._answers.get(question(inputs))
        if found is None:
            raise DataError("no answer was recorded for this case; run the kit again with these cases")
        return {name: unpack(value) for name, value in found.items()}


def question(inputs: Tensors) -> str:
    """The digest of inputs, by which their answer is kept."""
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
