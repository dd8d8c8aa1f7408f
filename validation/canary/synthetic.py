"""Synthetic traffic for the first canary of a new service: real inputs, at arrivals drawn from a Poisson process.

Real traffic comes in bursts and repeats some inputs, so a verdict on synthetic traffic holds for such traffic alone.
Files of it say that they were made up.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, stored_arrays
from enginesmith.core.errors import DataError

START = 0.0


def made_up(
    path: Path, per_second: float, requests: int | None, batch: int, seed: int
) -> Iterator[tuple[float, dict[str, Array]]]:
    """Requests: the arrival in seconds, and by the name of each array of an .npz file `batch` samples along axis 0.

    requests: how many; None: each sample once. Raises DataError for arrays without names or with unequal counts.
    """
    arrays = {name: stored.read() for name, stored in stored_arrays(path).items()}
    if "" in arrays:
        raise DataError(f"{path} holds an array without a name; save it as .npz under the name of its input")
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or min(counts.values()) < batch:
        raise DataError(f"{path} holds {counts} samples; every input needs as many, and {batch} at least")
    groups = min(counts.values()) // batch
    rng = np.random.default_rng(seed)
    at = START
    for index in range(requests or groups):
        start = index % groups * batch
        yield at, {name: array[start : start + batch] for name, array in arrays.items()}
        at += float(rng.exponential(1.0 / per_second))
