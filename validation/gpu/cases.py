"""Golden sets as two files that numpy alone reads: a bare GPU machine has no safetensors.

cases.json     format, the golden set's own digest, (name, kind) of each case, the digest of the other file
cases.npz      arrays by '00003/in/x' and '00003/out/y'; no pickles
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from enginery.arrays.arrays import Array
from enginery.arrays.npz import stored_arrays
from enginery.core.codec import decode, encode
from enginery.core.digest import canonical_json, digest_of_file, is_digest
from enginery.core.errors import DataError, IntegrityError
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
    """Write both files. digest: what names the set elsewhere."""
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
    """What `save_cases` wrote, and the golden set's digest. Raises IntegrityError for anything else."""
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
