"""Golden sets as two files that numpy alone reads: a bare GPU machine has no safetensors.

cases.json     format, the golden set's own digest, (name, kind) of each case, the digest of the other file
cases.npz      arrays by '00003/in/x' and '00003/out/y'; no pickles
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from enginery.arrays.npz import Array, stored_arrays
from enginery.core.digest import canonical_json, digest_of_file, is_digest
from enginery.core.errors import DataError, IntegrityError
from validation.golden.golden_set import Case, GoldenSet

FORMAT = 1
_BROKEN = (DataError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError)


def save_cases(golden: GoldenSet, digest: str, folder: Path) -> None:
    """Write both files. digest: what names the set elsewhere."""
    arrays: dict[str, Array] = {}
    kinds = []
    for index, case in enumerate(golden.cases):
        kinds.append([case.name, case.kind])
        for side, tensors in (("in", case.inputs), ("out", case.expected)):
            arrays |= {f"{index:05d}/{side}/{name}": np.array(array, order="C") for name, array in tensors.items()}
    path = folder / "cases.npz"
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # numpy's stub takes every keyword for allow_pickle
    header = {"format": FORMAT, "digest": digest, "cases": kinds, "arrays": digest_of_file(path)}
    (folder / "cases.json").write_bytes(canonical_json(header))


def load_cases(folder: Path) -> tuple[GoldenSet, str]:
    """What `save_cases` wrote, and the golden set's digest. Raises IntegrityError for anything else."""
    try:
        header: Any = json.loads((folder / "cases.json").read_bytes())
        if header["format"] != FORMAT or not is_digest(header["digest"]):
            raise ValueError(f"format {str(header['format'])[:40]}; this version reads {FORMAT}")
        path = folder / "cases.npz"
        if digest_of_file(path) != header["arrays"]:
            raise ValueError("cases.npz was changed on the way")
        arrays = {name: stored.whole() for name, stored in stored_arrays(path).items()}
        cases = tuple(_case(index, name, kind, arrays) for index, (name, kind) in enumerate(header["cases"]))
    except _BROKEN as error:
        raise IntegrityError(f"{folder} holds no golden cases ({str(error)[:200]}); carry it anew") from error
    return GoldenSet(cases), header["digest"]


def _case(index: int, name: str, kind: str, arrays: Mapping[str, Array]) -> Case:
    if not isinstance(name, str) or kind not in ("golden", "edge"):
        raise ValueError(f"case {index} is of kind {str(kind)[:40]!r}")

    def side(which: str) -> dict[str, Array]:
        prefix = f"{index:05d}/{which}/"
        return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}

    return Case(name, kind, side("in"), side("out"))  # type: ignore[arg-type]  # checked above
