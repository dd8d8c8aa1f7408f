"""Golden cases as two files that numpy alone reads: a bare GPU machine has no safetensors.

cases.json     format, the golden set's own digest, (name, kind) of each case, the digest of the other file; of a
               model with state its states, and the cases of its sequences
cases.npz      arrays by '00003/in/x' and '00003/out/y', those of sequences after 'sequences/'; no pickles
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, stored_arrays
from enginesmith.core import parsing
from enginesmith.core.codec import OMIT_NONE, decode, encode
from enginesmith.core.digest import canonical_json, digest_of_file, is_digest
from enginesmith.core.errors import DataError, IntegrityError
from enginesmith.core.state import State
from validation.golden.golden_set import Case, CaseKind, GoldenSequences, GoldenSet

FORMAT = 1
_BROKEN = (DataError, IntegrityError, OSError, ValueError, EOFError, RecursionError)


# Before the names of the arrays of sequences.
_SEQUENCES = "sequences/"


@dataclass(frozen=True)
class _Heading:
    name: str
    kind: CaseKind


@dataclass(frozen=True)
class _SequencesDocument:
    """`GoldenSequences` without arrays."""

    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    cases: tuple[_Heading, ...]
    dim: str


@dataclass(frozen=True)
class _Header:
    digest: str
    cases: tuple[_Heading, ...]
    arrays: str
    sequences: _SequencesDocument | None = field(default=None, metadata=OMIT_NONE)
    format: int = FORMAT


def save_cases(golden: GoldenSet, digest: str, folder: Path) -> None:
    """Write both files into a folder. digest: of the golden set in the registry."""
    arrays, sequences = dict(_arrays(golden.cases)), None
    if inner := golden.sequences:
        cases = inner.golden.cases
        arrays |= {_SEQUENCES + name: array for name, array in _arrays(cases)}
        sequences = _SequencesDocument(inner.states, inner.ends, _headings(cases), inner.dim)
    path = folder / "cases.npz"
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # by numpy's types any keyword may be allow_pickle
    header = _Header(digest, _headings(golden.cases), digest_of_file(path), sequences)
    (folder / "cases.json").write_bytes(canonical_json(encode(header)))


def _headings(cases: Sequence[Case]) -> tuple[_Heading, ...]:
    return tuple(_Heading(case.name, case.kind) for case in cases)


def _arrays(cases: Sequence[Case]) -> Iterator[tuple[str, Array]]:
    for index, case in enumerate(cases):
        for side, tensors in (("in", case.inputs), ("out", case.expected)):
            yield from ((f"{index:05d}/{side}/{name}", np.array(each, order="C")) for name, each in tensors.items())


def load_cases(folder: Path) -> tuple[GoldenSet, str]:
    """The golden set that `save_cases` wrote, and its digest. Raises IntegrityError for other or damaged files."""
    try:
        header = decode(parsing.load_json((folder / "cases.json").read_bytes()), _Header)
        if header.format != FORMAT or not is_digest(header.digest):
            raise ValueError(f"format {header.format}; this version reads {FORMAT}")
        path = folder / "cases.npz"
        if digest_of_file(path) != header.arrays:
            raise ValueError("cases.npz was changed on the way")
        arrays = {name: stored.whole() for name, stored in stored_arrays(path).items()}
        cases, sequences = _cases(header.cases, arrays), None
        if told := header.sequences:
            inner = GoldenSet(_cases(told.cases, arrays, _SEQUENCES))
            sequences = GoldenSequences(told.states, told.ends, inner, dim=told.dim)
    except _BROKEN as error:
        raise IntegrityError(f"{folder} holds no golden cases ({str(error)[:200]}); carry it anew") from error
    return GoldenSet(cases, sequences=sequences), header.digest


def _cases(headings: Sequence[_Heading], arrays: Mapping[str, Array], root: str = "") -> tuple[Case, ...]:
    def side(index: int, which: str) -> dict[str, Array]:
        prefix = f"{root}{index:05d}/{which}/"
        return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}

    return tuple(
        Case(item.name, item.kind, side(index, "in"), side(index, "out")) for index, item in enumerate(headings)
    )
