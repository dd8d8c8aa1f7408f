"""Rounding a weight so that the errors of its rows cancel at the output, instead of each value to its nearest.

GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023), which
goes back to Optimal Brain Surgeon: input channels are rounded one after the other, and what one rounding loses is made
up for by the channels still to come, as far as the activations are correlated (`moments`).
"""

import numpy as np
from numpy.typing import NDArray

from pipeline.quantization.choice.groups import Floats

DAMPING = 0.01
BLOCK = 64
LEVELS = 127


def steps_of(matrix: Floats) -> Floats:
    """Step of each output channel: its largest magnitude is the last level."""
    reach = np.abs(matrix).max(axis=0)
    return np.asarray(np.where(reach > 0, reach, 1) / LEVELS, np.float32)


def nearest(matrix: Floats) -> Floats:
    """Every value rounded to the nearest level of its output channel."""
    steps = steps_of(matrix)
    return np.asarray(np.clip(np.rint(matrix / steps), -LEVELS, LEVELS) * steps, np.float32)


def compensated(matrix: Floats, moments: Floats) -> Floats:
    """GPTQ over an (in, out) matrix, for activations whose mean of x x' is `moments`.

    A channel that compensation would leave without its last level keeps it, so that whoever quantizes the result finds
    the same steps. Falls back to `nearest` when the moments are degenerate.
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    factor = _inverse_factor(moments[np.ix_(order, order)].astype(np.float64))
    if factor is None:
        return nearest(matrix)
    rounded = np.empty_like(matrix)
    rounded[order] = _round_rows(matrix[order].astype(np.float64), factor, steps_of(matrix).astype(np.float64))
    return _with_last_level(rounded, matrix)


def _inverse_factor(moments: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """U, upper triangular, with U'U the inverse of the damped moments."""
    damping = DAMPING * float(np.mean(np.diag(moments)))
    if not damping > 0:
        return None
    try:
        inverse = np.linalg.inv(moments + damping * np.eye(len(moments)))
        return np.asarray(np.linalg.cholesky((inverse + inverse.T) / 2).T)
    except np.linalg.LinAlgError:
        return None


def _round_rows(
    rows: NDArray[np.float64], factor: NDArray[np.float64], steps: NDArray[np.float64]
) -> NDArray[np.float64]:
    rounded = np.empty_like(rows)
    for start in range(0, len(rows), BLOCK):
        stop = min(start + BLOCK, len(rows))
        errors = np.empty((stop - start, rows.shape[1]))
        for i in range(start, stop):
            rounded[i] = np.clip(np.rint(rows[i] / steps), -LEVELS, LEVELS) * steps
            errors[i - start] = (rows[i] - rounded[i]) / factor[i, i]
            rows[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], errors[i - start])
        rows[stop:] -= factor[start:stop, stop:].T @ errors
    return rounded


def _with_last_level(rounded: Floats, matrix: Floats) -> Floats:
    top = np.argmax(np.abs(matrix), axis=0)
    columns = np.arange(matrix.shape[1])
    lost = np.abs(rounded).max(axis=0) < (LEVELS - 0.5) * steps_of(matrix)
    rounded[top[lost], columns[lost]] = matrix[top[lost], columns[lost]]
    return rounded
