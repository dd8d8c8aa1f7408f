"""Answers: their digest, and how far apart two answers to the same request are."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from enginery.core.types import Tensors

# Decibels that stand for 'equal' and for 'nothing in common'; JSON has no infinity.
EQUAL_DB, UNLIKE_DB = 999.0, -999.0


@dataclass(frozen=True)
class Difference:
    """sqnr_db: of the output that differs most; EQUAL_DB if equal.  flipped: whether an argmax (last axis) differs."""

    sqnr_db: float
    flipped: bool


def digest_of_outputs(outputs: Tensors) -> str:
    """Digest of names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(outputs):
        array = np.ascontiguousarray(outputs[name])
        sha.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def difference(candidate: Tensors, baseline: Tensors) -> Difference:
    """How far the candidate's outputs are from the baseline's. Other names, shapes, and NaN have nothing in common.

    An infinity that both have is a mask, as in validation: it is left out of the sums. One that one side has is a NaN.
    """
    if candidate.keys() != baseline.keys() or not baseline:
        return Difference(UNLIKE_DB, True)
    found = [_difference(np.asarray(candidate[name]), np.asarray(baseline[name])) for name in baseline]
    return Difference(min(item.sqnr_db for item in found), any(item.flipped for item in found))


def _difference(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    if ours.shape != theirs.shape:
        return Difference(UNLIKE_DB, True)
    if theirs.dtype.kind in "biu" or ours.dtype.kind in "biu":
        same = bool(np.array_equal(ours, theirs))
        return Difference(EQUAL_DB if same else UNLIKE_DB, not same)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    masks = np.isinf(a) | np.isinf(b)
    if np.isnan(a).any() or np.isnan(b).any() or not np.array_equal(a[masks], b[masks]):
        return Difference(UNLIKE_DB, True)
    flipped = bool(a.ndim and a.shape[-1] > 1 and a.size and (a.argmax(-1) != b.argmax(-1)).any())
    a[masks] = b[masks] = 0.0
    return Difference(_sqnr_db(float(np.sum(b * b)), float(np.sum((a - b) ** 2))), flipped)


def _sqnr_db(signal: float, noise: float) -> float:
    if noise == 0.0:
        return EQUAL_DB
    return max(UNLIKE_DB, min(EQUAL_DB, 10.0 * math.log10(signal / noise))) if signal > 0.0 else UNLIKE_DB
